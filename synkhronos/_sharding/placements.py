"""Placements of variables across ranks: `Replicate`, `Shard` and `Partial`, as in PyTorch's DTensor and GSPMD.

Also symbolic lengths (`Length`), and helpers that copy Apply nodes and find the user's source lines.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from synkhronos._backends import FOLDER, LIBRARIES, TensorType, constant_value, known_lengths, ops, with_broadcastable
from synkhronos._backends import copied as node_with


class Length(NamedTuple):
    """Length of an axis, or another integer: the product of a constant and of symbols.

    Attributes
    ----------
    constant : int
    symbols : tuple of int
        The sorted numbers of the symbols. Symbol 0 is the number of rows of a call.
    """

    constant: int
    symbols: tuple[int, ...] = ()

    def times(self, other: Length) -> Length:
        """Return the product of two lengths."""
        return Length(self.constant * other.constant, tuple(sorted(self.symbols + other.symbols)))

    def over(self, other: Length) -> Length | None:
        """Return the quotient, ``None`` if ``other`` does not divide this length for all values of the symbols."""
        left = Counter(self.symbols)
        left.subtract(other.symbols)
        if other.constant <= 0 or self.constant % other.constant or any(n < 0 for n in left.values()):
            return None
        return Length(self.constant // other.constant, tuple(sorted(left.elements())))


ONE = Length(1)
ROWS = Length(1, (0,))
UNKNOWN = Length(-1)  # the -1 of a Reshape


@dataclass(frozen=True)
class Replicate:
    """Placement in which every rank holds the serial program's value. Experimental; see `register_sharding`.

    Examples
    --------
    >>> synk.Replicate()
    Replicate()
    """


@dataclass(frozen=True)
class Partial:
    """Placement in which a reduction of the ranks' values gives the serial value. Experimental.

    Parameters
    ----------
    op : str
        The reduction: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``.

    Raises
    ------
    ValueError
        For another op.

    See Also
    --------
    register_sharding

    Examples
    --------
    >>> synk.Partial("max")
    Partial(op='max')
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in ("sum", "prod", "max", "min"):
            raise ValueError(f"Partial: the op must be 'sum', 'prod', 'max' or 'min'; got {self.op!r}")


@dataclass(frozen=True)
class Shard:
    """Placement in which each rank holds its own rows along an axis. Experimental; see `register_sharding`.

    The axis has length ``outer`` × rows × ``inner``: its positions are (outer index, row, inner index), row-major.

    Parameters
    ----------
    axis : int
        In a rule, negative axes count from the end.
    outer, inner : Length
        Sharding rules leave them out.

    Examples
    --------
    >>> synk.Shard(0)
    Shard(0)
    """

    axis: int
    outer: Length = ONE
    inner: Length = ONE

    @property
    def length(self) -> Length:
        """Length of the full value along the axis."""
        return self.outer.times(ROWS).times(self.inner)

    def __repr__(self) -> str:
        return f"Shard({self.axis})"

    def moved(self, axis: int) -> Shard:
        """Return the same sharding along another axis.

        Parameters
        ----------
        axis : int
            The other axis.

        Returns
        -------
        Shard
            With the same `outer` and `inner`.
        """
        return Shard(axis, self.outer, self.inner)

    def agrees(self, other: Any) -> bool:
        """Return whether this and another sharding of equally long arrays give each rank the same positions.

        Parameters
        ----------
        other : Placement
            For a `Replicate` or `Partial`, the result is ``False``.

        Returns
        -------
        bool
            Whether the positions are the same.
        """
        if not isinstance(other, Shard) or self.axis != other.axis:
            return False
        return self == other or self.outer == other.outer == ONE or self.inner == other.inner == ONE


Placement = Union[Replicate, Partial, Shard]


class Placed(NamedTuple):
    """A variable of the sharded graph with its placement."""

    variable: Any
    placement: Placement


# -- names and source lines of variables

_OWN = os.path.dirname(os.path.dirname(__file__))
_NOT_SHOWN = (FOLDER, _OWN, threading.__file__)  # large graphs are built in a thread


def described(variable: Any) -> str:
    """Return a variable's name, with the line of the program that created it if that is known."""
    line = line_of(variable)
    return f"{variable} ({line})" if line else str(variable)


