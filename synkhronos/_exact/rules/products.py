"""Products of matrices: where rows are contracted, each rank has its part of a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._engine import ops
from synkhronos._exact.nodes import copied
from synkhronos._exact.placements import Partial, Placed, Shard
from synkhronos._exact.rules.reductions import is_summed
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _dot(walk: Walk, node: Any) -> str | Sequence[Placed]:
    """Matrices lie along the last axes; none before them has rows."""
    a, b = node.inputs
    of_a, of_b = walk.placement(a), walk.placement(b)
    contracted, contracted_of_b = a.ndim - 1, max(b.ndim - 2, 0)
    reason = "both factors have rows that are not contracted"
    if isinstance(of_a, Shard) and of_a.axis != contracted:
        return [Placed(copied(node, [walk.new(a), walk.whole(b, reason)])[0], of_a)]
    if isinstance(of_b, Shard) and of_b.axis != contracted_of_b:
        axis = node.outputs[0].ndim - 1
        return [Placed(copied(node, [walk.whole(a, reason), walk.new(b)])[0], of_b.moved(axis))]
    if not (isinstance(of_a, Shard) or isinstance(of_b, Shard)):
        return walk.computed_whole(node)
    if not is_summed(node.outputs[0]):
        return f"a product of {node.outputs[0].dtype} over rows"
    # Dot compares the lengths; an axis of length 1 cannot have been cut
    if isinstance(of_a, Shard):
        inputs = [walk.new(a), walk.part(b, of_a.moved(contracted_of_b), lenient=True)]
    else:
        assert isinstance(of_b, Shard)
        inputs = [walk.part(a, of_b.moved(contracted), lenient=True), walk.new(b)]
    if b.broadcastable[contracted_of_b] or a.broadcastable[contracted]:
        return "rows that are contracted with an axis of length 1"
    return [Placed(copied(node, inputs)[0], Partial())]


def _batched_dot(walk: Walk, node: Any) -> str | Sequence[Placed]:
    shard = walk.shard_of(node.inputs)
    if shard is None:
        return walk.computed_whole(node)
    if shard.axis != 0 or any(one.broadcastable[0] for one in node.inputs):
        return "its rows do not lie along the axis of the batch"
    inputs = [walk.part(one, shard) for one in node.inputs]
    return [Placed(copied(node, inputs)[0], shard)]


def _blockwise(walk: Walk, node: Any) -> str | Sequence[Placed]:
    """An operation that is done for each place along some first axes by itself."""
    shard = walk.shard_of(node.inputs)
    if shard is None:
        return walk.computed_whole(node)
    if shard.axis < node.op.batch_ndim(node):
        inputs = [walk.part(one, shard) for one in node.inputs]
        return [Placed(output, shard) for output in copied(node, inputs)]
    return _dot(walk, node) if type(node.op.core_op) is ops.Dot else "its rows do not lie along the axes of the batch"


RULES: dict[type, Rule] = {ops.Dot: _dot, ops.BatchedDot: _batched_dot, ops.Blockwise: _blockwise}
