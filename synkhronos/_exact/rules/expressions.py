"""Operations that are computed as expressions, which are divided in their place: inner graphs, and some of Theano's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from synkhronos._backends import ops
from synkhronos._exact.placements import Placed
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES", "inner_graph"]


def _expressed(rewrite: Callable[[Any], Any]) -> Rule:
    """The rule of an Op that a function of the engine takes apart: of a node it makes expressions, or nothing."""

    def rule(walk: Walk, node: Any) -> str | Sequence[Placed]:
        expressions = rewrite(node)
        if not expressions or any(_differ(*pair) for pair in zip(expressions, node.outputs)):
            return "there is no expression for it"
        walk.run(expressions)
        return [Placed(walk.new(one), walk.placement(one)) for one in expressions]

    return rule


def _differ(one: Any, other: Any) -> bool:
    return (one.dtype, one.broadcastable) != (other.dtype, other.broadcastable)


def inner_graph(walk: Walk, node: Any) -> Sequence[Placed]:
    """The inner graph of an operation that is nothing else, and whose gradients the program has taken by now."""
    expressions = ops.inlined(node)
    walk.run(expressions)
    return [Placed(walk.new(one), walk.placement(one)) for one in expressions]


RULES: dict[type, Rule] = {
    ops.OpFromGraph: inner_graph,
    **{kind: _expressed(rewrite) for kind, rewrite in ops.EXPRESSED.items()},
}
