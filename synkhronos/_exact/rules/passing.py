"""Operations that hand their first input on: views, checks, and what only gradients see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from theano.compile.ops import DeepCopyOp, OutputGuard, Rebroadcast, ViewOp
from theano.gradient import ConsiderConstant, DisconnectedGrad, GradClip, GradScale, UndefinedGrad, ZeroGrad
from theano.tensor.elemwise import DimShuffle
from theano.tensor.extra_ops import CpuContiguous
from theano.tensor.opt import Assert

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
        placement = placement.moved(node.op.new_order.index(placement.axis))
    return [Placed(output, placement) for output in copied(node, [walk.new(node.inputs[0])])]


_PASSING = (
    ViewOp,
    OutputGuard,
    DeepCopyOp,
    Rebroadcast,
    CpuContiguous,
    ConsiderConstant,
    DisconnectedGrad,
    GradClip,
    GradScale,
    UndefinedGrad,
    ZeroGrad,
    Assert,
)

RULES: dict[type, Rule] = {**dict.fromkeys(_PASSING, _pass), DimShuffle: _shuffle}
