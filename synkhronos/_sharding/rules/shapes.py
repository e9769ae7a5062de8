"""Sharding rules of operations that read or use shapes.

Shapes have the serial program's values. A length that is exactly rows × k is replaced by this rank's, where it is the
sharded axis of a result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from synkhronos._backends import NO_TENSORS, T, ops
from synkhronos._sharding.placements import ONE, UNKNOWN, Length, Partial, Placed, Replicate, Shard, copied
from synkhronos._sharding.propagate import MAKERS, RULES, Propagation

__all__: list[str] = []


def _shape(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    lengths = propagation.lengths
    values = [lengths.value(length) for length in lengths.dims(node.inputs[0])]
    return [Placed(ops.MakeVector("int64")(*values), Replicate())]


def _shape_i(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    length = propagation.lengths.dims(node.inputs[0])[node.op.i]
    return [Placed(T.as_tensor_variable(propagation.lengths.value(length)), Replicate())]


def _made(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Shard an Alloc of a replicated value along the first axis of rows × k positions that repeats the value."""
    value, *sizes = node.inputs
    lengths, n_missing = propagation.lengths, len(sizes) - value.ndim
    for axis, size in enumerate(sizes):
        per_row = lengths.per_row(lengths.scalar(size))
        if per_row is not None and (axis < n_missing or value.broadcastable[axis - n_missing]):
            inputs = [propagation.new(value), *map(propagation.new, sizes)]
            inputs[1 + axis] = lengths.here(per_row)
            return [Placed(node.op(*inputs), Shard(axis, ONE, per_row))]
    return propagation.computed_whole(node)


def _made_empty(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Shard an AllocEmpty along the first axis of rows × k positions, as values to be written there probably are."""
    for axis, size in enumerate(node.inputs):
        per_row = propagation.lengths.per_row(propagation.lengths.scalar(size))
        if per_row is not None:
            inputs = [propagation.new(one) for one in node.inputs]
            inputs[axis] = propagation.lengths.here(per_row)
            return [Placed(node.op(*inputs), Shard(axis, ONE, per_row))]
    return propagation.computed_whole(node)


def _alloc(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    value, *sizes = node.inputs
    shard = propagation.placement(value)
    if not isinstance(shard, Shard):
        return propagation.computed_whole(node)
    axis = shard.axis + len(sizes) - value.ndim
    if propagation.lengths.scalar(sizes[axis]) != shard.length:
        return "it is not known to have a place for each row"
    inputs = [propagation.new(value), *(propagation.whole(size) for size in sizes)]
    inputs[1 + axis] = propagation.lengths.here(shard.outer.times(shard.inner))
    return [Placed(node.op(*inputs), shard.moved(axis))]


def _reshape(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    variable, shape = node.inputs
    placement = propagation.placement(variable)
    if isinstance(placement, Partial):
        return [Placed(copied(node, [propagation.new(variable), propagation.whole(shape)])[0], placement)]
    entries = propagation.lengths.vector(shape)
    if not isinstance(placement, Shard) or entries is None:
        return "nothing is known of the new shape"
    shard = _axis_of_rows(propagation, variable, placement, propagation.lengths.resolve(variable, entries))
    if shard is None:
        return "that rows stay together is not proven by the new shape: give it as (x.shape[0], …)"
    here = [T.constant(-1, dtype="int64") if one == UNKNOWN else propagation.lengths.value(one) for one in entries]
    here[shard.axis] = propagation.lengths.here(shard.outer.times(shard.inner))
    return [Placed(node.op(propagation.new(variable), ops.MakeVector("int64")(*here)), shard)]


def _specified(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Place a SpecifyShape, whose length along the sharded axis is compared with that of all rows."""
    variable, *lengths = node.inputs
    placement, here, entries = (
        propagation.placement(variable),
        propagation.new(variable),
        list(map(propagation.whole, lengths)),
    )
    if isinstance(placement, Shard) and not isinstance(lengths[placement.axis].type, NO_TENSORS):
        is_right = T.eq(propagation.lengths.value(placement.length), entries[placement.axis])
        here = ops.Assert(f"SpecifyShape: axis {placement.axis} has another length, for all ranks")(here, is_right)
        entries[placement.axis] = None  # not an input of the Apply node, but an argument of the operation
    return [Placed(node.op(here, *entries), placement)]


def _axis_of_rows(propagation: Propagation, variable: Any, placement: Shard, entries: Sequence[Length]) -> Shard | None:
    """Return the placement of the rows in a new shape, ``None`` if it is not proven that rows stay together.

    Elements are in row-major order. The product of all lengths before the rows, ``outer`` included, must be the same in
    both shapes; the product of those after the rows is then the same, too.
    """
    dims = propagation.lengths.dims(variable)
    before = functools.reduce(Length.times, dims[: placement.axis], placement.outer)
    for axis, length in enumerate(entries):
        per_row = propagation.lengths.per_row(length)
        if per_row is not None and propagation.lengths.is_sure(length):
            outer = before.over(functools.reduce(Length.times, entries[:axis], ONE))
            inner = None if outer is None else per_row.over(outer)
            if outer is not None and inner is not None:
                return Shard(axis, outer, inner)
        if not propagation.lengths.is_sure(length):
            return None
    return None


#: Rules for Apply nodes with an input that is not replicated.
RULES.update(
    {
        ops.Shape: _shape,
        ops.Shape_i: _shape_i,
        ops.Alloc: _alloc,
        ops.Reshape: _reshape,
        ops.SpecifyShape: _specified,
    }
)

#: Rules for Apply nodes with replicated inputs only.
MAKERS.update({ops.Alloc: _made, ops.AllocEmpty: _made_empty})
