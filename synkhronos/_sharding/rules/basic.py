"""Sharding rules of elementwise operations, and of operations that read shapes or take them as arguments.

An elementwise operation computes each element from the same element of the inputs.

Shape, Alloc, Reshape and SpecifyShape read shapes, or take them. A shape that the program reads is that of the full
value. If an argument is a length that is known to be rows × k, the result is sharded along that axis. Its local length
is k times this rank's number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from synkhronos._backends import NO_TENSORS, T, constant_value, ops, scalar
from synkhronos._sharding.lengths import constant_of
from synkhronos._sharding.placements import ONE, UNKNOWN, Length, Partial, Placed, Replicate, Shard, is_zero, placed
from synkhronos._sharding.propagate import REPLICATED_RULES, RULES, Propagation

__all__: list[str] = []

# -- elementwise operations


def _elementwise(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    shard = propagation.shard_of(node.inputs)
    if shard is None:
        return _of_partial(propagation, node)
    # Elemwise compares the lengths of axes that are not broadcastable
    inputs = [propagation.sharded(one, shard, lenient=True) for one in node.inputs]
    return placed(node, inputs, shard)


def _of_partial(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Apply an operation to partial and replicated inputs: before the all-reduce if it is linear, else after it.

    Linear are sums of partial inputs only, constant factors, and division by a constant or by the number of rows. A sum
    of a partial and a replicated input, such as ``w - rate * gradient``, is not: each rank would add ``w``. Other
    factors must follow the all-reduce, because 0 × inf on one rank could give NaN where the serial program gives inf.
    """
    placements = list(map(propagation.placement, node.inputs))
    if not set(placements) <= {Replicate(), Partial()}:  # an input is a partial maximum, minimum or product
        return propagation.computed_replicated(node)
    partial = [one == Partial() for one in placements]
    inputs, kind = list(map(propagation.new, node.inputs)), node.op.scalar_op
    # integers overflow as in the serial program only if the dtype does not change
    same = all(one.dtype == node.outputs[0].dtype for one, is_sum in zip(node.inputs, partial) if is_sum)
    is_linear = False
    if isinstance(kind, (scalar.Add, scalar.Sub)):
        is_linear = same and all(is_sum or is_zero(one) for one, is_sum in zip(node.inputs, partial))
    elif isinstance(kind, (scalar.Neg, scalar.Identity)):
        is_linear = same
    elif isinstance(kind, scalar.Cast):
        is_linear = node.inputs[0].dtype == "float32" and node.outputs[0].dtype == "float64"
    elif isinstance(kind, scalar.Mul):
        factors = [one for one, is_sum in zip(node.inputs, partial) if not is_sum]
        is_linear = same and len(factors) == len(partial) - 1 and all(map(_scales, factors))
    elif isinstance(kind, scalar.TrueDiv):
        is_linear = (
            same and partial == [True, False] and (_scales(node.inputs[1]) or _counts(propagation, node.inputs[1]))
        )
    elif isinstance(kind, scalar.Second) and not partial[1]:  # only the shape of the first input matters
        return placed(node, inputs, Replicate())
    if not is_linear:
        return propagation.computed_replicated(node)
    return placed(node, inputs, Partial())


def _scales(variable: Any) -> bool:
    """Return whether a variable is a finite constant other than zero."""
    value = constant_value(variable)
    return value is not None and 0 < abs(value) < float("inf")


def _counts(propagation: Propagation, variable: Any) -> bool:
    """Return whether a variable is the number of all rows × a positive constant, like the divisor of a mean.

    A partial sum may be divided by it before the all-reduce, although it is not a constant. It is 0 only if there are
    no rows; sums are then 0, and both orders give 0 / 0 = NaN.
    """
    node = variable.owner
    if node is not None and isinstance(node.op, ops.DimShuffle):
        return _counts(propagation, node.inputs[0])
    length = None
    if _is_cast(node) and variable.ndim == 0:
        length = propagation.lengths.scalar(node.inputs[0])
    elif node is not None and isinstance(node.op, ops.Subtensor) and _is_cast(node.inputs[0].owner):
        # T.mean casts the vector of all lengths, and selects one afterwards
        numbers = propagation.lengths.vector(node.inputs[0].owner.inputs[0])
        place = constant_of(ops.basic_index(node.inputs, node.op)[0])
        length = numbers[place] if numbers is not None and place is not None else None
    return length is not None and length.constant > 0 and set(length.symbols) == {0}


def _is_cast(node: Any) -> bool:
    return node is not None and isinstance(node.op, ops.Elemwise) and isinstance(node.op.scalar_op, scalar.Cast)


