"""Graph rewrites that join collectives, number them, and make them work in place; and graphs cut in two at collectives.

The depth of a collective is one more than the greatest depth of the collectives on which it depends. Collectives of
equal depth do not depend on each other, and are joined into one, which gets the depth as its number. A joined
collective depends on that of the previous depth, so their order is fixed. For collectives in branches of an `IfElse`
and in loops, the graph may leave the order open; it is still the same on all ranks, because all execute the same sorted
graph.

This rewrite runs after equal collectives have been merged, since collectives with different numbers are not equal.

On several nodes, reductions on which no collective depends, such as those of gradients, are all joined into one, with
the greatest of their depths, or, if a gather has this depth, with a number of its own. Its exchange goes on while other
collectives run: those of batch normalisation, say.
A reduction of concatenated arrays, such as a flat gradient, becomes reductions of these.
Each operand of a joined reduction becomes an `Operand`, so that its exchange begins when it exists. The engines
evaluate the inputs of an operation in order, each with all that it depends on. Operands that depend on fewer others
come first: in a backward pass, those of the last layers.

A collective that only one branch of an `IfElse` needs is not joined, because the joined one would be computed for both
values of the condition.

For calls in slices, a graph can be cut if no data points are needed after a collective. The first part is computed
slice by slice, and the values that enter collectives are accumulated over slices by the collectives' own ops. This is
exact: for example, a weighted average of averages is the average of all. The second part contains the collectives and
everything that depends on them. It is computed once, so ranks may have different numbers of slices. It also computes
values that enter a collective but do not depend on data points, because slicing does not divide these.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._backends import (
    AFTER_MERGES,
    BEFORE_ELEMENTWISE,
    InconsistencyError,
    ReplaceValidate,
    Rewriter,
    ancestors,
    clone,
    copied,
    copy_stack_trace,
    io_toposort,
    ops,
    register,
    retyped,
)
from synkhronos._collectives import result_dtype
from synkhronos._graph.ops.collective_op import UNNUMBERED, Collective, Operand
from synkhronos._graph.ops.rank_context import BROADCAST, GATHER, RankConstant
from synkhronos._utils.rendezvous import is_spread


class _Join(Rewriter):
    """Rewrite that joins the collectives of each depth, and numbers them."""

    def add_requirements(self, fgraph: Any) -> None:
        fgraph.attach_feature(ReplaceValidate())

    def apply(self, fgraph: Any) -> None:
        """Join the collectives of a graph."""
        spread = is_spread()
        if spread:
            _reduce_before_joins(fgraph)
        depths: dict[Any, int] = {}
        levels: dict[int, list[Any]] = {}
        always = _always_computed(fgraph)
        nodes = fgraph.toposort()
        can_wait = _reductions_that_can_wait(nodes) if spread else set()
        apart: list[Any] = []
        last: list[Any] = []
        for node in nodes:
            depth = max([depths[x.owner] for x in node.inputs if x.owner is not None], default=0)
            if isinstance(node.op, Collective):
                depth += 1
                chosen = apart if node not in always else last if node in can_wait else levels.setdefault(depth, [])
                chosen.append(node)
            depths[node] = depth
        joined_last = max(map(depths.__getitem__, last), default=0)
        if last and _is_reduction(levels.get(joined_last, [])):
            levels.setdefault(joined_last, []).extend(last)
        elif last:
            levels[1 + max(levels)] = last
        first = 1 + max(levels, default=0)
        n_ancestors = _count_ancestors(fgraph) if spread and levels else {}
        for number, nodes in [*levels.items(), *enumerate([[node] for node in apart], first)]:
            if len(nodes) == 1 and nodes[0].op.number != UNNUMBERED:
                continue
            is_early = spread and number < first and _is_reduction(nodes)
            if is_early:
                nodes = sorted(nodes, key=n_ancestors.__getitem__)
            ops = tuple([op for node in nodes for op in node.op.ops])
            labels = tuple([label for node in nodes for label in node.op.labels])
            inputs = [x for node in nodes for x in node.inputs]
            key = secrets.randbits(62) if is_early else None  # no other process must use it for another reduction
            if key is not None:
                inputs = [Operand(key, i)(x) for i, x in enumerate(inputs)]
            joined = Collective(ops, number=number, labels=labels, key=key)(*inputs, return_list=True)
            outputs = [y for node in nodes for y in node.outputs]
            _copy_traces(outputs, joined)
            fgraph.replace_all_validate(list(zip(outputs, joined)), reason="join collectives")


def _reduce_before_joins(fgraph: Any) -> None:
    """Reduce arrays before they are concatenated, instead of the result."""
    for node in fgraph.toposort():
        join = node.inputs[0].owner if isinstance(node.op, Collective) and len(node.inputs) == 1 else None
        if join is None or not isinstance(join.op, ops.Join) or not _is_reduction([node]):
            continue
        joined = ops.parts_of(join)
        if any(x.dtype != node.inputs[0].dtype for x in joined):
            continue
        reduced = [Collective(node.op.ops, labels=node.op.labels)(x) for x in joined]
        first = join.inputs[: len(join.inputs) - len(joined)]  # the axis, for most operations
        output = copied(join, [*first, *reduced])[0]
        if output.type == node.outputs[0].type:
            _copy_traces(node.outputs, [output])
            fgraph.replace_all_validate([(node.outputs[0], output)], reason="reduce before joins")


def _reductions_that_can_wait(nodes: Sequence[Any]) -> set[Any]:
    """Return those of the sorted Apply nodes that are reductions on which no collective depends."""
    found: set[Any] = set()
    needed: set[Any] = set()
    for node in reversed(nodes):
        is_collective = isinstance(node.op, Collective)
        if is_collective and node not in needed and _is_reduction([node]):
            found.add(node)
        if is_collective or node in needed or _has_inner_collectives(node.op):
            needed.update(x.owner for x in node.inputs if x.owner is not None)
    return found


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
        op = Collective(node.op.ops, tuple(places), node.op.number, node.op.labels, node.op.key)
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


def compiled_has_collectives(function: Any) -> bool:
    """Return whether a compiled function has collectives or rank constants, in inner graphs too.

    A gradient of a collective may have rank constants, but no collectives.
    """
    return any(_needs_context(node.op) for node in function.maker.fgraph.apply_nodes)


def collectives_of(function: Any) -> list[Collective]:
    """Return the collectives of a compiled function in their order of execution, except for those in inner graphs."""
    ops = [node.op for node in function.maker.fgraph.toposort() if isinstance(node.op, Collective)]
    return sorted(ops, key=lambda op: op.number)


def times_of_operands(function: Any, seconds: Mapping[Any, float]) -> list[tuple[float, float]]:
    """Return when the operands of the largest reduction of a compiled function exist, in this order.

    The function was called before. The engines evaluate the operands one by one, each with all that it depends on. On
    several nodes, those that depend on fewer others come first.

    Parameters
    ----------
    function : compiled function
    seconds : dict of Apply node to float
        Seconds of each Apply node. Those of collectives do not count.

    Returns
    -------
    list of tuple of float
        For each operand, the part of the computation after which it exists, and its part of the bytes of all
        collectives. Empty if there is no reduction.
    """
    found = [node for node in function.maker.fgraph.toposort() if isinstance(node.op, Collective)]
    reductions = [node for node in found if _is_reduction([node]) and sum(node.op.n_bytes)]
    total = sum(seconds.values()) - sum(seconds[node] for node in found)
    if not reductions or not total:
        return []
    node = max(reductions, key=lambda one: sum(one.op.n_bytes))
    n_bytes = sum(sum(one.op.n_bytes) for one in found)
    needed = [{one.owner for one in ancestors([x]) if one.owner is not None} for x in node.inputs]
    times: list[tuple[float, float]] = []
    done: set[Any] = set()
    for i in sorted(range(len(needed)), key=lambda one: len(needed[one])):
        done |= needed[i]
        elapsed = sum(seconds[one] for one in done - {*found})
        times.append((elapsed / total, node.op.n_bytes[i] / n_bytes))
    return times


def after_collectives(expressions: Iterable[Any]) -> set[Any]:
    """Return all variables in the graph of some expressions that depend on collectives."""
    found: set[Any] = set()
    for node in io_toposort([], list(expressions)):
        if isinstance(node.op, Collective) or _has_inner_collectives(node.op) or not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def has_collectives_in_loop(expressions: Iterable[Any]) -> bool:
    """Return whether expressions have collectives in inner graphs, of a Scan or an `OpFromGraph`."""
    return any(map(_has_inner_collectives, _ops_of(expressions)))


def depends_on(expression: Any, variables: Iterable[Any], *, or_rank: bool = True, but_for: Iterable[Any] = ()) -> bool:
    """Return whether an expression depends on some of the variables, or on the rank, other than through collectives.

    Parameters
    ----------
    expression : variable
    variables : iterable of variables
    or_rank : bool
        Whether to count a dependency on rank constants.
    but_for : iterable of variables
        Variables through which dependencies do not count.
    """
    sought, seen = set(variables), set(but_for)
    waiting = [expression]
    while waiting:
        var = waiting.pop()
        if var in sought or (or_rank and var.owner is not None and isinstance(var.owner.op, RankConstant)):
            return True
        if var in seen or var.owner is None or isinstance(var.owner.op, Collective):
            continue
        seen.add(var)
        waiting += var.owner.inputs
    return False


def _ops_of(expressions: Iterable[Any]) -> Iterator[Any]:
    return (var.owner.op for var in ancestors(list(expressions)) if var.owner is not None)


def _needs_context(op: Any) -> bool:
    return isinstance(op, (Collective, RankConstant)) or _has_inner_collectives(op)


def _has_inner_collectives(op: Any) -> bool:
    """Return whether the inner graph of an operation, such as a Scan, has collectives or rank constants."""
    return has_collectives(ops.inner_outputs(op))


def has_collectives(expressions: Iterable[Any]) -> bool:
    """Return whether expressions have collectives or rank constants, in inner graphs too."""
    return any(map(_needs_context, _ops_of(expressions)))


class Cut(NamedTuple):
    """Result of `cut`: the two parts of a graph."""

    before: list[int]  # positions of the expressions that the first part computes, slice by slice
    entering: list[Any]  # values that enter collectives, which the first part computes, too
    ops: list[str]  # op of the collective of each of these
    inputs: list[Any]  # inputs of the second part: the accumulated values of `entering`
    after: dict[int, Any]  # the other expressions by position, computed from `inputs` by the second part


def cut(
    expressions: Sequence[Any], names: Sequence[str], varying: Sequence[Any], common: Sequence[Any] = ()
) -> Cut | None:
    """Cut expressions at their collectives.

    Parameters
    ----------
    expressions : list of variables
    names : list of str
        Names of the expressions in messages.
    varying : list of variables
        Variables that differ between ranks or slices.
    common : list of variables
        Variables that are computed from those of ``varying``, but are equal on all ranks and in all slices.

    Returns
    -------
    Cut or None
        ``None`` if there are no collectives.

    Raises
    ------
    ValueError
        If data points are needed together with the result of a collective, or there is a collective in a loop.
    """
    if has_collectives_in_loop(expressions):
        raise ValueError(
            "num_slices: a function with collectives in a loop cannot be computed in slices; call it without"
        )
    nodes = {var.owner: None for var in ancestors(list(expressions)) if var.owner is not None}
    collectives = [node for node in nodes if isinstance(node.op, Collective)]
    if not collectives:
        return None
    entering: dict[tuple[Any, str], Any] = {}
    replace: dict[Any, Any] = {}
    for node in collectives:
        for x, op, y in zip(node.inputs, node.op.ops, node.outputs):
            if not depends_on(x, varying, or_rank=False, but_for=common):
                continue
            if _has_collectives(x):
                raise ValueError(
                    "num_slices: a collective of this function needs data points and the result of another, which is "
                    "available only after all slices; call it without num_slices"
                )
            if (x, op) not in entering:
                dtype = x.dtype if op == GATHER else str(result_dtype(np.dtype(x.dtype), op))
                entering[x, op] = retyped(y, dtype)()
            replace[y] = Collective((op,))(entering[x, op])
    before = [
        i for i, expression in enumerate(expressions) if depends_on(expression, varying, or_rank=False, but_for=common)
    ]
    for i in before:
        if _has_collectives(expressions[i]):
            raise ValueError(
                f"num_slices: {names[i]} needs data points and the result of a collective, which is available only "
                "after all slices; call the function without num_slices"
            )
    rest = [i for i in range(len(expressions)) if i not in before]
    for one in common:
        if depends_on(one, varying, or_rank=False):
            replace[one] = entering[one, "max"] = one.type()
    after = clone([expressions[i] for i in rest], replace=replace, share_inputs=True)
    variables, ops = [x for x, _ in entering], [op for _, op in entering]
    return Cut(before, variables, ops, list(entering.values()), dict(zip(rest, after)))


def _has_collectives(expression: Any) -> bool:
    return any(isinstance(op, Collective) for op in _ops_of([expression]))
