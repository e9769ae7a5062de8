"""What is known of lengths: which numbers of the serial program are exactly rows × k, and along which axes they lie.

All that is not known is a symbol of its own, whose value is the serial program's. So a number is rows × k only where
that is proven, by the kinds of nodes in `following` alone; whatever else is computed from shapes (N + 1, N // 2, a cast
to floats) is a plain number, the same on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos._backends import (
    NotScalarConstantError,
    T,
    TensorConstant,
    get_scalar_constant_value,
    known_lengths,
    length_along,
)
from synkhronos._exact.placements import ONE, ROWS, UNKNOWN, Length

__all__ = ["Lengths", "Rows", "constant_of", "reduced_axes"]


class Rows:
    """The rows of a call, as symbolic int64 scalars: how many in all, the first one here, how many here."""

    def __init__(self, whole: Any, first: Any, here: Any) -> None:
        self.whole, self.first, self.here = whole, first, here


def constant_of(variable: Any) -> int | None:
    """The value of an integer that never changes, as far as Theano sees that; else ``None``."""
    try:
        value = get_scalar_constant_value(variable, only_process_constants=False)
    except (NotScalarConstantError, AttributeError, TypeError):
        return None
    return int(value) if np.asarray(value).dtype.kind in "iub" else None


def reduced_axes(node: Any) -> tuple[int, ...]:
    """The axes over which a node reduces its input."""
    n_axes = node.inputs[0].ndim
    if not n_axes:
        return ()  # PyTensor has numbers reduced over an axis 0, too
    return tuple(range(n_axes)) if node.op.axis is None else tuple(axis % n_axes for axis in node.op.axis)


class Lengths:
    """Lengths of the variables of the user's graph.

    Parameters
    ----------
    rows : Rows
    new, whole : callable
        What a rank holds of a variable of the user's graph, and its value as in the serial program.
    """

    def __init__(self, rows: Rows, new: Callable[[Any], Any], whole: Callable[[Any], Any]) -> None:
        self._rows = rows
        self._new, self._whole = new, whole
        self._numbers: dict[tuple[Any, int | None], int] = {}
        self._symbols: list[tuple[Any, int | None]] = [(None, None)]  # 0: the rows
        self._scalars: dict[Any, Length] = {}
        self._vectors: dict[Any, tuple[Length, ...]] = {}
        self._dims: dict[Any, tuple[Length, ...]] = {}
        self._ranges: dict[Any, Length] = {}
        self._values: dict[Length, Any] = {}
        self._of_shapes: list[Any] = []

    # -- what is known

    def _symbol(self, variable: Any, axis: int | None) -> Length:
        key = (variable, axis)
        if key not in self._numbers:
            self._numbers[key] = len(self._symbols)
            self._symbols.append(key)
        return Length(1, (self._numbers[key],))

    def scalar(self, variable: Any) -> Length:
        """An integer of the user's graph."""
        if variable not in self._scalars:
            constant = constant_of(variable)
            if constant is not None and constant >= -1:
                self._scalars[variable] = Length(constant)
            else:
                self._scalars[variable] = self._symbol(variable, None)
        return self._scalars[variable]

    def vector(self, variable: Any) -> tuple[Length, ...] | None:
        """The integers in a vector; ``None`` where nothing is known of it."""
        is_constant = isinstance(variable, TensorConstant) and variable.ndim == 1 and variable.dtype == "int64"
        if variable not in self._vectors and is_constant and all(variable.data >= -1):
            self._vectors[variable] = tuple(Length(int(number)) for number in variable.data)
        return self._vectors.get(variable)

    def dims(self, variable: Any) -> tuple[Length, ...]:
        """The serial program's shape of a variable."""
        if variable not in self._dims:
            if isinstance(variable, TensorConstant):
                dims = tuple(map(Length, variable.data.shape))
            else:
                dims = tuple(
                    self._symbol(variable, axis) if known is None else Length(known)
                    for axis, known in enumerate(known_lengths(variable))
                )
            self._dims[variable] = dims
        return self._dims[variable]

    def set_scalar(self, variable: Any, length: Length) -> None:
        """Take notice of an integer."""
        self._scalars[variable] = length

    def set_vector(self, variable: Any, lengths: Sequence[Length]) -> None:
        """Take notice of the integers in a vector."""
        self._vectors[variable] = tuple(lengths)

    def set_range(self, variable: Any, length: Length) -> None:
        """Take notice of what is 0, 1, 2, …, ``length`` - 1."""
        self._ranges[variable] = length

    def set_length(self, variable: Any, axis: int, length: Length) -> None:
        """Take notice of a length along one axis."""
        dims = list(self.dims(variable))
        dims[axis] = length
        self._dims[variable] = tuple(dims)

    def range(self, variable: Any) -> Length | None:
        """The length of what is 0, 1, 2, …; else ``None``."""
        return self._ranges.get(variable)

    def is_sure(self, length: Length) -> bool:
        """Whether a length cannot be negative, as a number of the program's own may be: -1, in Reshape."""
        return length.constant >= 0 and all(self._symbols[symbol][1] is not None for symbol in length.symbols if symbol)

    def takes_all(self, index: Any, length: Length) -> bool:
        """Whether a basic index takes all of an axis of some length, in order."""
        if not isinstance(index, slice):
            return False
        begins = index.start is None or self.scalar(index.start) == Length(0)
        ends = index.stop is None or self.scalar(index.stop) == length
        return begins and ends and (index.step is None or self.scalar(index.step) == ONE)

    @staticmethod
    def per_row(length: Length) -> Length | None:
        """The k of rows × k; ``None`` for what is not known to be that."""
        return length.over(ROWS)

    # -- their values

    def value(self, length: Length) -> Any:
        """The serial program's value: a symbolic int64 scalar."""
        if length not in self._values:
            factors = [self._value_of_symbol(symbol) for symbol in length.symbols]
            if length.constant != 1 or not factors:
                factors.insert(0, T.constant(length.constant, dtype="int64"))
            self._values[length] = functools.reduce(lambda a, b: a * b, factors)
        return self._values[length]

    def _value_of_symbol(self, symbol: int) -> Any:
        if symbol == 0:
            return self._rows.whole
        variable, axis = self._symbols[symbol]
        if axis is None:
            return T.cast(T.as_tensor_variable(self._whole(variable)), "int64")
        length = length_along(self._new(variable), axis)
        self._of_shapes.append(length)
        return length

    @property
    def common(self) -> list[Any]:
        """Lengths that are taken of what a rank holds, and that are the same whichever rows these are."""
        return list(self._of_shapes)

    def here(self, per_row: Length) -> Any:
        """The twin of rows × k: rows here × k."""
        return self._rows.here if per_row == ONE else self._rows.here * self.value(per_row)

    def resolve(self, variable: Any, entries: Sequence[Length]) -> tuple[Length, ...]:
        """The entries of a new shape, with what -1 stands for where that can be told."""
        others = functools.reduce(Length.times, [one for one in entries if one != UNKNOWN], ONE)
        size = functools.reduce(Length.times, self.dims(variable), ONE).over(others)
        return tuple(size if one == UNKNOWN and size is not None else one for one in entries)
