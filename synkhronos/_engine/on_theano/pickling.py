"""What of compiled functions travels to other processes, and what is defined by name.

What travels of a function is its maker (the optimised graph; nothing is optimised again) and which storage cell feeds
which input. Of the variables of a graph, and of their tags, only what Theano itself puts there travels: other libraries
hang whole layers on them (Keras its ``_keras_history``, Blocks its annotations), which the ranks may be unable to load.
"""

from __future__ import annotations

import copyreg
import inspect
from typing import Any

from theano import Apply, Variable
from theano.compile.nanguardmode import NanGuardMode
from theano.compile.ops import FromFunctionOp
from theano.gof.op import PureOp
from theano.gof.type import PureType
from theano.gof.utils import scratchpad

__all__ = ["FromFunctionOp", "PureOp", "PureType", "pack", "reduced", "unpack"]

#: What Theano puts on the variables, the nodes and the tags of a compiled graph, as far as other processes need it.
_OF_VARIABLES = frozenset(
    ["auto_name", "clients", "container", "data", "fgraph", "index", "name", "owner", "tag", "type"]
)
_OF_NODES = frozenset(["deps", "fgraph", "inputs", "op", "outputs", "tag"])
_OF_TAGS = frozenset(
    [
        "context_name",
        "indestructible",
        "is_rng",
        "nan_guard_mode_check",
        "target",
        "trace",
        "unique_value",
        "values_eq_approx",
    ]
)


def reduced(obj: Any, frames: dict[Any, Any]) -> Any:
    """How to make an object of Theano's, for pickle; ``NotImplemented`` for others.

    ``frames`` are those of traces, which are the same objects wherever they come again: pickled once each.
    """
    if isinstance(obj, (Variable, Apply)):
        # a class of the user's own may need all that it has
        if type(obj).__module__.startswith("theano."):
            known = _OF_NODES if isinstance(obj, Apply) else _OF_VARIABLES
            return _new(type(obj), {name: value for name, value in obj.__dict__.items() if name in known})
    elif isinstance(obj, scratchpad):
        tags = {name: value for name, value in obj.__dict__.items() if name in _OF_TAGS}
        if "trace" in tags:
            tags["trace"] = _once(tags["trace"], frames)
        return _new(scratchpad, tags)
    elif inspect.isfunction(obj) and obj.__qualname__ in _GUARDS:
        return _guard, (_GUARDS[obj.__qualname__], _errors_of(obj))
    return NotImplemented


def _new(cls: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """How to make an object with these attributes, for pickle."""
    return copyreg.__newobj__, (cls,), state or None  # type: ignore[attr-defined]


def _once(trace: Any, frames: dict[Any, Any]) -> Any:
    """The same trace, of frames that are the same objects wherever they come again."""
    if isinstance(trace, list):
        return [_once(part, frames) for part in trace]
    return frames.setdefault(trace, trace)


#: The functions that are the parts of NanGuardMode, closures that do not pickle, by the attributes of its linker.
_GUARDS = {
    "NanGuardMode.__init__.<locals>.nan_check": "callback",
    "NanGuardMode.__init__.<locals>.nan_check_input": "callback_input",
}


def _errors_of(guard: Any) -> tuple[bool, ...]:
    """What a function of NanGuardMode takes for an error: NaN, infinity, large values."""
    check = inspect.getclosurevars(guard).nonlocals["do_check_on"]
    found = inspect.getclosurevars(check).nonlocals
    return tuple(bool(found[f"{kind}_is_error"]) for kind in ("nan", "inf", "big"))


def _guard(attribute: str, errors: tuple[bool, ...]) -> Any:
    return getattr(NanGuardMode(*errors).linker, attribute)


def pack(function: Any) -> Any:
    """What travels of a compiled function."""
    # a container stands for "use this storage"; other inputs start with their default value, or with nothing
    cells = [
        container if spec.shared or spec.implicit else default
        for spec, container, (_, _, default) in zip(function.maker.inputs, function.input_storage, function.defaults)
    ]
    return function.maker, cells, function.trust_input


def unpack(packed: Any) -> Any:
    """The compiled function of which this has travelled."""
    maker, cells, trust_input = packed
    function = maker.create(cells, trustme=True)
    function.trust_input = trust_input
    return function
