"""The Op that takes a rank's rows of what every rank holds whole."""

from __future__ import annotations

from typing import Any

import theano
import theano.tensor as T

__all__ = ["Part"]


class Part(theano.Op):
    """This rank's rows along an axis, whose places are (outer, row, inner); a view where ``outer`` is 1.

    Inputs: the whole, the number of rows, of the first one here, of those here, ``outer``, ``inner``.
    """

    __props__ = ("axis",)
    view_map = {0: [0]}  # noqa: RUF012

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def make_node(self, whole: Any, *numbers: Any) -> Any:
        """Apply it to the whole and the five numbers."""
        return theano.Apply(self, [whole, *map(T.as_tensor_variable, numbers)], [whole.type()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """Refuse a whole that is not as long as the rows demand: the serial program would not accept it either."""
        whole = inputs[0]
        rows, first, here, outer, inner = map(int, inputs[1:])
        before, length, after = whole.shape[: self.axis], whole.shape[self.axis], whole.shape[self.axis + 1 :]
        if length != outer * rows * inner:
            raise ValueError(
                f"{node.inputs[0]} meets an array that is divided by its rows: its length along axis {self.axis} is "
                f"{length}, expected {outer * rows * inner}. If it is to be broadcast, declare that axis broadcastable "
                "(theano.tensor.addbroadcast)"
            )
        places = whole.reshape(*before, outer, rows, inner, *after)
        here_only = places[(slice(None),) * (self.axis + 1) + (slice(first, first + here),)]
        outputs[0][0] = here_only.reshape(*before, outer * here * inner, *after)

    def infer_shape(self, node: Any, shapes: Any) -> Any:
        """As long as the rows here demand."""
        shape = list(shapes[0])
        shape[self.axis] = node.inputs[4] * node.inputs[3] * node.inputs[5]
        return [tuple(shape)]
