"""Operations of a sharded graph that depend on the rank: all-reduce, all-gather, and the selection of a local shard.

The collectives are those of `synkhronos._graph.ops`, but keep the dtype, and gather along any axis.

A user's operation in Python may draw from ``np.random``, count its calls or read a file, and then gives different
results on each rank. Three operations replace it: `OnController` runs it on the controller and returns its results as
bytes, a collective broadcasts these, and `Unpacked` unpickles them on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._backends import Apply, Op, T, length_along, ops, retyped
from synkhronos._graph import Unpacked, bytes_variable, pack
from synkhronos._graph import ops as graph_ops
from synkhronos._graph.ops import gathered, reduced
from synkhronos._sharding.placements import described


class CollectiveBuilders(NamedTuple):
    """Functions that build collectives: ``all_reduce(variable, op)`` and ``all_gather(variable, axis)``."""

    all_reduce: Callable[[Any, str], Any]
    all_gather: Callable[[Any, int], Any]


class CollectiveRecord(NamedTuple):
    """One collective of a sharded graph, for the report."""

    kind: str  # "all-reduce (sum)", "all-gather"
    variable: Any  # of the user's graph
    reason: str
    result: Any  # of the sharded graph
    is_in_loop: bool = False  # runs in each step of a loop

    def in_loop(self, result: Any) -> CollectiveRecord:
        """Return the same collective as part of each step of a loop, of which ``result`` is an output."""
        where = "in each step of a loop"
        reason = self.reason if self.reason.endswith(where) else f"{self.reason} {where}".strip()
        return self._replace(reason=reason, result=result, is_in_loop=True)


def label(collectives: Sequence[CollectiveRecord]) -> None:
    """Label the operations of collectives outside of loops by position, to find them in a compiled function."""
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


ON_RANKS = CollectiveBuilders(_all_reduce, _all_gather)


class LocalShard(Op):
    """Select this rank's rows along an axis, as `Shard` defines them; the result is a view if ``outer`` is 1.

    The inputs are the full value; the number of all rows, the index of this rank's first row and the number of its
    rows; ``outer`` and ``inner``.

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

    def make_node(self, full: Any, *numbers: Any) -> Any:
        """Apply the operation to the full value and the five integers."""
        return Apply(self, [full, *map(T.as_tensor_variable, numbers)], [retyped(full, free=(self.axis,))()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """Select the rows; raise `ValueError` for another length, with which the serial program would fail as well."""
        full = inputs[0]
        rows, first, here, outer, inner = map(int, inputs[1:])
        before, length, after = full.shape[: self.axis], full.shape[self.axis], full.shape[self.axis + 1 :]
        if length == 1 and self.broadcasts:
            outputs[0][0] = full
            return
        if length != outer * rows * inner:
            what = "an array" if node is None else described(node.outputs[0])  # numba runs an Op without its Apply node
            raise ValueError(
                f"{what} is used with a sharded array: its length along axis {self.axis} is {length}, expected "
                f"{outer * rows * inner}, for the {rows} rows of this call. If it is to be broadcast, declare that "
                "axis broadcastable (theano.tensor.addbroadcast)"
            )
        places = full.reshape(*before, outer, rows, inner, *after)
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


# -- operations that run on the controller alone


def broadcast_outputs(node: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return expressions for the outputs of an Apply node, which the controller computes and broadcasts.

    Parameters
    ----------
    node : Apply
    inputs : list of variables
        Variables that replace the node's inputs. On the controller they have the inputs' values.

    Returns
    -------
    list of variables
        One for each output of the node.
    """
    types_in, types_out = ([one.type for one in variables] for variables in (node.inputs, node.outputs))
    sent = OnController(node.op, tuple(types_in), tuple(types_out))(*inputs)
    sent.tag.trace = getattr(node.outputs[0].tag, "trace", [])  # the line in the program, for error messages
    return list(Unpacked(tuple(types_out))(graph_ops.Collective((graph_ops.BROADCAST,))(sent), return_list=True))


class OnController(Op):
    """Run an operation on the controller alone; return its results as bytes, and no bytes on other ranks.

    Parameters
    ----------
    op : Op
        An operation that computes by its ``perform``.
    types_in, types_out : tuple of Type
        Types of its inputs and outputs.
    """

    __props__ = ("op", "types_in", "types_out")
    is_kept = False  # numba must not cache it on disk, because it refers to an Op of this program

    def __init__(self, op: Any, types_in: tuple[Any, ...], types_out: tuple[Any, ...]) -> None:
        self.op, self.types_in, self.types_out = op, types_in, types_out
        self._copied = sorted({i for places in (getattr(op, "destroy_map", None) or {}).values() for i in places})

    def __str__(self) -> str:
        return f"OnController{{{self.op}}}"

    def make_node(self, *inputs: Any) -> Any:
        """Apply the operation to the inputs of the user's operation."""
        return Apply(self, list(inputs), [bytes_variable()])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Run the user's operation, on the controller or outside a call; return no bytes on other ranks."""
        context = graph_ops.current()
        if context is not None and context.rank != context.controller:
            output_storage[0][0] = np.empty(0, np.uint8)
            return
        own = Apply(self.op, [type_() for type_ in self.types_in], [type_() for type_ in self.types_out])
        values = list(inputs)
        for i in self._copied:  # an in-place operation must not change values that others read
            values[i] = values[i].copy()
        storage: list[list[Any]] = [[None] for _ in self.types_out]
        params = [own.run_params()] if getattr(self.op, "params_type", None) and hasattr(own, "run_params") else []
        self.op.perform(own, values, storage, *params)
        output_storage[0][0] = pack([type_.filter(value) for type_, (value,) in zip(self.types_out, storage)])

    def do_constant_folding(self, *arguments: Any) -> bool:
        """Return the operation's own answer, because the serial program also computes it during compilation."""
        return bool(self.op.do_constant_folding(*arguments))
