"""A call in slices: each rank computes its share piece by piece, from the values before the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._backends import is_device_array, to_host
from synkhronos._collectives import Accumulator, DeviceAccumulator, accumulates
from synkhronos._rank.commands import Call
from synkhronos._utils.rows import Rows, Selection, pieces, take

__all__ = ["call_in_slices"]


def call_in_slices(
    call: Call,
    n_points: int,
    run: Callable[[Rows, Any], list[Any]],
    rows: tuple[Rows, Selection | None],
    updated: Sequence[Any],
    follow: Callable[..., list[Any]],
) -> list[Any]:
    """Compute in pieces, accumulate, apply the updates once, and do what follows; returns the outputs.

    Parameters
    ----------
    call : Call
    n_points : int
        How many data points there are.
    run : callable
        ``run(part, some)`` computes on rows of the scattered inputs, and of the sliceable shared variables.
    rows : tuple
        This rank's rows of both.
    updated : list of shared variables
        Those whose new values the function returns after its outputs.
    follow : callable
        ``follow(*entering)`` gives the outputs of the function in `Call.follow`.
    """
    share, sliceable = rows
    parts = pieces(n_points, call.num_slices)
    sliced: list[Any] = [None] * len(parts)
    if sliceable is not None:
        sliced = [take(sliceable, part) for part in pieces(len(sliceable), len(parts))]
    modes = [mode or "avg" for mode in call.output_modes] if call.follow is None else list(call.follow.modes)
    names = [*(f"output {i}" for i in range(len(modes))), *(f"the update of {var}" for var in updated)]
    dtypes = [None] * len(modes) + [np.dtype(var.dtype) for var in updated]
    accumulators: list[Any] = []
    for part, some in zip(parts, sliced):
        results = run(Rows(share.start + part.start, share.start + part.stop), some)
        if not accumulators:
            accumulators = [
                _accumulator(result, mode, n_points, name, dtype)
                for result, mode, name, dtype in zip(results, [*modes, *call.update_modes], names, dtypes)
            ]
        for accumulator, result in zip(accumulators, results):
            accumulator.add(result, len(part))
    results = [accumulator.result() for accumulator in accumulators]
    results, values = results[: len(modes)], results[len(modes) :]
    if call.follow is not None:  # from the values before the call, too
        n_local = len(modes) - call.follow.n_entering
        results[n_local:] = follow(*map(to_host, results[n_local:]))
        results = [results[i] for i in call.follow.order]
    for var, value in zip(updated, values):
        _graph.set_array(var, value)
    return results


def _accumulator(result: Any, mode: str, total: int, name: str, dtype: np.dtype | None) -> Any:
    """What accumulates results like this one: on the device where they are there and it can."""
    if is_device_array(result) and accumulates(result.dtype, mode, dtype):
        return DeviceAccumulator(mode, total, name)
    return Accumulator(mode, total, name, dtype)
