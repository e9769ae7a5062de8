"""Run operations on the controller alone, and broadcast the results to all ranks.

A user's operation in Python may draw from ``np.random``, count its calls or read a file, and then gives different
results on each rank. In the graph of an exact function, three operations replace it: `OnController` runs it on the
controller and returns its results as bytes, a collective broadcasts these, and `Unpacked` unpickles them on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._backends import Apply, Op
from synkhronos._graph import Unpacked, bytes_variable, pack
from synkhronos._graph.ops.collective_op import Collective
from synkhronos._graph.ops.rank_context import BROADCAST, current


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
    return list(Unpacked(tuple(types_out))(Collective((BROADCAST,))(sent), return_list=True))


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
        context = current()
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
