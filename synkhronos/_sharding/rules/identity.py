"""Sharding rules of operations that return their first input, or that an equivalent expression replaces.

The first kind has views, checks and modifiers of gradients. The second has inner graphs, and some operations of the
backends: placements are propagated through the expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from synkhronos._backends import ops
from synkhronos._sharding.placements import Placed, Shard, copied
from synkhronos._sharding.propagate import RULES, Propagation, Rule

__all__ = ["inner_graph"]


def _pass(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    first, *others = node.inputs
    inputs = [walk.new(first), *(walk.whole(one, "a condition") for one in others)]
    return [Placed(output, walk.placement(first)) for output in copied(node, inputs)]


def _shuffle(walk: Propagation, node: Any) -> str | Sequence[Placed]:
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

RULES.update({**dict.fromkeys(_PASSING, _pass), ops.DimShuffle: _shuffle})


def _expressed(rewrite: Callable[[Any], Any]) -> Rule:
    """Return the rule of an operation that a backend's function rewrites; it returns expressions, or none."""

    def rule(walk: Propagation, node: Any) -> str | Sequence[Placed]:
        expressions = rewrite(node)
        if not expressions or any(_differ(*pair) for pair in zip(expressions, node.outputs)):
            return "there is no expression for it"
        walk.run(expressions)
        return [Placed(walk.new(one), walk.placement(one)) for one in expressions]

    return rule


def _differ(one: Any, other: Any) -> bool:
    return (one.dtype, one.broadcastable) != (other.dtype, other.broadcastable)


def inner_graph(walk: Propagation, node: Any) -> Sequence[Placed]:
    """Propagate placements through an operation's inner graph, which replaces it.

    The operation must compute nothing but this graph. Gradients that it defines itself are already in the program's
    graph.
    """
    expressions = ops.inlined(node)
    walk.run(expressions)
    return [Placed(walk.new(one), walk.placement(one)) for one in expressions]


RULES.update(
    {
        ops.OpFromGraph: inner_graph,
        **{kind: _expressed(rewrite) for kind, rewrite in ops.EXPRESSED.items()},
    }
)
