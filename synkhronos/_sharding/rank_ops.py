"""Operations of sharded graphs that depend on the rank: all-reduce, all-gather along any axis, and local shards.

The collectives are those of `synkhronos._graph.ops`, with dtypes kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from synkhronos._backends import Apply, Op, T, length_along, ops, retyped
from synkhronos._graph import ops as graph_ops
from synkhronos._graph.ops import gathered, reduced
from synkhronos._sharding.placements import described


class Collectives(NamedTuple):
    """Functions that build collectives: ``all_reduce(variable, op)`` and ``all_gather(variable, axis)``."""

    all_reduce: Callable[[Any, str], Any]
    all_gather: Callable[[Any, int], Any]


class Collective(NamedTuple):
    """A recorded collective of a sharded graph."""

    kind: str  # "all-reduce (sum)", "all-gather"
    variable: Any  # of the user's graph
    reason: str
    result: Any  # of the sharded graph
    is_within: bool = False  # runs in each step of a loop

    def within(self, result: Any) -> Collective:
        """Return the same collective as part of each step of a loop, of which ``result`` is an output."""
        where = "in each step of a loop"
        reason = self.reason if self.reason.endswith(where) else f"{self.reason} {where}".strip()
        return self._replace(reason=reason, result=result, is_within=True)


def label(collectives: Sequence[Collective]) -> None:
    """Label the operations of collectives by position, to find them in a compiled function; those in loops excepted."""
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


class LocalShard(Op):
    """Select this rank's rows along an axis, placed as `Shard` describes; a view where ``outer`` is 1.

    The inputs are the full value, the number of all rows, the index of this rank's first row, the number of its rows,
    ``outer`` and ``inner``.

    Parameters
    ----------
    axis : int
    broadcasts : bool
        Return the full value if the axis has length 1, for an operation that broadcasts as NumPy does.
    """

    __props__ = ("axis", "broadcasts")
    view_map = {0: [0]}  # noqa: RUF012

    def __init__(self, axis: int, broadcasts: bool = False) -> None:
        self.axis, self.broadcasts = axis, broadcasts

    def make_node(self, whole: Any, *numbers: Any) -> Any:
        """Apply the operation to the full value and the five integers."""
        return Apply(self, [whole, *map(T.as_tensor_variable, numbers)], [retyped(whole, free=(self.axis,))()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """Select the rows; raise `ValueError` if the length does not fit, as the serial program would also fail."""
        whole = inputs[0]
        rows, first, here, outer, inner = map(int, inputs[1:])
        before, length, after = whole.shape[: self.axis], whole.shape[self.axis], whole.shape[self.axis + 1 :]
        if length == 1 and self.broadcasts:
            outputs[0][0] = whole
            return
        if length != outer * rows * inner:
            what = "an array" if node is None else described(node.outputs[0])  # numba runs an Op without its Apply node
            raise ValueError(
                f"{what} meets an array that is divided by its rows: its length along axis "
                f"{self.axis} is {length}, expected {outer * rows * inner}, for the {rows} rows of this call. If it "
                "is to be broadcast, declare that axis broadcastable (theano.tensor.addbroadcast)"
            )
        places = whole.reshape(*before, outer, rows, inner, *after)
        here_only = places[(slice(None),) * (self.axis + 1) + (slice(first, first + here),)]
        outputs[0][0] = here_only.reshape(*before, outer * here * inner, *after)

    def infer_shape(self, node: Any, shapes: Any) -> Any:
        """Return the input's shape, with this rank's length along the axis."""
        shape = list(shapes[0])
        shape[self.axis] = (
            length_along(node.outputs[0], self.axis)
            if self.broadcasts
            else node.inputs[4] * node.inputs[3] * node.inputs[5]
        )
        return [tuple(shape)]
