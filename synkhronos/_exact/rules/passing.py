"""Operations that hand their first input on: views, checks, and what only gradients see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import ops
from synkhronos._exact.nodes import copied
from synkhronos._exact.placements import Placed, Shard
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _pass(walk: Walk, node: Any) -> str | Sequence[Placed]:
    first, *others = node.inputs
    inputs = [walk.new(first), *(walk.whole(one, "a condition") for one in others)]
    return [Placed(output, walk.placement(first)) for output in copied(node, inputs)]


def _shuffle(walk: Walk, node: Any) -> str | Sequence[Placed]:
    placement = walk.placement(node.inputs[0])
    if isinstance(placement, Shard):
        if placement.axis not in node.op.new_order:
            return "the axis that holds rows is dropped"
        placement = placement.moved(node.op.new_order.index(placement.axis))
    return [Placed(output, placement) for output in copied(node, [walk.new(node.inputs[0])])]


_PASSING = (
    ops.ViewOp,
    ops.OutputGuard,
    ops.DeepCopyOp,
    ops.Rebroadcast,
    ops.CpuContiguous,
    ops.ConsiderConstant,
    ops.DisconnectedGrad,
    ops.GradClip,
    ops.GradScale,
    ops.UndefinedGrad,
    ops.ZeroGrad,
    ops.Assert,
    ops.CheckAndRaise,
)

RULES: dict[type, Rule] = {**dict.fromkeys(_PASSING, _pass), ops.DimShuffle: _shuffle}
