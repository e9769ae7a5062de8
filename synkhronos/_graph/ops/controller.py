"""Operations that the controller computes alone, and whose results it broadcasts to all ranks.

A user's operation in Python may draw from ``np.random``, count its calls or read a file: on each rank it could give
something else. In the graph of an exact function three operations take its place. `OnController` runs it on the
controller, and gives its results as bytes; a collective broadcasts these; `Unpacked` gives the results on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._backends import Apply, Op
from synkhronos._graph import Unpacked, bytes_variable, pack
from synkhronos._graph.ops.collective_op import Collective
from synkhronos._graph.ops.rank_context import BROADCAST, current

__all__ = ["broadcast_outputs"]


def broadcast_outputs(node: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a node as the controller computes them, as expressions.

    Parameters
    ----------
    node : Apply
    inputs : list of variables
        In place of the node's own; of equal values on the controller.
    """
    types_in, types_out = ([one.type for one in variables] for variables in (node.inputs, node.outputs))
    sent = OnController(node.op, tuple(types_in), tuple(types_out))(*inputs)
    sent.tag.trace = getattr(node.outputs[0].tag, "trace", [])  # the program's line, for messages
    return list(Unpacked(tuple(types_out))(Collective((BROADCAST,))(sent), return_list=True))


class OnController(Op):
    """Run an operation on the controller alone; gives its results as bytes, and none on other ranks.

    Parameters
    ----------
    op : Op
        One that computes by its ``perform``.
    types_in, types_out : tuple of Type
        Of its inputs and outputs.
    """

    __props__ = ("op", "types_in", "types_out")
    is_kept = False  # on disk, by numba: it is the program's

    def __init__(self, op: Any, types_in: tuple[Any, ...], types_out: tuple[Any, ...]) -> None:
        self.op, self.types_in, self.types_out = op, types_in, types_out
        self._copied = sorted({i for places in (getattr(op, "destroy_map", None) or {}).values() for i in places})

    def __str__(self) -> str:
        return f"OnController{{{self.op}}}"

    def make_node(self, *inputs: Any) -> Any:
        """Apply to inputs of the operation."""
        return Apply(self, list(inputs), [bytes_variable()])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Run the operation on the controller, and where there is one rank; on others do nothing."""
        standing = current()
        if standing is not None and standing.rank != standing.controller:
            output_storage[0][0] = np.empty(0, np.uint8)
            return
        own = Apply(self.op, [type_() for type_ in self.types_in], [type_() for type_ in self.types_out])
        values = list(inputs)
        for i in self._copied:  # an operation in place must not change what others read
            values[i] = values[i].copy()
        storage: list[list[Any]] = [[None] for _ in self.types_out]
        params = [own.run_params()] if getattr(self.op, "params_type", None) and hasattr(own, "run_params") else []
        self.op.perform(own, values, storage, *params)
        output_storage[0][0] = pack([type_.filter(value) for type_, (value,) in zip(self.types_out, storage)])

    def do_constant_folding(self, *arguments: Any) -> bool:
        """As the operation itself: the serial program computes it as it is compiled, too."""
        return bool(self.op.do_constant_folding(*arguments))
