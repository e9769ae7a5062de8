"""Cache blocking (``blocked=True``): compute a rank's rows in a loop over blocks that fit into the CPU cache.

An all-reduce sums a value over ranks, so each rank may first sum it over blocks of its own rows. A block is read from
memory once for all values that are computed from it, and intermediate values stay in the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from synkhronos._backends import Constant, T, TensorType, accumulated, clone, io_toposort, leaves_of, substituted
from synkhronos._graph.ops import Collective, has_collectives_in_loop
from synkhronos._sharding.lengths import RowCounts
from synkhronos._sharding.placements import typed

#: Bytes of rows in a block. A core has 1 to 2 MiB of private cache, which the rows share with intermediate values.
_BYTES = 1 << 20


def in_blocks(
    expressions: Sequence[Any], rows: RowCounts, scattered: Mapping[Any, int], common: Collection[Any]
) -> list[Any]:
    """Rewrite expressions so that a loop over blocks of rows accumulates the inputs of their all-reduces.

    Parameters
    ----------
    expressions : list of variables
        Expressions of a sharded graph.
    rows : RowCounts
    scattered : dict
        Sharded inputs and shared variables, with the axis of each.
    common : collection of variables
        Lengths along axes that are not sharded.

    Returns
    -------
    list of variables

    Raises
    ------
    ValueError
        If rows are combined otherwise than by sums over ranks, if a sharded value depends on such a sum, or if an
        expression remains sharded.
    """
    with_rows = {*scattered, rows.first, rows.local}
    if has_collectives_in_loop(expressions):
        raise ValueError("blocked=True: a loop of the function has collectives; build it without blocked=True")
    entering: dict[Any, None] = {}
    after: set[Any] = set()
    for node in io_toposort([], list(expressions)):
        is_after = any(one in after for one in node.inputs)
        if isinstance(node.op, Collective):
            here = [(x, op) for x, op in zip(node.inputs, node.op.ops) if x in with_rows]
            if is_after or any(op != "sum" for _, op in here):
                raise ValueError(
                    f"blocked=True: {node} combines rows otherwise than by a sum; build the function without "
                    "blocked=True"
                )
            entering.update((x, None) for x, _ in here)
            after.update(node.outputs)
        elif any(one in with_rows for one in node.inputs):
            if is_after:
                raise ValueError(
                    f"blocked=True: {node} needs rows together with a sum over all ranks; build the function without "
                    "blocked=True"
                )
            with_rows.update(one for one in node.outputs if one not in common)
        elif is_after:
            after.update(node.outputs)
    left = [one for one in expressions if one in with_rows]
    if left or not entering:
        raise ValueError(
            f"blocked=True: {left[0]} is not summed over rows; build the function without blocked=True"
            if left
            else "blocked=True: nothing is summed over rows; build the function without blocked=True"
        )
    totals = _accumulated(list(entering), rows, scattered, with_rows)
    replace = {x: typed(total, x) for x, total in zip(entering, totals)}
    return list(clone(list(expressions), replace=replace, share_inputs=True))


def _accumulated(entering: list[Any], rows: RowCounts, scattered: Mapping[Any, int], with_rows: set[Any]) -> list[Any]:
    """Return the sums over blocks of the values that enter all-reduces."""
    leaves = leaves_of(entering)
    used = [one for one in leaves if one in scattered]
    outer = [*used, rows.first, rows.local, *_replicated_tensors(entering, with_rows)]
    n_bytes = sum(
        int(np.dtype(one.dtype).itemsize) * T.prod([one.shape[i] for i in range(one.ndim) if i != axis] or [1])
        for one, axis in scattered.items()
        if one in used
    )
    size = T.maximum(T.constant(_BYTES, dtype="int64") // T.maximum(n_bytes, 1), 1)

    def block(number: Any, size: Any, inner: Sequence[Any]) -> list[Any]:
        of = dict(zip(outer, inner))
        start = number * size
        stop = T.minimum(start + size, of[rows.local])
        places = {**of, rows.first: of[rows.first] + start, rows.local: stop - start}
        for one in used:
            places[one] = of[one][(slice(None),) * scattered[one] + (slice(start, stop),)]
        return [typed(value, x) for value, x in zip(substituted(leaves, entering, places), entering)]

    def step(number: Any, *arguments: Any) -> list[Any]:
        totals, (size, *inner) = arguments[: len(entering)], arguments[len(entering) :]
        return [total + value for total, value in zip(totals, block(number, size, inner))]

    zeros = [T.zeros_like(one) for one in block(T.constant(0, dtype="int64"), size, outer)]
    n_blocks = T.maximum((rows.local + size - 1) // size, 1)
    return accumulated(step, zeros, n_blocks, [size, *outer])


def _replicated_tensors(entering: Sequence[Any], with_rows: set[Any]) -> list[Any]:
    """Return the tensors that are the same for all blocks, and are computed once, before the loop."""
    found: dict[Any, None] = {}
    seen: set[Any] = set()
    waiting = list(entering)
    while waiting:
        one = waiting.pop()
        if one in seen or isinstance(one, Constant):
            continue
        seen.add(one)
        if one not in with_rows and isinstance(one.type, TensorType):
            found[one] = None
        elif one.owner is not None:
            waiting += one.owner.inputs
        elif one not in with_rows:
            raise ValueError(
                f"blocked=True: got the input {one}, expected a tensor; build the function without blocked=True"
            )
    return list(found)
