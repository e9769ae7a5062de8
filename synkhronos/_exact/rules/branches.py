"""IfElse: ranks must take the same branch, so that the condition is whole; what both branches give is placed alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import TensorType, ops
from synkhronos._exact.nodes import copied
from synkhronos._exact.placements import Partial, Placed, Placement, Replicate, Shard
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _if_else(walk: Walk, node: Any) -> str | Sequence[Placed]:
    n = node.op.n_outs
    condition, pairs = node.inputs[0], list(zip(node.inputs[1 : 1 + n], node.inputs[1 + n :]))
    placements = [_of_both(walk, pair) for pair in pairs]
    branches = [[_placed(walk, pair[i], placement) for pair, placement in zip(pairs, placements)] for i in (0, 1)]
    outputs = copied(node, [walk.whole(condition, "a condition"), *branches[0], *branches[1]])
    for output, pair in zip(node.outputs, pairs):
        if isinstance(output.type, TensorType):
            for axis, (one, other) in enumerate(zip(*map(walk.lengths.dims, pair))):
                if one == other and not output.broadcastable[axis]:
                    walk.lengths.set_length(output, axis, one)
    return [Placed(output, placement) for output, placement in zip(outputs, placements)]


def _of_both(walk: Walk, pair: Sequence[Any]) -> Placement:
    """A placement that both can have: rows, where both are known to have as many places for them."""
    found = [walk.placement(one) for one in pair]
    shard = walk.shard_of(pair)
    if shard is not None:
        lengths = {walk.lengths.dims(one)[shard.axis] for one in pair}
        return shard if lengths == {shard.length} else Replicate()
    return Partial() if found == [Partial(), Partial()] else Replicate()


def _placed(walk: Walk, variable: Any, placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return walk.part(variable, placement)
    return walk.new(variable) if isinstance(placement, Partial) else walk.whole(variable, "another branch is whole")


RULES: dict[type, Rule] = {ops.IfElse: _if_else}
