"""Calling a compiled function again and again: what the engine's own ``Function.__call__`` does, in the compiled core.

That takes 4 to 12 µs in Python, more than a small function itself. What an argument must be is looked at here, too; all
that is not plain (arguments to be cast, or that the function may write to; inputs with default values; a profile) is
left to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos._engine import running_parts
from synkhronos._graphs.changes import call_on_rank, syncs_of
from synkhronos._native import native

__all__ = ["run_function"]


def run_function(function: Any, subset: Sequence[int] | None = None) -> Callable[[list[Any]], list[Any]]:
    """What calls a compiled function, whose inputs are tensors, with a list of arrays; it returns (some) outputs.

    All ranks make such a call: the updates are values that all of them have.
    """
    execute, updated = _executing(function, subset), syncs_of(function)
    if not updated:
        return execute

    def run(values: list[Any]) -> list[Any]:
        results = execute(values)
        for sync in updated:
            if sync.sent is not None:
                sync.sent = sync.storage[0]
        return results

    return run


def _executing(function: Any, subset: Sequence[int] | None) -> Callable[[list[Any]], list[Any]]:
    if subset is not None:
        some = list(subset)
        return lambda values: call_on_rank(function, *values, output_subset=some)
    parts = running_parts(function)
    if parts is None:
        return lambda values: call_on_rank(function, *values)
    runner = native.FastCall(
        parts.function,
        tuple([(cell, np.dtype(type_.dtype), tuple(map(bool, type_.broadcastable))) for type_, cell in parts.inputs]),
        parts.n_outputs,
        tuple(parts.emptied),
    )
    explain = parts.explain

    def run(values: list[Any]) -> list[Any]:
        try:
            results = runner(values)
        except Exception:
            explain()
            raise
        return call_on_rank(function, *values) if results is None else results

    return run
