"""Graph rewrites that join collectives, number them, and make them work in place.

The depth of a collective is one more than the greatest depth of the collectives on which it depends. Collectives of
equal depth do not depend on each other, and are joined into one, which gets the depth as its number. A joined
collective depends on that of the previous depth, so their order is fixed. For collectives in branches of an `IfElse`
and in loops, the graph may leave the order open; it is still the same on all ranks, because all execute the same sorted
graph.

This rewrite runs after equal collectives have been merged, since collectives with different numbers are not equal.

On several nodes, each operand of a joined reduction becomes an `Operand`, so that its exchange begins when it exists.
The engines evaluate the inputs of an operation in order, each with all that it depends on. Operands that depend on
fewer others come first: in a backward pass, those of the last layers.

A collective that only one branch of an `IfElse` needs is not joined, because the joined one would be computed for both
values of the condition.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

from synkhronos._backends import (
    AFTER_MERGES,
    BEFORE_ELEMENTWISE,
    InconsistencyError,
    ReplaceValidate,
    Rewriter,
    copy_stack_trace,
    ops,
    register,
)
from synkhronos._graph.ops.collective_op import UNNUMBERED, Collective, Operand
from synkhronos._graph.ops.rank_context import BROADCAST, GATHER
from synkhronos._utils.rendezvous import count_launched

__all__: list[str] = []

_IS_SPREAD = count_launched(os.environ) > 1  # over several nodes


class _Join(Rewriter):
    """Rewrite that joins the collectives of each depth, and numbers them."""

    def add_requirements(self, fgraph: Any) -> None:
        fgraph.attach_feature(ReplaceValidate())

    def apply(self, fgraph: Any) -> None:
        """Join the collectives of a graph."""
        depths: dict[Any, int] = {}
        levels: dict[int, list[Any]] = {}
        always = _always_computed(fgraph)
        apart = []
        for node in fgraph.toposort():
            depth = max([depths[x.owner] for x in node.inputs if x.owner is not None], default=0)
            if isinstance(node.op, Collective):
                depth += 1
                if node in always:
                    levels.setdefault(depth, []).append(node)
                else:
                    apart.append(node)
            depths[node] = depth
        first = 1 + max(levels, default=0)
        n_ancestors = _count_ancestors(fgraph) if _IS_SPREAD and levels else {}
        for depth, nodes in [*levels.items(), *enumerate([[node] for node in apart], first)]:
            if len(nodes) == 1 and nodes[0].op.number != UNNUMBERED:
                continue
            is_early = _IS_SPREAD and depth < first and _is_reduction(nodes)
            if is_early:
                nodes = sorted(nodes, key=n_ancestors.__getitem__)
            ops = tuple([op for node in nodes for op in node.op.ops])
            labels = tuple([label for node in nodes for label in node.op.labels])
            inputs = [x for node in nodes for x in node.inputs]
            if is_early:
                key = secrets.randbits(62)  # no other process must use it for another reduction
                inputs = [Operand(key, i)(x) for i, x in enumerate(inputs)]
            joined = Collective(ops, number=depth, labels=labels)(*inputs, return_list=True)
            outputs = [y for node in nodes for y in node.outputs]
            _copy_traces(outputs, joined)
            fgraph.replace_all_validate(list(zip(outputs, joined)), reason="join collectives")


def _is_reduction(nodes: Sequence[Any]) -> bool:
    return all(op not in (GATHER, BROADCAST) for node in nodes for op in node.op.ops)


def _count_ancestors(fgraph: Any) -> dict[Any, int]:
    """Return for each Apply node on how many others its value depends."""
    sets: dict[Any, int] = {}  # sets of nodes, as bits of integers
    for i, node in enumerate(fgraph.toposort()):
        found = 1 << i
        for x in node.inputs:
            if x.owner is not None:
                found |= sets[x.owner]
        sets[node] = found
    return {node: bin(found).count("1") for node, found in sets.items()}


def _copy_traces(old: Sequence[Any], new: Sequence[Any]) -> None:
    for pair in zip(old, new):  # one by one: given lists, each output would get the traces of all
        copy_stack_trace(*pair)


def _always_computed(fgraph: Any) -> set[Any]:
    """Return the Apply nodes that are computed for all values of the conditions of `IfElse`."""
    waiting = [var.owner for var in fgraph.outputs]
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            needed = node.inputs[:1] if isinstance(node.op, ops.IfElse) else node.inputs
            waiting += [x.owner for x in needed]
    return found


class _WorkInPlace(Rewriter):
    """Rewrite that makes collectives reduce in place if no other Apply node needs the input."""

    def add_requirements(self, fgraph: Any) -> None:
        fgraph.attach_feature(ReplaceValidate())

    def apply(self, fgraph: Any) -> None:
        """Make the collectives of a graph work in place."""
        for node in fgraph.toposort():
            if isinstance(node.op, Collective) and not node.op.inplace:
                places = [i for i, x in enumerate(node.inputs) if _may_change(node, i, x)]
                if places and self._try(fgraph, node, places) is None:
                    for place in places:
                        node = self._try(fgraph, node, [*node.op.inplace, place]) or node

    def _try(self, fgraph: Any, node: Any, places: list[int]) -> Any:
        op = Collective(node.op.ops, tuple(places), node.op.number, node.op.labels)
        outputs = op(*node.inputs, return_list=True)
        _copy_traces(node.outputs, outputs)
        try:
            fgraph.replace_all_validate(list(zip(node.outputs, outputs)), reason="collectives in place")
        except InconsistencyError:
            return None
        return outputs[0].owner


def _may_change(node: Any, i: int, x: Any) -> bool:
    given = x.owner.inputs[0] if x.owner is not None and isinstance(x.owner.op, Operand) else x
    is_own = given.owner is not None and sum(x is other for other in node.inputs) == 1
    return is_own and node.op.ops[i] not in (GATHER, BROADCAST) and node.outputs[i].dtype == x.dtype


register("synkhronos_join_collectives", _Join(), AFTER_MERGES, "fast_run", "fast_compile")
register("synkhronos_collectives_in_place", _WorkInPlace(), BEFORE_ELEMENTWISE, "fast_run", "inplace")
