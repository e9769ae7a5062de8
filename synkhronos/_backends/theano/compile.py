"""Compile Theano functions, read their parts, and redirect `theano.function`.

`redirect` replaces the inner function to which `theano.function` passes its arguments. It therefore also works for
programs that have imported `theano.function` under another name.
"""

# ruff: noqa: F401 (the imported names are used through this module)

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Sequence
from typing import Any, Callable

from theano import In, Out
from theano.compile.function import function as compile_function  # programs may set theano.function to synk.function
from theano.compile.function_module import Function
from theano.compile.pfunc import rebuild_collect_shared
from theano.gof.link import Container, raise_with_op

#: The arguments of `theano.function`.
KEYWORDS = tuple(inspect.signature(compile_function).parameters)
#: Whether a call of a compiled function can select the outputs to compute.
TAKES_SUBSETS = True


#: Function that returns the object (virtual machine) that executes a compiled function.
machine = operator.attrgetter("fn")


def execution(function: Any) -> tuple[Any, int, list[list[Any]]] | None:
    """Return what a call executes, its number of outputs, and the storage cells to clear afterwards.

    Return ``None`` if the function's own `__call__` is needed: for inputs with default values, inputs that the function
    may write to, outputs with keys, and profiles.
    """
    fn = function.fn
    refilled = any(refeed for _, refeed, _ in function.defaults)
    written = function._check_for_aliased_inputs
    if refilled or written or function.profile or function.output_keys or getattr(fn, "need_update_inputs", True):
        return None
    left = [
        container.storage
        for variable, container in zip(function.maker.fgraph.outputs, function.output_storage)
        if variable.owner is not None and getattr(fn, "allow_gc", False)
    ]
    return fn, function.n_returned_outputs, left


def raise_at(function: Any, node: Any, thunk: Any, storage_map: Any) -> None:
    """Raise the current exception again, with the explanation that `__call__` gives."""
    raise_with_op(node, thunk, storage_map=storage_map)


def updated_storage(function: Any) -> Sequence[list[Any]]:
    """Return the storage cells to which a call of a compiled function writes its updates."""
    if function.n_returned_outputs == len(function.output_storage):
        return ()
    pairs = zip(function.maker.expanded_inputs, function.input_storage)
    return [container.storage for spec, container in pairs if spec.update is not None]


_module: Any = importlib.import_module("theano.compile.function")
_pfunc = _module.pfunc


def plain_function(inputs: Any, **arguments: Any) -> Any:
    """Build a function as Theano does."""
    return _pfunc(params=inputs, **arguments)


def redirect(build: Callable[[dict[str, Any]], Any] | None) -> None:
    """Make `theano.function` pass its arguments to ``build``; ``None`` ends this.

    The caller of `theano.function` is the third frame above ``build``.
    """
    _module.pfunc = _pfunc
    if build is not None:
        _module.pfunc = lambda params, **arguments: build({"inputs": params, **arguments})
