"""How what both engines have travels: objects with attributes, traces, and the parts of NanGuardMode."""

from __future__ import annotations

import copyreg
import inspect
from typing import Any

__all__ = ["GUARDS", "errors_of", "new", "once"]

#: The functions that are the parts of NanGuardMode, closures that do not pickle, by the attributes of its linker.
GUARDS = {
    "NanGuardMode.__init__.<locals>.nan_check": "callback",
    "NanGuardMode.__init__.<locals>.nan_check_input": "callback_input",
}


def new(cls: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """How to make an object with these attributes, for pickle."""
    return copyreg.__newobj__, (cls,), state or None  # type: ignore[attr-defined]


def once(trace: Any, frames: dict[Any, Any]) -> Any:
    """The same trace, of frames that are the same objects wherever they come again."""
    if isinstance(trace, list):
        return [once(part, frames) for part in trace]
    return frames.setdefault(trace, trace)


def errors_of(guard: Any) -> tuple[bool, ...]:
    """What a function of NanGuardMode takes for an error: NaN, infinity, large values."""
    check = inspect.getclosurevars(guard).nonlocals["do_check_on"]
    found = inspect.getclosurevars(check).nonlocals
    return tuple(bool(found[f"{kind}_is_error"]) for kind in ("nan", "inf", "big"))
