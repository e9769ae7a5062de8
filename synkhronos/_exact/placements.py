"""Where the rows of a variable are: every variable of a divided graph has one of three placements.

The terms are those of GSPMD and of PyTorch's DTensor. A length is a product of whole numbers of the serial program.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

__all__ = ["ONE", "ROWS", "UNKNOWN", "Length", "Partial", "Placed", "Placement", "Replicate", "Shard"]


class Length(NamedTuple):
    """A product: of a constant, and of symbols, which are sorted numbers; symbol 0 is the number of rows of a call."""

    constant: int
    symbols: tuple[int, ...] = ()

    def times(self, other: Length) -> Length:
        """The product of two lengths."""
        return Length(self.constant * other.constant, tuple(sorted(self.symbols + other.symbols)))

    def over(self, other: Length) -> Length | None:
        """The quotient, where each factor of ``other`` is found here too; else ``None``."""
        left = Counter(self.symbols)
        left.subtract(other.symbols)
        if other.constant <= 0 or self.constant % other.constant or any(n < 0 for n in left.values()):
            return None
        return Length(self.constant // other.constant, tuple(sorted(left.elements())))


ONE = Length(1)
ROWS = Length(1, (0,))
UNKNOWN = Length(-1)  # as in Reshape


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the serial program's value."""


@dataclass(frozen=True)
class Partial:
    """The serial program's value is the sum of what the ranks hold; its shape is that on each rank."""


@dataclass(frozen=True)
class Shard:
    """Each rank holds its rows; along ``axis`` a place is (one of ``outer``, row, one of ``inner``), row-major."""

    axis: int
    outer: Length = ONE
    inner: Length = ONE

    @property
    def length(self) -> Length:
        """That of the whole along the axis."""
        return self.outer.times(ROWS).times(self.inner)

    def moved(self, axis: int) -> Shard:
        """The same along another axis."""
        return Shard(axis, self.outer, self.inner)

    def agrees(self, other: Any) -> bool:
        """Whether the places are the same in arrays that are as long along the axis."""
        if not isinstance(other, Shard) or self.axis != other.axis:
            return False
        return self == other or self.outer == other.outer == ONE or self.inner == other.inner == ONE


Placement = Union[Replicate, Partial, Shard]


class Placed(NamedTuple):
    """A variable of the divided graph, and where its rows are."""

    variable: Any
    placement: Placement
