"""Cache blocking: a loop inside the compiled function, each step of which computes on rows that fit into a cache.

A value that enters an all-reduce is summed over ranks, so it may be summed over blocks of a rank's rows first. Each
block is read from memory once for all that is computed from it, and intermediate values stay in the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from synkhronos._backends import Constant, T, TensorType, accumulated, clone, io_toposort, leaves_of, substituted
from synkhronos._graph.ops import Collective, meets_in_a_loop
from synkhronos._sharding.lengths import RowCounts
from synkhronos._sharding.placements import typed

#: Bytes of rows in a block. A core has 1 to 2 MiB of private cache, which the rows share with intermediate values.
_BYTES = 1 << 20


def in_blocks(
    expressions: Sequence[Any], rows: RowCounts, scattered: Mapping[Any, int], common: Collection[Any]
) -> list[Any]:
    """Rewrite expressions so that their all-reduces take sums that a loop over blocks of rows has accumulated.

    Parameters
    ----------
    expressions : list of variables
        Expressions of a sharded graph.
    rows : Rows
    scattered : dict
        The inputs and shared variables with rows, with the axis of each.
    common : collection of variables
        Lengths along axes without rows.

    Returns
    -------
    list of variables

    Raises
    ------
    ValueError
        If rows are combined by anything but sums over ranks, before the end of the graph, or not at all.
    """
    parts = {*scattered, rows.first, rows.here}
    if meets_in_a_loop(expressions):
        raise ValueError("blocked=True: ranks meet in a loop")
    entering: dict[Any, None] = {}
    after: set[Any] = set()
    for node in io_toposort([], list(expressions)):
        met = any(one in after for one in node.inputs)
        if isinstance(node.op, Collective):
            here = [(x, op) for x, op in zip(node.inputs, node.op.ops) if x in parts]
            if met or any(op != "sum" for _, op in here):
                raise ValueError(f"blocked=True: rows meet otherwise than in sums at the end, in {node}")
            entering.update((x, None) for x, _ in here)
            after.update(node.outputs)
        elif any(one in parts for one in node.inputs):
            if met:
                raise ValueError(f"blocked=True: rows are needed once more after ranks have met, in {node}")
            parts.update(one for one in node.outputs if one not in common)
        elif met:
            after.update(node.outputs)
    left = [one for one in expressions if one in parts]
    if left or not entering:
        raise ValueError(f"blocked=True: {left[0] if left else 'nothing'} has rows, which do not meet")
    totals = _accumulated(list(entering), rows, scattered, parts)
    replace = {x: typed(total, x) for x, total in zip(entering, totals)}
    return list(clone(list(expressions), replace=replace, share_inputs=True))


def _accumulated(entering: list[Any], rows: RowCounts, scattered: Mapping[Any, int], parts: set[Any]) -> list[Any]:
    """Return the sums over blocks of the values that enter all-reduces."""
    leaves = leaves_of(entering)
    used = [one for one in leaves if one in scattered]
    outer = [*used, rows.first, rows.here, *_wholes(entering, parts)]
    n_bytes = sum(
        int(np.dtype(one.dtype).itemsize) * T.prod([one.shape[i] for i in range(one.ndim) if i != axis] or [1])
        for one, axis in scattered.items()
        if one in used
    )
    size = T.maximum(T.constant(_BYTES, dtype="int64") // T.maximum(n_bytes, 1), 1)

    def block(number: Any, size: Any, inner: Sequence[Any]) -> list[Any]:
        of = dict(zip(outer, inner))
        start = number * size
        stop = T.minimum(start + size, of[rows.here])
        places = {**of, rows.first: of[rows.first] + start, rows.here: stop - start}
        for one in used:
            places[one] = of[one][(slice(None),) * scattered[one] + (slice(start, stop),)]
        return [typed(value, x) for value, x in zip(substituted(leaves, entering, places), entering)]

    def step(number: Any, *arguments: Any) -> list[Any]:
        totals, (size, *inner) = arguments[: len(entering)], arguments[len(entering) :]
        return [total + value for total, value in zip(totals, block(number, size, inner))]

    zeros = [T.zeros_like(one) for one in block(T.constant(0, dtype="int64"), size, outer)]
    n_blocks = T.maximum((rows.here + size - 1) // size, 1)
    return accumulated(step, zeros, n_blocks, [size, *outer])


def _wholes(entering: Sequence[Any], parts: set[Any]) -> list[Any]:
    """Return the tensors that are equal for all blocks and computed once; other types are computed in the loop."""
    found: dict[Any, None] = {}
    seen: set[Any] = set()
    waiting = list(entering)
    while waiting:
        one = waiting.pop()
        if one in seen or isinstance(one, Constant):
            continue
        seen.add(one)
        if one not in parts and isinstance(one.type, TensorType):
            found[one] = None
        elif one.owner is not None:
            waiting += one.owner.inputs
        elif one not in parts:
            raise ValueError(f"blocked=True: {one} is no tensor")
    return list(found)
