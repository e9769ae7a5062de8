"""Products with sparse matrices, which are whole on every rank: the rows are those of the dense factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import ops
from synkhronos._exact.nodes import copied
from synkhronos._exact.placements import Partial, Placed, Replicate, Shard
from synkhronos._exact.rules.reductions import is_summed
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _dot(walk: Walk, node: Any) -> str | Sequence[Placed]:
    placements = [walk.placement(one) for one in node.inputs]
    for place, (dense, placement) in enumerate(zip(node.inputs, placements)):
        is_kept = isinstance(placement, Shard) and dense.ndim == 2 and placement.axis == place
        if is_kept and isinstance(placements[1 - place], Replicate):
            return [Placed(copied(node, list(map(walk.new, node.inputs)))[0], placement)]
    return "rows are contracted with a sparse matrix"


def _values(walk: Walk, node: Any) -> str | Sequence[Placed]:
    """The gradient for what a sparse matrix has: of sums over the columns of both factors."""
    *indices, dense, gradient = node.inputs
    shard = walk.shard_of([dense, gradient])
    if shard is None or shard.axis != 1 or walk.shard_of(indices) or not is_summed(node.outputs[0]):
        return "rows are contracted with a sparse matrix"
    if dense.broadcastable[1] or gradient.broadcastable[1]:
        return "a single column"
    inputs = [*map(walk.whole, indices), walk.part(dense, shard), walk.part(gradient, shard)]
    return [Placed(copied(node, inputs)[0], Partial())]


RULES: dict[type, Rule] = {
    **dict.fromkeys((ops.SparseDot, ops.StructuredDot), _dot),
    **dict.fromkeys((ops.StructuredDotGradCSC, ops.StructuredDotGradCSR), _values),
}
