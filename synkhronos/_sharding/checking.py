"""Failed analyses of a graph: they only serve speed, so the slower path is taken and the failure is logged.

Check the shape of each variable of a divided graph against the serial program's, for debugging.

Where a sharding rule has been applied, each rank also computes the node as the serial program does, of whole inputs,
and compares what it holds with the shape of that. What a rule gets wrong is found at its own node, and raised there.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from synkhronos._backends import Apply, Op, T, TensorType, ops
from synkhronos._sharding.lengths import Lengths, Rows
from synkhronos._sharding.placements import Placed, Replicate, Shard, copied, line_of, typed

__all__ = ["ShapeChecks", "environment_asks", "tolerated"]


_logger = logging.getLogger("synkhronos")
_RAISE_VARIABLE = "SYNKHRONOS_RAISE_ANALYSIS_ERRORS"
_logged: set[tuple[str, str]] = set()


@contextlib.contextmanager
def tolerated(analysis: str, subject: object) -> Iterator[None]:
    """Log what a block raises, once for each analysis and subject, instead of raising it.

    The block must leave its caller with a result that is right, if slow, wherever it ends. In a test run the
    environment variable ``SYNKHRONOS_RAISE_ANALYSIS_ERRORS=1`` has the error raised.

    Parameters
    ----------
    analysis : str
        What failed, for the log.
    subject : object
        The operation or graph that was analysed.
    """
    try:
        yield
    except (RecursionError, MemoryError):  # the slower path would not do with less
        raise
    except Exception as error:
        if os.environ.get(_RAISE_VARIABLE, "0") not in ("", "0"):
            raise
        key = analysis, str(subject)
        if key not in _logged:
            _logged.add(key)
            _logger.warning(
                "%s of %s failed (%s: %s): the function computes the same, perhaps more slowly. Please report it",
                *key,
                type(error).__name__,
                error,
            )
            _logger.debug("%s of %s failed", *key, exc_info=True)


_ENVIRONMENT = "SYNKHRONOS_CHECK_SHARDING"


def environment_asks() -> bool:
    """Whether the environment variable ``SYNKHRONOS_CHECK_SHARDING`` asks for checks."""
    return os.environ.get(_ENVIRONMENT, "0") not in ("", "0")


class ShapeChecks:
    """The serial program's values next to those of a walk, and comparisons of their shapes.

    Parameters
    ----------
    rows : Rows
    lengths : Lengths
    whole : callable
        The serial value of a variable, made of what ranks hold of it.
    """

    def __init__(self, rows: Rows, lengths: Lengths, whole: Callable[[Any], Any]) -> None:
        self._rows, self._lengths, self._whole = rows, lengths, whole
        self._serial: dict[Any, Any] = {}

    def checked(self, node: Any, placed: Sequence[Placed]) -> list[Placed]:
        """What a rule made of a node, with a check of each tensor's shape."""
        serial = copied(node, [self._serial_value(one) for one in node.inputs])
        return [self._compared(node, *each) for each in zip(node.outputs, placed, serial)]

    def _serial_value(self, variable: Any) -> Any:
        if variable not in self._serial:
            self._serial[variable] = self._whole(variable)
        return self._serial[variable]

    def _compared(self, node: Any, output: Any, placed: Placed, serial: Any) -> Placed:
        new, placement = placed
        if isinstance(output.type, TensorType):
            serial = typed(serial, output)  # which engines may not infer of other inputs
            numbers, axis, kind = [], None, type(placement).__name__
            if isinstance(placement, Shard):
                axis = placement.axis
                kind = f"{kind}({axis})"
                places = [self._lengths.value(one) for one in (placement.outer, placement.inner)]
                numbers = [self._rows.whole, self._rows.here, *places]
            line = line_of(output)
            where = f"{node.op} ({line})" if line else str(node.op)
            new = CheckShape(where, kind, axis)(new, ops.Shape()(serial), *numbers)
        # a replicated value, whose shape has been checked, serves as the serial one
        self._serial[output] = new if isinstance(placement, Replicate) else serial
        return Placed(new, placement)


class CheckShape(Op):
    """The first input, if it has the shape that the serial program's shape and its placement demand.

    Inputs: what a rank holds, the serial shape; along a sharded axis also the number of rows, of those here, and
    ``outer`` and ``inner`` of the placement.

    Parameters
    ----------
    where : str
        The operation and the user's line, for the message.
    placement : str
        For the message.
    axis : int or None
        The sharded one.
    """

    __props__ = ("where", "placement", "axis")
    view_map = {0: [0]}  # noqa: RUF012

    def __init__(self, where: str, placement: str, axis: int | None) -> None:
        self.where, self.placement, self.axis = where, placement, axis

    def make_node(self, here: Any, serial: Any, *numbers: Any) -> Any:
        """Apply it to these variables."""
        return Apply(self, [here, serial, *map(T.as_tensor_variable, numbers)], [here.type()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """Compare the shapes, and raise `AssertionError` where they do not fit together."""
        here, serial = inputs[0], tuple(map(int, inputs[1]))
        expected, whole = list(serial), list(serial)
        if self.axis is not None and self.axis < len(serial):
            n_rows, n_here, outer, inner = map(int, inputs[2:])
            expected[self.axis], whole[self.axis] = outer * n_here * inner, outer * n_rows * inner
        if here.shape != tuple(expected) or serial != tuple(whole):
            raise AssertionError(
                f"SYNKHRONOS_CHECK_SHARDING: {self.where} gives shape {here.shape} on this rank, expected "
                f"{tuple(expected)}: the serial program's shape is {serial}, and the placement {self.placement}. The "
                "sharding rule of this operation is wrong; please report it"
            )
        outputs[0][0] = here

    def infer_shape(self, node: Any, shapes: Any) -> Any:
        """That of the first input."""
        return [shapes[0]]
