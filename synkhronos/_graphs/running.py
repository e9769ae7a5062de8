"""Calling a compiled function again and again: what Theano's `Function.__call__` does, in the compiled core.

That takes 4 to 12 µs in Python, more than a small function itself. What an argument must be is looked at here, too; all
that is not plain (arguments to be cast, or that the function may write to; inputs with default values; a profile) is
left to Theano.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
from theano.gof.link import raise_with_op

from synkhronos._core import native

__all__ = ["run_function"]


def run_function(function: Any, subset: Sequence[int] | None = None) -> Callable[[list[Any]], list[Any]]:
    """What calls a compiled function, whose inputs are tensors, with a list of arrays; it returns (some) outputs."""
    fn = function.fn
    if subset is not None:
        some = list(subset)
        return lambda values: function(*values, output_subset=some)
    refilled = any(refeed for _, refeed, _ in function.defaults)
    written = function._check_for_aliased_inputs
    if refilled or written or function.profile or function.output_keys or getattr(fn, "need_update_inputs", True):
        return lambda values: function(*values)
    pairs = zip(function.maker.inputs, function.input_storage)
    taken = [(spec.variable.type, container) for spec, container in pairs if container.required]
    left = [
        container.storage
        for variable, container in zip(function.maker.fgraph.outputs, function.output_storage)
        if variable.owner is not None and getattr(fn, "allow_gc", False)
    ]
    runner = native.Runner(
        fn,
        tuple([(one.storage, np.dtype(type_.dtype), tuple(map(bool, type_.broadcastable))) for type_, one in taken]),
        function.n_returned_outputs,
        (*(one.storage for _, one in taken), *left),
    )

    def run(values: list[Any]) -> list[Any]:
        try:
            results = runner(values)
        except Exception:
            if hasattr(fn, "position_of_error"):  # as in Theano, with its own words
                where = fn.position_of_error
                thunk = fn.thunks[where] if hasattr(fn, "thunks") else None
                raise_with_op(fn.nodes[where], thunk, storage_map=getattr(fn, "storage_map", None))
            raise
        return function(*values) if results is None else results

    return run
