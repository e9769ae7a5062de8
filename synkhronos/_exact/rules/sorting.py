"""Sorting and accumulating along axes other than that of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import ops
from synkhronos._exact.lengths import constant_of
from synkhronos._exact.nodes import copied
from synkhronos._exact.placements import Placed, Shard
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _along(walk: Walk, node: Any) -> str | Sequence[Placed]:
    variable, *others = node.inputs
    shard = walk.placement(variable)
    if not isinstance(shard, Shard):
        return walk.computed_whole(node)
    axis = ops.axis_of(node)
    axis = None if axis is None else constant_of(axis)
    if axis is None or axis % variable.ndim == shard.axis or walk.shard_of(others):
        return "it works along the rows"
    inputs = [walk.new(variable), *(walk.whole(one) for one in others)]
    return [Placed(output, shard) for output in copied(node, inputs)]


RULES: dict[type, Rule] = dict.fromkeys((ops.SortOp, ops.ArgSortOp, ops.CumOp), _along)
