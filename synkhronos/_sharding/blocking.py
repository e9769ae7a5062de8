"""Cache blocking (``blocked=True``): compute a rank's rows in a loop over blocks that fit into the CPU cache.

An all-reduce combines a value of all ranks, so each rank may first combine it over blocks of its own rows. A block is
read from memory once for all values that are computed from it, and intermediate values stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from synkhronos._backends import (
    Constant,
    T,
    TensorType,
    accumulated,
    clone,
    io_toposort,
    known_lengths,
    leaves_of,
    of_equal_length,
    stacked,
    substituted,
)
from synkhronos._graph.ops import Collective, depends_on, has_collectives_in_loop
from synkhronos._sharding.lengths import RowCounts
from synkhronos._sharding.placements import typed

#: Bytes of a block: its rows, and the intermediate values that are needed at once. A core has 1 to 2 MiB of private
#: cache.
_BYTES = 1 << 20
#: Least size of a block, relative to the values that are combined, which are set to zero and added for each block.
_TIMES_TOTALS = 4

#: How the values of two blocks are combined, for the op of an all-reduce.
_COMBINE = {"sum": T.add, "prod": T.mul, "max": T.maximum, "min": T.minimum}


def in_blocks(
    expressions: Sequence[Any],
    rows: RowCounts,
    scattered: Mapping[Any, int],
    common: Collection[Any],
    stacks: Mapping[Any, Any],
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
    stacks : dict
        Replicated inputs of which a call gets several values, with the variables in which these are stacked along
        axis 0. Each block is read once for all of them.

    Returns
    -------
    list of variables
        With `stacks`, the results for each of the values, stacked along axis 0.

    Raises
    ------
    ValueError
        If rows are combined otherwise than by all-reduces with the ops of `_COMBINE`, if a sharded value depends on
        the result of one, or if an expression remains sharded.
    """
    with_rows = {*scattered, rows.first, rows.local}
    if has_collectives_in_loop(expressions):
        raise ValueError("blocked=True: a loop of the function has collectives; build it without blocked=True")
    entering: dict[Any, str] = {}
    after: set[Any] = set()
    for node in io_toposort([], list(expressions)):
        is_after = any(one in after for one in node.inputs)
        if isinstance(node.op, Collective):
            here = [(x, op) for x, op in zip(node.inputs, node.op.ops) if x in with_rows]
            if is_after or any(op not in _COMBINE or entering.get(x, op) != op for x, op in here):
                raise ValueError(
                    f"blocked=True: {node} combines rows otherwise than by one of {', '.join(_COMBINE)}; build the "
                    "function without blocked=True"
                )
            entering.update(here)
            after.update(node.outputs)
        elif any(one in with_rows for one in node.inputs):
            if is_after:
                raise ValueError(
                    f"blocked=True: {node} needs rows together with a value of all ranks; build the function without "
                    "blocked=True"
                )
            with_rows.update(one for one in node.outputs if one not in common)
        elif is_after:
            after.update(node.outputs)
    left = [one for one in expressions if one in with_rows]
    if left or not entering:
        raise ValueError(
            f"blocked=True: {left[0]} is not combined over rows; build the function without blocked=True"
            if left
            else "blocked=True: nothing is combined over rows; build the function without blocked=True"
        )
    totals = dict(zip(entering, _accumulated(entering, rows, scattered, with_rows, stacks)))
    if stacks:
        return _of_each(expressions, totals, stacks)
    replace = {x: typed(total, x) for x, total in totals.items()}
    return list(clone(list(expressions), replace=replace, share_inputs=True))


def _of_each(expressions: Sequence[Any], totals: Mapping[Any, Any], stacks: Mapping[Any, Any]) -> list[Any]:
    """Return expressions for each of the stacked values, from the stacked values that enter all-reduces."""
    results = dict(zip(stacks, of_equal_length(list(stacks.values()))))
    for node in io_toposort([], list(expressions)):
        if isinstance(node.op, Collective):
            if any(one not in totals for one in node.inputs):
                raise ValueError(f"mapped: {node} combines values that do not depend on rows")
            results.update(zip(node.outputs, node.op(*(totals[one] for one in node.inputs), return_list=True)))
    return stacked(
        lambda *entries: clone(list(expressions), replace=dict(zip(results, entries))), list(results.values())
    )


