"""What a graph tells of its collectives.

A graph in two, for calls in slices: what each rank computes on its data points, and what all make of that together.

Where collectives come last, the first part can be computed slice by slice, and what enters the collectives accumulated
by their own ops: averages of averages, weighted, are averages of the whole. The second part, with the collectives and
all that follows, is then computed once; so it is no matter how many slices a rank has. What enters a collective and
needs no data point is computed there, too: a slice would be no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._backends import ancestors, clone, io_toposort, ops, retyped
from synkhronos._collectives import result_dtype
from synkhronos._graph.ops.collective_op import Collective
from synkhronos._graph.ops.rank_context import GATHER
from synkhronos._graph.ops.row_counts import Known

__all__ = [
    "Cut",
    "after_meetings",
    "collectives_of",
    "cut",
    "depends_on",
    "expresses_meetings",
    "meets",
    "meets_in_a_loop",
    "meets_within",
]


def meets(function: Any) -> bool:
    """Whether a compiled function has collectives, in inner graphs too, or numbers that a rank knows of itself.

    The gradient of a collective can have such numbers alone.
    """
    return any(_needs_standing(node.op) or meets_within(node.op) for node in function.maker.fgraph.apply_nodes)


def collectives_of(function: Any) -> list[Collective]:
    """The collectives in a compiled function, in the order of their meetings; those of inner graphs left out."""
    ops = [node.op for node in function.maker.fgraph.toposort() if _is_collective(node.op)]
    return sorted(ops, key=lambda op: op.number)


def after_meetings(expressions: Iterable[Any]) -> set[Any]:
    """The variables that come of collectives, among all that expressions are computed of."""
    found: set[Any] = set()
    for node in io_toposort([], list(expressions)):
        if _is_collective(node.op) or meets_within(node.op) or not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def meets_in_a_loop(expressions: Iterable[Any]) -> bool:
    """Whether expressions have collectives in inner graphs: in a scan, or in what the optimizer may dissolve."""
    return any(var.owner is not None and meets_within(var.owner.op) for var in ancestors(list(expressions)))


def depends_on(expression: Any, variables: Iterable[Any], *, or_rank: bool = True, but_for: Iterable[Any] = ()) -> bool:
    """Whether an expression depends, otherwise than through collectives, on some of the variables, or on the rank.

    What it needs of them for the sake of the variables ``but_for`` does not count.
    """
    sought, seen = set(variables), set(but_for)
    waiting = [expression]
    while waiting:
        var = waiting.pop()
        if var in sought or (or_rank and var.owner is not None and isinstance(var.owner.op, Known)):
            return True
        if var in seen or var.owner is None or _is_collective(var.owner.op):
            continue
        seen.add(var)
        waiting += var.owner.inputs
    return False


def _is_collective(op: Any) -> bool:
    return isinstance(op, Collective)


def _needs_standing(op: Any) -> bool:
    return isinstance(op, (Collective, Known))


def meets_within(op: Any) -> bool:
    """Whether the inner graph of an op, of a scan say, has collectives."""
    return expresses_meetings(ops.inner_outputs(op))


def expresses_meetings(expressions: Iterable[Any]) -> bool:
    """Whether there are collectives in expressions, in inner graphs too."""
    waiting, seen = list(expressions), set()
    while waiting:
        var = waiting.pop()
        if var in seen or var.owner is None:
            continue
        if _needs_standing(var.owner.op) or meets_within(var.owner.op):
            return True
        seen.add(var)
        waiting += var.owner.inputs
    return False


class Cut(NamedTuple):
    """What `cut` makes of some expressions."""

    before: list[int]  # the expressions, by position, that are computed slice by slice
    entering: list[Any]  # what enters the collectives
    ops: list[str]  # of these
    inputs: list[Any]  # variables for what comes of them
    after: dict[int, Any]  # the other expressions, of the inputs


def cut(
    expressions: Sequence[Any], names: Sequence[str], apart: Sequence[Any], common: Sequence[Any] = ()
) -> Cut | None:
    """Cut expressions where they enter collectives; ``None`` if there are none.

    Parameters
    ----------
    expressions : list of variables
    names : list of str
        What they are called in messages.
    apart : list of variables
        What is not the same on all ranks, and not in all slices.
    common : list of variables
        What is, though it is computed of that.

    Raises
    ------
    ValueError
        If collectives of data points do not come last.
    """
    nodes = {var.owner: None for var in ancestors(list(expressions)) if var.owner is not None}
    if any(meets_within(node.op) for node in nodes):
        raise ValueError("num_slices: a function with collectives in a loop cannot be computed in slices")
    collectives = [node for node in nodes if isinstance(node.op, Collective)]
    if not collectives:
        return None
    entering: dict[tuple[Any, str], Any] = {}
    replace: dict[Any, Any] = {}
    for node in collectives:
        for x, op, y in zip(node.inputs, node.op.ops, node.outputs):
            if not depends_on(x, apart, or_rank=False, but_for=common):
                continue
            if _has_collectives(x):
                raise ValueError(
                    "num_slices: a collective of this function needs data points and the result of another, which is "
                    "there when all slices are computed. Call it without slices"
                )
            if (x, op) not in entering:
                dtype = x.dtype if op == GATHER else str(result_dtype(np.dtype(x.dtype), op))
                entering[x, op] = retyped(y, dtype)()
            replace[y] = Collective((op,))(entering[x, op])
    before = [
        i for i, expression in enumerate(expressions) if depends_on(expression, apart, or_rank=False, but_for=common)
    ]
    for i in before:
        if _has_collectives(expressions[i]):
            raise ValueError(
                f"num_slices: {names[i]} needs data points and the result of a collective, which is there when all "
                "slices are computed. Call the function without slices"
            )
    rest = [i for i in range(len(expressions)) if i not in before]
    for one in common:
        if depends_on(one, apart, or_rank=False):
            replace[one] = entering[one, "max"] = one.type()
    after = clone([expressions[i] for i in rest], replace=replace, share_inputs=True)
    variables, ops = [x for x, _ in entering], [op for _, op in entering]
    return Cut(before, variables, ops, list(entering.values()), dict(zip(rest, after)))


def _has_collectives(expression: Any) -> bool:
    return any(var.owner is not None and isinstance(var.owner.op, Collective) for var in ancestors([expression]))
