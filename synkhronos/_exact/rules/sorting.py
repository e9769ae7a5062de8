"""Sorting and accumulating along axes other than that of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._engine import ops
from synkhronos._exact.lengths import constant_of
from synkhronos._exact.nodes import copied
from synkhronos._exact.placements import Placed, Shard
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _along(walk: Walk, node: Any, axis: int | None) -> str | Sequence[Placed]:
    variable, *others = node.inputs
    shard = walk.placement(variable)
    if not isinstance(shard, Shard):
        return walk.computed_whole(node)
    if axis is None or axis % variable.ndim == shard.axis or walk.shard_of(others):
        return "it works along the rows"
    inputs = [walk.new(variable), *(walk.whole(one) for one in others)]
    return [Placed(output, shard) for output in copied(node, inputs)]


def _sort(walk: Walk, node: Any) -> str | Sequence[Placed]:
    return _along(walk, node, constant_of(node.inputs[1]))


def _accumulate(walk: Walk, node: Any) -> str | Sequence[Placed]:
    return _along(walk, node, node.op.axis)


RULES: dict[type, Rule] = {ops.SortOp: _sort, ops.ArgSortOp: _sort, ops.CumOp: _accumulate}