def _accumulated(
    ops: Mapping[Any, str],
    rows: RowCounts,
    scattered: Mapping[Any, int],
    with_rows: set[Any],
    stacks: Mapping[Any, Any],
) -> list[Any]:
    """Return the values that enter all-reduces, combined over blocks by the ops of the all-reduces.

    With `stacks`, they are stacked along axis 0.
    """
    entering = list(ops)
    leaves = leaves_of(entering)
    used = [one for one in leaves if one in scattered]
    once = _replicated_tensors(entering, with_rows)
    own = _stacked(once, stacks)
    outer = [*used, rows.first, rows.local, *once]
    n_bytes = sum(
        int(np.dtype(one.dtype).itemsize) * T.prod([one.shape[i] for i in range(one.ndim) if i != axis] or [1])
        for one, axis in scattered.items()
        if one in used
    )
    n_bytes += _intermediate_bytes(entering, with_rows)
    of_totals = sum(_known_bytes(one) for one in entering if None not in known_lengths(one))
    of_block = T.constant(max(_BYTES, _TIMES_TOTALS * of_totals), dtype="int64")
    size = T.maximum(of_block // T.maximum(n_bytes, 1), 1)
    n_values = next(iter(stacks.values())).shape[0] if stacks else T.constant(1, dtype="int64")

    def block(number: Any, entry: Any, size: Any, inner: Sequence[Any]) -> list[Any]:
        of = {one: value[entry] if one in own else value for one, value in zip(outer, inner)}
        start = number * size
        stop = T.minimum(start + size, of[rows.local])
        places = {**of, rows.first: of[rows.first] + start, rows.local: stop - start}
        for one in used:
            places[one] = of[one][(slice(None),) * scattered[one] + (slice(start, stop),)]
        return [typed(value, x) for value, x in zip(substituted(leaves, entering, places), entering)]

    def step(number: Any, *arguments: Any) -> list[Any]:
        totals, (n_values, size, *inner) = arguments[: len(entering)], arguments[len(entering) :]
        if not stacks:
            return [_combined(*one) for one in zip(ops.values(), totals, block(number, 0, size, inner))]
        entry = number % n_values
        entries = [total[entry] for total in totals]
        values = block(number // n_values, entry, size, inner)
        return [T.set_subtensor(old, _combined(op, old, new)) for op, old, new in zip(ops.values(), entries, values)]

    outside = [own.get(one, one) for one in outer]
    zero = T.constant(0, dtype="int64")
    initial = [
        T.zeros_like(one) + _identity(op, one.dtype) for one, op in zip(block(zero, 0, size, outside), ops.values())
    ]
    if stacks:
        initial = [_repeated(one, n_values) for one in initial]
    n_blocks = T.maximum((rows.local + size - 1) // size, 1)
    return accumulated(step, initial, n_blocks * n_values, [n_values, size, *outside])


def _stacked(variables: Sequence[Any], stacks: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the stacked values of those variables that depend on inputs with several values."""
    own = [one for one in variables if depends_on(one, stacks)]
    others = [one for one in own if one not in stacks]
    found = {one: stack for one, stack in stacks.items() if one in own}
    if others:
        values = stacked(lambda *entries: clone(others, replace=dict(zip(stacks, entries))), list(stacks.values()))
        found.update(zip(others, values))
    return found


def _repeated(variable: Any, n: Any) -> Any:
    """Repeat a variable along a new axis 0."""
    zeros = T.alloc(T.constant(0, dtype=variable.dtype), n).dimshuffle(0, *["x"] * variable.ndim)
    return zeros + variable.dimshuffle("x", *range(variable.ndim))


def _combined(op: str, total: Any, value: Any) -> Any:
    return typed(_COMBINE[op](total, value), value)


def _identity(op: str, dtype: str) -> Any:
    """Return the number that, combined with another one, gives the other one."""
    if op in ("sum", "prod"):
        return T.constant(int(op == "prod"), dtype=dtype)
    kind = np.dtype(dtype)
    lowest, highest = (-np.inf, np.inf) if kind.kind == "f" else (np.iinfo(kind).min, np.iinfo(kind).max)
    return T.constant(lowest if op == "max" else highest, dtype=dtype)


def _intermediate_bytes(entering: Sequence[Any], with_rows: set[Any]) -> int:
    """Return the bytes per row of the values that are needed at once, at most, to compute some values.

    The number of rows is not stated by types; other lengths that they do not state count as 1.
    """
    nodes = list(io_toposort([], entering))
    last_use = {one: i for i, node in enumerate(nodes) for one in node.inputs}
    present: dict[Any, int] = {}
    most = 0
    for i, node in enumerate(nodes):
        for one in () if getattr(node.op, "view_map", None) else node.outputs:
            if one in with_rows and isinstance(one.type, TensorType) and None in known_lengths(one):
                present[one] = _known_bytes(one)
        most = max(most, sum(present.values()))
        for one in node.inputs:
            if last_use[one] == i:
                present.pop(one, None)
    return most


def _known_bytes(one: Any) -> int:
    return int(np.dtype(one.dtype).itemsize) * math.prod(n or 1 for n in known_lengths(one))


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
