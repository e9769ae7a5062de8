"""Whether values of a function have rows for its data points: shapes tell, and values where the graph fixes sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, TypeVar

import numpy as np

from synkhronos._calls.serial import Serial
from synkhronos._utils.interrupts import let_interrupts_pass

__all__ = ["Growth", "Sample"]

_T = TypeVar("_T")

_MOST_BYTES = 64 * 1024 * 1024  # of the rows that shapes are told by
_LEAST_ROWS = 16


class Sample:
    """The data of one part of a call.

    Parameters
    ----------
    inputs : list of array
        Of the scattered inputs the rows of the part, the others whole.
    n_scattered : int
        How many of them are scattered.
    variables : list of array
        The rows of the shared variables that hold data.
    """

    def __init__(self, inputs: Sequence[Any], n_scattered: int, variables: Sequence[Any]) -> None:
        self._rows = [*inputs[:n_scattered], *variables]
        self._n_scattered = n_scattered
        self._whole = inputs[n_scattered:]

    def compute(self, function: Callable[[list[Any], list[Any]], _T], change: Callable[[np.ndarray], Any]) -> _T:
        """What a function of inputs and of the values of variables gives for changed rows."""
        changed = [change(array) for array in self._rows]
        n = self._n_scattered
        return function([*changed[:n], *self._whole], changed[n:])

    def lengths(self) -> set[int]:
        """How many rows there are."""
        return {len(array) for array in self._rows}


class Growth:
    """Which values have rows for the data points; each is looked at once, and what was found is remembered.

    Parameters
    ----------
    serial : Serial
    others : list of shared variables
        Those that hold data beside the sliceable ones.
    """

    def __init__(self, serial: Serial, others: Sequence[Any]) -> None:
        self._serial = serial
        self._others = others
        self._grows: dict[int, bool] = {}
        self._follows: dict[tuple[int, tuple[int, ...]], bool | None] = {}

    def unknown(self, values: Sequence[int]) -> list[int]:
        """Those of the values that were not looked at yet."""
        return [i for i in values if i not in self._grows]

    def learn(self, values: Sequence[int], sample: Sample) -> None:
        """Find out which values have other shapes where there are more rows."""

        def shapes(inputs: list[Any], variables: list[Any]) -> list[tuple[int, ...]]:
            return self._serial.shapes(inputs, variables, values, self._others)

        if 0 in sample.lengths():
            return  # which tells nothing
        try:
            some = sample.compute(shapes, lambda array: _some(array, 1))
            more = sample.compute(shapes, lambda array: _some(array, 3))
            grows = [one != other for one, other in zip(some, more)]
        except MemoryError:
            return
        except Exception as error:  # sizes may be fixed in the graph
            let_interrupts_pass(error)
            grows = [False] * len(values)
        self._grows.update(zip(values, grows))

    def grows(self, i: int) -> bool:
        """Whether the shape of a value changes with the number of data points."""
        return self._grows.get(i, False)

    def follows(self, i: int, shape: tuple[int, ...], sample: Callable[[], Sample]) -> bool | None:
        """Whether a value whose shape does not seem to change has rows for data points all the same.

        That can be where the graph fixes the number of rows. Then rows in reverse tell; ``None`` if they do not.
        """
        if (i, shape) not in self._follows:
            self._follows[i, shape] = self._compare(i, shape, sample())
        return self._follows[i, shape]

    def _compare(self, i: int, shape: tuple[int, ...], sample: Sample) -> bool | None:
        axes = [axis for axis, length in enumerate(shape) if length > 1 and length in sample.lengths()]
        if not axes:
            return False

        def compute(inputs: list[Any], variables: list[Any]) -> np.ndarray:
            return self._serial.compute(inputs, variables, [i], self._others)[0]

        def value(change: Callable[[np.ndarray], Any]) -> np.ndarray:
            return sample.compute(compute, change)

        try:
            value(lambda array: _repeated(array, len(array) + 1))
        except Exception as error:
            let_interrupts_pass(error)
        else:
            return False
        try:
            there, back = value(lambda array: array), value(lambda array: array[::-1])
        except Exception as error:
            let_interrupts_pass(error)
            return None
        reverse = [np.flip(there, axis) for axis in axes]
        return any(np.allclose(back, one) and not np.allclose(there, one) for one in reverse) or None


def _repeated(array: Any, n: int) -> Any:
    """So many rows: those that there are, and then the first ones again."""
    return array[np.arange(n) % max(1, len(array))]


def _some(array: Any, times: int) -> Any:
    """Rows of an array, repeated: a few at least, and no more than fit into memory."""
    row = max(1, array.nbytes // max(1, len(array)))
    n = max(_LEAST_ROWS, min(len(array), _MOST_BYTES // row))
    return _repeated(array, times * n)
