"""Sharding rules of reductions: each rank reduces its own rows before an all-reduce, which sums may defer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import NotScalarConstantError, get_scalar_constant_value, ops, scalar
from synkhronos._sharding.lengths import reduced_axes
from synkhronos._sharding.placements import Partial, Placed, Replicate, Shard, copied
from synkhronos._sharding.propagate import RULES, Propagation

__all__ = ["is_summed", "is_zero"]

_DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def is_summed(variable: Any) -> bool:
    """Return whether the ranks' values of a variable can be added."""
    return variable.dtype in _DTYPES


def is_zero(variable: Any) -> bool:
    """Return whether all elements of a variable are known to be zero."""
    try:
        return bool(get_scalar_constant_value(variable) == 0)
    except NotScalarConstantError:
        return False


def _reduce(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    (variable,) = node.inputs
    placement, axes = walk.placement(variable), reduced_axes(node)
    if isinstance(placement, Partial):
        if not isinstance(node.op.scalar_op, scalar.Add) or variable.dtype != node.outputs[0].dtype:
            return walk.computed_whole(node)
        return [Placed(copied(node, [walk.new(variable)])[0], placement)]
    assert isinstance(placement, Shard)
    if placement.axis not in axes:
        shard = placement.moved(placement.axis - sum(axis < placement.axis for axis in axes))
        return [Placed(copied(node, [walk.new(variable)])[0], shard)]
    op = _op_over_ranks(node)
    if op is None:
        return f"{node.outputs[0].dtype} over rows"
    (here,) = copied(node, [walk.new(variable)])
    if op == "sum":
        return [Placed(here, Partial())]
    return [Placed(walk.reduced(node.outputs[0], here, op), Replicate())]


def _op_over_ranks(node: Any) -> str | None:
    """Return the op that combines the ranks' results into the full one, else ``None``."""
    kind, output = node.op.scalar_op, node.outputs[0]
    if output.dtype == "bool":  # reduced as uint8
        return {scalar.AND: "min", scalar.OR: "max", scalar.Maximum: "max", scalar.Minimum: "min"}.get(type(kind))
    if not is_summed(output):
        return None
    ops = {scalar.Add: "sum", scalar.Mul: "prod", scalar.Maximum: "max", scalar.Minimum: "min"}
    return ops.get(type(kind))


def _max_and_argmax(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    (variable,), (largest, place) = node.inputs, node.outputs
    placement, axes = walk.placement(variable), reduced_axes(node)
    if isinstance(placement, Partial):
        return walk.computed_whole(node)
    assert isinstance(placement, Shard)
    here = copied(node, [walk.new(variable)])
    if placement.axis not in axes:
        shard = placement.moved(placement.axis - sum(axis < placement.axis for axis in axes))
        return [Placed(one, shard) for one in here]
    if walk.is_used(place) or not is_summed(largest):
        return "argmax over rows"
    whole = walk.reduced(largest, here[0], "max")
    return [Placed(whole, Replicate()), Placed(here[1], Replicate())]  # the second output is not used


def _argmax(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    placement, axes = walk.placement(node.inputs[0]), reduced_axes(node)
    if not isinstance(placement, Shard):
        return walk.computed_whole(node)
    if placement.axis in axes:
        return "argmax over rows"
    shard = placement.moved(placement.axis - sum(axis < placement.axis for axis in axes))
    return [Placed(copied(node, [walk.new(node.inputs[0])])[0], shard)]


_REDUCTIONS = (
    *(ops.CAReduce, ops.CAReduceDtype, ops.Sum, ops.Prod, ops.ProdWithoutZeros, ops.All, ops.AnyOp),
    *(ops.Max, ops.Min),
)

RULES.update(
    {
        **dict.fromkeys(_REDUCTIONS, _reduce),
        ops.Argmax: _argmax,
        ops.MaxAndArgmax: _max_and_argmax,
    }
)
