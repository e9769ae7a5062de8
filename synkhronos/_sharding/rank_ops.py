"""The collectives of divided graphs on real ranks: those of `_inside`, of any axis, with dtypes kept.

The Op that takes a rank's rows of what every rank holds whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from synkhronos._backends import Apply, Op, T, length_along, ops, retyped
from synkhronos._graph import ops as graph_ops
from synkhronos._graph.ops import gathered, reduced
from synkhronos._sharding.placements import described

__all__ = ["ON_RANKS", "Collective", "Collectives", "Part", "label"]


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


class Part(Op):
    """The rows of this rank along an axis, whose places are (outer, row, inner); a view where ``outer`` is 1.

    Inputs: the whole, the number of rows, of the first one here, of those here, ``outer``, ``inner``.

    Parameters
    ----------
    axis : int
    broadcasts : bool
        The part is for an Op that broadcasts whatever has length 1, as NumPy does: such a whole is the part, too.
    """

    __props__ = ("axis", "broadcasts")
    view_map = {0: [0]}  # noqa: RUF012

    def __init__(self, axis: int, broadcasts: bool = False) -> None:
        self.axis, self.broadcasts = axis, broadcasts

    def make_node(self, whole: Any, *numbers: Any) -> Any:
        """Apply it to the whole and the five numbers."""
        return Apply(self, [whole, *map(T.as_tensor_variable, numbers)], [retyped(whole, free=(self.axis,))()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """Refuse a whole that is not as long as the rows demand: the serial program would not accept it either."""
        whole = inputs[0]
        rows, first, here, outer, inner = map(int, inputs[1:])
        before, length, after = whole.shape[: self.axis], whole.shape[self.axis], whole.shape[self.axis + 1 :]
        if length == 1 and self.broadcasts:
            outputs[0][0] = whole
            return
        if length != outer * rows * inner:
            what = "an array" if node is None else described(node.outputs[0])  # numba runs an Op without its node
            raise ValueError(
                f"{what} meets an array that is divided by its rows: its length along axis "
                f"{self.axis} is {length}, expected {outer * rows * inner}, for the {rows} rows of this call. If it "
                "is to be broadcast, declare that axis broadcastable (theano.tensor.addbroadcast)"
            )
        places = whole.reshape(*before, outer, rows, inner, *after)
        here_only = places[(slice(None),) * (self.axis + 1) + (slice(first, first + here),)]
        outputs[0][0] = here_only.reshape(*before, outer * here * inner, *after)

    def infer_shape(self, node: Any, shapes: Any) -> Any:
        """As long as the rows here demand."""
        shape = list(shapes[0])
        shape[self.axis] = (
            length_along(node.outputs[0], self.axis)
            if self.broadcasts
            else node.inputs[4] * node.inputs[3] * node.inputs[5]
        )
        return [tuple(shape)]