def _fill(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Replace ``fill(a, b)`` of scalars by ``b``.

    A gradient begins with such a fill of the cost, and computing ``a`` might need a collective.
    """
    value = node.inputs[-1]
    if isinstance(node.op.scalar_op, scalar.Second) and value.ndim == 0 and value.type == node.outputs[0].type:
        return [Placed(propagation.new(value), Replicate())]
    return propagation.computed_replicated(node)


# -- shapes


def _shape(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    lengths = propagation.lengths
    values = [lengths.value(length) for length in lengths.dims(node.inputs[0])]
    return [Placed(ops.MakeVector("int64")(*values), Replicate())]


def _shape_i(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    length = propagation.lengths.dims(node.inputs[0])[node.op.i]
    return [Placed(T.as_tensor_variable(propagation.lengths.value(length)), Replicate())]


def _made(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Shard an Alloc of a replicated value along the first axis of length rows × k that repeats the value.

    Shard an AllocEmpty, which has no value, along its first axis of that length, as the values written to it probably
    are sharded.
    """
    lengths, n_axes = propagation.lengths, node.outputs[0].ndim
    value = node.inputs[: len(node.inputs) - n_axes]
    repeats = [True] * n_axes
    for one in value:
        repeats[n_axes - one.ndim :] = one.broadcastable
    for axis, size in enumerate(node.inputs[len(value) :]):
        per_row = lengths.per_row(lengths.scalar(size))
        if per_row is not None and repeats[axis]:
            inputs = list(map(propagation.new, node.inputs))
            inputs[len(value) + axis] = lengths.local(per_row)
            return [Placed(node.op(*inputs), Shard(axis, ONE, per_row))]
    return propagation.computed_replicated(node)


def _alloc(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    value, *sizes = node.inputs
    shard = propagation.placement(value)
    if not isinstance(shard, Shard):
        return propagation.computed_replicated(node)
    axis = shard.axis + len(sizes) - value.ndim
    if propagation.lengths.scalar(sizes[axis]) != shard.length:
        return "its length is not known to be that of the sharded axis"
    inputs = [propagation.new(value), *(propagation.replicated(size) for size in sizes)]
    inputs[1 + axis] = propagation.lengths.local(shard.outer.times(shard.inner))
    return [Placed(node.op(*inputs), shard.moved(axis))]


def _reshape(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    variable, shape = node.inputs
    placement = propagation.placement(variable)
    if isinstance(placement, Partial):
        return placed(node, [propagation.new(variable), propagation.replicated(shape)], placement)
    entries = propagation.lengths.vector(shape)
    if not isinstance(placement, Shard) or entries is None:
        return "the new shape is unknown"
    shard = _axis_of_rows(propagation, variable, placement, propagation.lengths.resolve(variable, entries))
    if shard is None:
        return "it is not known whether the new shape keeps each row together: pass it as (x.shape[0], …)"
    here = [T.constant(-1, dtype="int64") if one == UNKNOWN else propagation.lengths.value(one) for one in entries]
    here[shard.axis] = propagation.lengths.local(shard.outer.times(shard.inner))
    return [Placed(node.op(propagation.new(variable), ops.MakeVector("int64")(*here)), shard)]


def _specified(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Shard a SpecifyShape; the length along the sharded axis is compared with that of the full value."""
    variable, *lengths = node.inputs
    placement, here = propagation.placement(variable), propagation.new(variable)
    entries = list(map(propagation.replicated, lengths))
    if isinstance(placement, Shard) and not isinstance(lengths[placement.axis].type, NO_TENSORS):
        is_right = T.eq(propagation.lengths.value(placement.length), entries[placement.axis])
        here = ops.Assert(f"SpecifyShape: axis {placement.axis} has another length, for all ranks")(here, is_right)
        entries[placement.axis] = None  # not an input of the Apply node, but an argument of the operation
    return [Placed(node.op(here, *entries), placement)]


def _axis_of_rows(propagation: Propagation, variable: Any, placement: Shard, entries: Sequence[Length]) -> Shard | None:
    """Return the placement after a reshape; ``None`` if it is not known whether each row stays together.

    Elements are in row-major order. The product of all lengths before the rows, ``outer`` included, must be the same in
    both shapes. The product of those after the rows is then the same, too.
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
        ops.Elemwise: _elementwise,
        ops.Shape: _shape,
        ops.Shape_i: _shape_i,
        ops.Alloc: _alloc,
        ops.Reshape: _reshape,
        ops.SpecifyShape: _specified,
    }
)

#: Rules for Apply nodes with replicated inputs only.
REPLICATED_RULES.update({ops.Elemwise: _fill, ops.Alloc: _made, ops.AllocEmpty: _made})
