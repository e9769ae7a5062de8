"""Softmax, cross-entropy and their gradients, which compute each row of a matrix by itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from synkhronos._backends import ops
from synkhronos._exact.nodes import copied
from synkhronos._exact.placements import Placed, Replicate
from synkhronos._exact.rules.expressions import inner_graph
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _row_by_row(*whole: int, broadcasts: Collection[int] = ()) -> Rule:
    """The rule of an Op whose inputs and outputs have the rows along axis 0.

    Parameters
    ----------
    *whole : int
        Places of inputs that have no rows.
    broadcasts : collection of int
        Places of inputs that the Op broadcasts where they turn out to have length 1.
    """

    def rule(walk: Walk, node: Any) -> str | Sequence[Placed]:
        shard = walk.shard_of(node.inputs)
        if shard is None:
            return walk.computed_whole(node)
        if shard.axis != 0 or any(not isinstance(walk.placement(node.inputs[i]), Replicate) for i in whole):
            return "its rows do not lie along axis 0"
        if any(one.ndim and one.broadcastable[0] for i, one in enumerate(node.inputs) if i not in whole):
            return "one of its inputs has a single row"
        inputs = [
            walk.new(one) if i in whole else walk.part(one, shard, broadcasts=i in broadcasts)
            for i, one in enumerate(node.inputs)
        ]
        return [Placed(output, shard) for output in copied(node, inputs)]

    return rule


def _softmax(walk: Walk, node: Any) -> str | Sequence[Placed]:
    """Where rows are added, an inner graph is divided, if there is one."""
    shard = walk.shard_of(node.inputs)
    if shard is None:
        return walk.computed_whole(node)
    if shard.axis not in ops.softmax_axes(node):
        return [Placed(copied(node, [walk.new(node.inputs[0])])[0], shard)]
    return inner_graph(walk, node) if ops.inner_outputs(node.op) else "its rows do not lie along axis 0"


RULES: dict[type, Rule] = {
    ops.Softmax: _softmax,
    ops.LogSoftmax: _softmax,
    ops.SoftmaxGrad: _row_by_row(),
    ops.SoftmaxWithBias: _row_by_row(1),
    ops.CrossentropyCategorical1Hot: _row_by_row(),
    ops.CrossentropyCategorical1HotGrad: _row_by_row(),
    ops.CrossentropySoftmaxArgmax1HotWithBias: _row_by_row(1),
    ops.CrossentropySoftmax1HotWithBiasDx: _row_by_row(broadcasts=(0,)),
}
