"""What a graph tells of its collectives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from synkhronos._backends import ancestors, io_toposort, ops
from synkhronos._inside.known import Known
from synkhronos._inside.ops import Collective

__all__ = [
    "after_meetings",
    "collectives_of",
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
