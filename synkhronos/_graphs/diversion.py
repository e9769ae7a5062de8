"""`theano.function` on another way: what a program asks of it is built by somebody else.

It is taken where it hands its arguments on, so that programs that hold it by a name of their own are served, too. What
Theano itself and this package compile stays as it is.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable

from theano.gof.graph import ancestors

__all__ = ["divert", "variables_used"]

_module: Any = importlib.import_module("theano.compile.function")
_plain = _module.pfunc
_builders: list[Callable[..., Any]] = []


def divert(build: Callable[..., Any]) -> Callable[[], None]:
    """Have what programs ask of `theano.function` built by ``build``; returns what ends that.

    Parameters
    ----------
    build : callable
        ``build(plain, arguments)``, with what builds as ever, and with the keyword arguments for that.
    """
    _builders.append(build)
    _module.pfunc = _built

    def end() -> None:
        _builders.remove(build)
        if not _builders:
            _module.pfunc = _plain

    return end


def _built(**arguments: Any) -> Any:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    is_ours = caller.startswith(("theano.", "synkhronos."))
    return _plain(**arguments) if is_ours else _builders[-1](_plain, arguments)


def variables_used(arguments: dict[str, Any]) -> list[Any]:
    """The variables that a function will use, in some order that depends on the program alone.

    Parameters
    ----------
    arguments : dict
        As `divert` hands them on.
    """
    outputs, givens, updates = (arguments[name] or [] for name in ("outputs", "givens", "updates"))
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    pairs = [pair for pairs in (givens, updates) for pair in (pairs.items() if hasattr(pairs, "items") else pairs)]
    found = [*(getattr(output, "variable", output) for output in outputs), *(new for _, new in pairs)]
    return [*(old for old, _ in pairs), *ancestors([one for one in found if hasattr(one, "owner")])]
