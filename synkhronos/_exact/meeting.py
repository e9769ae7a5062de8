"""The collectives of divided graphs on real ranks: those of `_inside`, of any axis, with dtypes kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from synkhronos._backends import T, ops
from synkhronos._graph import ops as graph_ops
from synkhronos._graph.ops import gathered, reduced

__all__ = ["ON_RANKS", "Collective", "Collectives", "label"]


class Collectives(NamedTuple):
    """What makes the variables on which ranks meet: ``all_reduce(variable, op)``, ``all_gather(variable, axis)``."""

    all_reduce: Callable[[Any, str], Any]
    all_gather: Callable[[Any, int], Any]


class Collective(NamedTuple):
    """One place where rows meet."""

    kind: str  # "all-reduce (sum)", "all-gather"
    variable: Any  # of the user's graph
    reason: str
    result: Any  # in the divided graph
    is_within: bool = False  # in each step of a loop

    def within(self, result: Any) -> Collective:
        """The same in each step of a loop, of which ``result`` is an output."""
        where = "in each step of a loop"
        reason = self.reason if self.reason.endswith(where) else f"{self.reason} {where}".strip()
        return self._replace(reason=reason, result=result, is_within=True)


def label(collectives: Sequence[Collective]) -> None:
    """Have a compiled function tell where each of some collectives is, by its place among them; but not in loops."""
    for place, one in enumerate(collectives):
        node = one.result.owner
        while node is not None and not isinstance(node.op, (graph_ops.Collective, ops.Scan)):
            node = node.inputs[0].owner
        if node is not None and isinstance(node.op, graph_ops.Collective):
            node.op.labels = (place,)


def _all_reduce(variable: Any, op: Any) -> Any:
    return T.cast(reduced(variable, op), variable.dtype)


def _all_gather(variable: Any, axis: int) -> Any:
    if axis == 0:
        return gathered(variable)
    order = [axis, *(one for one in range(variable.ndim) if one != axis)]
    return gathered(variable.dimshuffle(order)).dimshuffle([order.index(one) for one in range(variable.ndim)])


ON_RANKS = Collectives(_all_reduce, _all_gather)
