"""`theano.function` on another way: what a program asks of it is built by somebody else.

It is taken where it hands its arguments on, so that programs that hold it by a name of their own are served, too. What
Theano itself and this package compile stays as it is.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable

__all__ = ["divert"]

_module: Any = importlib.import_module("theano.compile.function")
_pfunc = _module.pfunc
_builders: list[Callable[..., Any]] = []


def divert(build: Callable[..., Any]) -> Callable[[], None]:
    """Have what programs ask of the engine's ``function`` built by ``build``; returns what ends that.

    Parameters
    ----------
    build : callable
        ``build(plain, arguments)``, with what builds as ever, and with the keyword arguments for that: those of
        ``function``.
    """
    _builders.append(build)
    _module.pfunc = _built

    def end() -> None:
        _builders.remove(build)
        if not _builders:
            _module.pfunc = _pfunc

    return end


def _plain(inputs: Any, **arguments: Any) -> Any:
    return _pfunc(params=inputs, **arguments)


def _built(params: Any, **arguments: Any) -> Any:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    is_ours = caller.startswith(("theano.", "synkhronos."))
    asked = {"inputs": params, **arguments}
    return _plain(**asked) if is_ours else _builders[-1](_plain, asked)