def line_of(variable: Any) -> str:
    """Return file, number and text of the user's line that created a variable; empty if it is not known.

    Theano often records no line of the program for gradients. The result is then the line of the nearest variable from
    which the gradient is computed, or if no line is of the user's program, the first one of a library.
    """
    waiting, seen, of_library = [variable], {variable}, ""
    while waiting:
        for one in waiting:
            line, is_of_user = _own_line(one)
            if is_of_user:
                return line
            of_library = of_library or line
        inputs = [one for each in waiting if each.owner is not None for one in each.owner.inputs]
        waiting = [one for one in dict.fromkeys(inputs) if one not in seen]
        seen.update(waiting)
        waiting.sort(key=lambda one: one.owner is None)  # the line that declares an input helps least
    return of_library


def _own_line(variable: Any) -> tuple[str, bool]:
    """Return the innermost recorded line of the user's program, or of a library, and whether it is the user's."""
    traces = getattr(variable.tag, "trace", None) or []
    frames = [frame for trace in traces for frame in reversed(trace) if not frame[0].startswith(_NOT_SHOWN)]
    frames.sort(key=lambda frame: frame[0].startswith(LIBRARIES))
    if not frames:
        return "", False
    path, number, _, text = frames[0]
    return f"{os.path.basename(path)}:{number} {text or ''}".strip(), not path.startswith(LIBRARIES)


# -- Apply nodes and operations

#: The methods that define what an operation computes.
_COMPUTING = ("perform", "c_code", "make_thunk")


def kind_of(op: Any) -> type:
    """Return the type whose rule applies to an operation: its own, or the base of a subclass that computes like it."""
    for base in (ops.CheckAndRaise, ops.OpFromGraph):
        if isinstance(op, base) and all(
            getattr(type(op), name, None) is getattr(base, name, None) for name in _COMPUTING
        ):
            return base
    return type(op)


def copied(node: Any, inputs: Sequence[Any], *, is_serial: bool = False) -> list[Any]:
    """Apply a node's operation to other inputs, and return the outputs.

    Parameters
    ----------
    node : Apply
        Apply node of the user's graph.
    inputs : list of variables
        Variables of the same types, except for static lengths.
    is_serial : bool
        Whether the inputs have the serial program's values, and therefore its static lengths.
    """
    if all(new is old for new, old in zip(inputs, node.inputs)):
        return list(node.outputs)
    return node_with(node, inputs, is_serial)


def placed(node: Any, inputs: Sequence[Any], placement: Placement) -> list[Placed]:
    """Return the outputs of a copy of an Apply node with other inputs, all with the same placement."""
    return [Placed(output, placement) for output in copied(node, inputs)]


def can_reduce(variable: Any, op: str = "sum") -> bool:
    """Return whether the ranks' values of a variable can be reduced with ``op``."""
    dtype = str(getattr(variable, "dtype", ""))
    if dtype == "bool":  # reduced as uint8
        return op in ("max", "min")
    return dtype in _REDUCED_DTYPES


_REDUCED_DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def is_zero(variable: Any) -> bool:
    """Return whether all elements of a variable are known to be zero."""
    value = constant_value(variable)
    return value is not None and bool(value == 0)


def has_one_partial_input(variable: Any, placements: Mapping[Any, Placement]) -> bool:
    """Return whether a variable is computed elementwise from exactly one input that is not replicated, of equal size.

    The all-reduce is then applied to that input, so that its other uses need none. "Of equal size" means that neither
    is broadcast to the other.
    """
    node = variable.owner
    if node is None or not isinstance(node.op, (ops.Elemwise, ops.DimShuffle)):
        return False
    sums = [one for one in node.inputs if not isinstance(placements[one], Replicate)]
    return len(sums) == 1 and sums[0].broadcastable.count(False) == variable.broadcastable.count(False)


def is_broadcast(placed: Placed) -> bool:
    """Return whether the type states the length of the sharded axis: 1, which broadcasts, or another one in PyTensor.

    Such a type is wrong for a rank's shard, which is shorter.
    """
    return isinstance(placed.placement, Shard) and known_lengths(placed.variable)[placed.placement.axis] is not None


def typed(new: Any, variable: Any) -> Any:
    """Return a variable of the sharded graph with the type of the user's variable.

    Static lengths other than 1 may be missing.
    """
    if new.type == variable.type:
        return new
    if isinstance(new.type, TensorType) and new.dtype == variable.dtype and new.ndim == variable.ndim:
        return with_broadcastable(new, variable.broadcastable)
    raise TypeError(f"{variable}: {new.type} in place of {variable.type}")
