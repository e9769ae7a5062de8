"""Compile Theano functions, call them, read their parts, and divert `theano.function`.

`divert` makes `theano.function` of a program return a function of another builder. It replaces the inner function to
which `theano.function` passes its arguments, so programs that hold `theano.function` by another name are diverted, too.
Functions that Theano itself and this package compile stay unchanged.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any, Callable

import theano
from theano import In, Out
from theano.compile.function import function as compile_function  # programs may set theano.function to synk.function
from theano.compile.function_module import Function
from theano.compile.pfunc import rebuild_collect_shared
from theano.gof.link import Container, raise_with_op

from synkhronos._backends.common import Running

__all__ = [
    "KEYWORDS",
    "TAKES_SUBSETS",
    "Container",
    "Function",
    "In",
    "Out",
    "Running",
    "compile_function",
    "divert",
    "machine",
    "make_printable",
    "rebuilt",
    "running_parts",
    "updated_storage",
]


#: The arguments of `theano.function`.
KEYWORDS = tuple(inspect.signature(compile_function).parameters)
#: Whether each call of a compiled function can select the outputs to compute.
TAKES_SUBSETS = True


def rebuilt(
    outputs: Sequence[Any], inputs: Sequence[Any], givens: Any, updates: Any, kwargs: dict[str, Any]
) -> tuple[list[Any], list[tuple[Any, Any]], dict[Any, Any]]:
    """Return outputs and all updates (default ones, too) as the backend itself sees them, with the givens applied.

    The third part maps each of the user's variables to the variable that replaces it.
    """
    _, cloned, (clones, update_of, _, _) = rebuild_collect_shared(
        list(outputs),
        list(inputs),
        replace=givens,
        updates=updates,
        rebuild_strict=kwargs.get("rebuild_strict", True),
        copy_inputs_over=True,
        no_default_updates=kwargs.get("no_default_updates", False),
    )
    return list(cloned), list(update_of.items()), clones


def running_parts(function: Any) -> Running | None:
    """Return how to call a compiled function; ``None`` if only its own `__call__` will do.

    That is so for arguments with default values, or that the function may write to, and for profiles.
    """
    fn = function.fn
    refilled = any(refeed for _, refeed, _ in function.defaults)
    written = function._check_for_aliased_inputs
    if refilled or written or function.profile or function.output_keys or getattr(fn, "need_update_inputs", True):
        return None
    pairs = zip(function.maker.inputs, function.input_storage)
    taken = [(spec.variable.type, container.storage) for spec, container in pairs if container.required]
    left = [
        container.storage
        for variable, container in zip(function.maker.fgraph.outputs, function.output_storage)
        if variable.owner is not None and getattr(fn, "allow_gc", False)
    ]

    def explain() -> None:
        if hasattr(fn, "position_of_error"):  # the same report as by Theano's own `__call__`
            where = fn.position_of_error
            thunk = fn.thunks[where] if hasattr(fn, "thunks") else None
            raise_with_op(fn.nodes[where], thunk, storage_map=getattr(fn, "storage_map", None))

    return Running(fn, taken, function.n_returned_outputs, [*(cell for _, cell in taken), *left], explain)


def updated_storage(function: Any) -> Sequence[list[Any]]:
    """Return the storage cells to which a call of a compiled function writes its updates."""
    if function.n_returned_outputs == len(function.output_storage):
        return ()
    pairs = zip(function.maker.expanded_inputs, function.input_storage)
    return [container.storage for spec, container in pairs if spec.update is not None]


def machine(function: Any) -> Any:
    """Return the object that executes a compiled function."""
    return function.fn


def make_printable(*classes: type) -> None:
    """Have the backend's printing functions accept objects of these classes, which have a function's ``maker``."""
    theano.printing.Function = (theano.compile.Function, *classes)


_module: Any = importlib.import_module("theano.compile.function")
_pfunc = _module.pfunc
_builders: list[Callable[..., Any]] = []


def divert(build: Callable[..., Any]) -> Callable[[], None]:
    """Have functions that programs request of the backend built by ``build``; return a callable that ends this.

    Parameters
    ----------
    build : callable
        ``build(plain, arguments)``: ``plain`` is the backend's own builder, ``arguments`` are the keyword arguments of
        ``function`` for it.
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
