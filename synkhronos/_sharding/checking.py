"""Safeguards against faulty sharding rules: log an analysis that failed, and compare shapes with the serial program.

A failed analysis costs only speed: it is logged, and the graph is computed without it.

With ``SYNKHRONOS_CHECK_SHARDING=1``, every rank also computes each Apply node from full inputs, as the serial program
does, and compares the shapes. A wrong rule raises an error at its own node.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from synkhronos._backends import Apply, Op, T, TensorType, ops
from synkhronos._sharding.lengths import Lengths, RowCounts
from synkhronos._sharding.placements import Placed, Replicate, Shard, copied, line_of, typed

_logger = logging.getLogger("synkhronos")
_RAISE_VARIABLE = "SYNKHRONOS_RAISE_ANALYSIS_ERRORS"
_logged: set[tuple[str, str]] = set()


@contextlib.contextmanager
def errors_logged(analysis: str, subject: object) -> Iterator[None]:
    """Log errors of a block instead of raising them, once for each analysis and subject.

    The result must be correct wherever the block ends, if perhaps slower to compute. The environment variable
    ``SYNKHRONOS_RAISE_ANALYSIS_ERRORS=1``, which tests set, raises the errors.

    Parameters
    ----------
    analysis : str
        Name of the analysis, for the log.
    subject : object
        The operation or graph that was analyzed.
    """
    try:
        yield
    except (RecursionError, MemoryError):  # the path without the analysis would fail as well
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
    """Return whether the environment variable ``SYNKHRONOS_CHECK_SHARDING`` requests shape checks."""
    return os.environ.get(_ENVIRONMENT, "0") not in ("", "0")


class ShapeChecks:
    """Serial values of a graph's variables, computed next to those of the sharded graph, to compare their shapes.

    Parameters
    ----------
    rows : RowCounts
    lengths : Lengths
    replicated : callable
        Returns the serial value of a variable, reduced or gathered from the ranks.
    """

    def __init__(self, rows: RowCounts, lengths: Lengths, replicated: Callable[[Any], Any]) -> None:
        self._rows, self._lengths, self._replicated = rows, lengths, replicated
        self._serial: dict[Any, Any] = {}

    def checked(self, node: Any, placed: Sequence[Placed]) -> list[Placed]:
        """Add a check of each tensor's shape to a rule's outputs for an Apply node."""
        serial = copied(node, [self._serial_value(one) for one in node.inputs])
        return [self._compared(node, *each) for each in zip(node.outputs, placed, serial)]

    def _serial_value(self, variable: Any) -> Any:
        if variable not in self._serial:
            self._serial[variable] = self._replicated(variable)
        return self._serial[variable]

    def _compared(self, node: Any, output: Any, placed: Placed, serial: Any) -> Placed:
        new, placement = placed
        if isinstance(output.type, TensorType):
            serial = typed(serial, output)  # backends may infer another type from other inputs
            numbers, axis, kind = [], None, type(placement).__name__
            if isinstance(placement, Shard):
                axis = placement.axis
                kind = f"{kind}({axis})"
                places = [self._lengths.value(one) for one in (placement.outer, placement.inner)]
                numbers = [self._rows.total, self._rows.local, *places]
            line = line_of(output)
            where = f"{node.op} ({line})" if line else str(node.op)
            new = CheckShape(where, kind, axis)(new, ops.Shape()(serial), *numbers)
        # a replicated value is the serial value, and its shape has been checked
        self._serial[output] = new if isinstance(placement, Replicate) else serial
        return Placed(new, placement)


class CheckShape(Op):
    """Return the first input, after a check of its shape against the serial shape and the placement.

    The inputs are a rank's value and the serial shape; for a sharded axis also the number of all rows, the number of
    this rank's rows, and ``outer`` and ``inner`` of the placement.

    Parameters
    ----------
    where : str
        The operation and the user's line, for the message.
    placement : str
        The placement, for the message.
    axis : int or None
        The sharded axis.
    """

    __props__ = ("where", "placement", "axis")
    view_map = {0: [0]}  # noqa: RUF012

    def __init__(self, where: str, placement: str, axis: int | None) -> None:
        self.where, self.placement, self.axis = where, placement, axis

    def make_node(self, here: Any, serial: Any, *numbers: Any) -> Any:
        """Apply the operation to a rank's value, the serial shape and the integers."""
        return Apply(self, [here, serial, *map(T.as_tensor_variable, numbers)], [here.type()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """Compare the shapes, and raise `AssertionError` if the first is not as expected."""
        here, serial = inputs[0], tuple(map(int, inputs[1]))
        expected, full = list(serial), list(serial)
        if self.axis is not None and self.axis < len(serial):
            n_rows, n_here, outer, inner = map(int, inputs[2:])
            expected[self.axis], full[self.axis] = outer * n_here * inner, outer * n_rows * inner
        if here.shape != tuple(expected) or serial != tuple(full):
            raise AssertionError(
                f"SYNKHRONOS_CHECK_SHARDING: {self.where} gives shape {here.shape} on this rank, expected "
                f"{tuple(expected)}: the serial program's shape is {serial}, and the placement {self.placement}. The "
                "sharding rule of this operation is wrong; please report it"
            )
        outputs[0][0] = here

    def infer_shape(self, node: Any, shapes: Any) -> Any:
        """Return the shape of the first input."""
        return [shapes[0]]
