"""Where the rows of a variable are: every variable of a divided graph has one of three placements.

The terms are those of GSPMD and of PyTorch's DTensor. A length is a product of whole numbers of the serial program.

What a user knows a variable by: its name, and the line of the program that made it.

Nodes of the user's graph and of the divided one, side by side.
"""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from synkhronos._backends import FOLDER, TensorType, ancestors, known_lengths, ops, with_broadcastable
from synkhronos._backends import copied as node_with

__all__ = [
    "ONE",
    "ROWS",
    "UNKNOWN",
    "Length",
    "Partial",
    "Placed",
    "Placement",
    "Replicate",
    "Shard",
    "copied",
    "described",
    "is_broadcast",
    "is_of_one_sum",
    "is_of_the_user",
    "kind_of",
    "line_of",
    "typed",
]


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


_OWN = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (*map(sysconfig.get_path, ("purelib", "platlib", "stdlib", "platstdlib")), "<frozen ")


def described(variable: Any) -> str:
    """A variable's name, and where the program made it."""
    line = line_of(variable)
    return f"{variable} ({line})" if line else str(variable)


def line_of(variable: Any) -> str:
    """Where the user's program made a variable: file, number and text of the line; empty where that is not known.

    Of gradients Theano often keeps none of the program's lines; it is that of the nearest variable then which they are
    computed of.
    """
    waiting, seen = [variable], {variable}
    while waiting:
        found = next(filter(None, map(_own_line, waiting)), "")
        if found:
            return found
        inputs = [one for each in waiting if each.owner is not None for one in each.owner.inputs]
        waiting = [one for one in dict.fromkeys(inputs) if one not in seen]
        seen.update(waiting)
        waiting.sort(key=lambda one: one.owner is None)  # where inputs are declared tells least
    return ""


def _own_line(variable: Any) -> str:
    """The innermost line of the program's own, of those that Theano has kept; else the innermost one of a library's."""
    traces = getattr(variable.tag, "trace", None) or []
    frames = [frame for trace in traces for frame in reversed(trace) if not frame[0].startswith((FOLDER, _OWN))]
    frames.sort(key=lambda frame: frame[0].startswith(_LIBRARIES))
    return f"{os.path.basename(frames[0][0])}:{frames[0][1]} {frames[0][3] or ''}".strip() if frames else ""


#: By what an operation computes.
_COMPUTING = ("perform", "c_code", "make_thunk")


def kind_of(op: Any) -> type:
    """The type of an operation, or that of a check or an inner graph, if it is derived from that and computes alike."""
    for base in (ops.CheckAndRaise, ops.OpFromGraph):
        if isinstance(op, base) and all(
            getattr(type(op), name, None) is getattr(base, name, None) for name in _COMPUTING
        ):
            return base
    return type(op)


#: The packages whose operations always give the same results for the same inputs.
_PURE = ("theano", "pytensor", "pymc", "lasagne", "synkhronos")


def is_of_the_user(op: Any) -> bool:
    """Whether an operation, or one within it, is computed by Python code from outside of the known packages.

    What such code does is not known: it may draw from ``np.random``.
    """
    if isinstance(op, ops.Blockwise):
        return is_of_the_user(op.core_op)
    if isinstance(op, ops.FromFunctionOp):
        return True
    if _package_of(op, "c_code") in _PURE and any(_package_of(op, name) not in _PURE for name in ("perform", "impl")):
        return True
    scalar_op = getattr(op, "scalar_op", None)  # which Elemwise applies to each element
    if scalar_op is not None and is_of_the_user(scalar_op):
        return True
    inner = {variable.owner for variable in ancestors(ops.inner_outputs(op))} - {None}
    return any(is_of_the_user(node.op) for node in inner)


def _package_of(op: Any, method: str) -> str:
    """The package that defines a method of an operation; that of the engine where nothing does."""
    function = getattr(type(op), method, None)
    return str(getattr(function, "__module__", None) or _PURE[0]).split(".")[0]


def copied(node: Any, inputs: Sequence[Any], *, is_serial: bool = False) -> list[Any]:
    """The outputs of a node like this one, of other inputs.

    Parameters
    ----------
    node : Apply
        Of the user's graph.
    inputs : list of variables
        Of the same types, except for static lengths.
    is_serial : bool
        Whether the inputs have the values of the serial program, and so the static lengths that it gives them.
    """
    if all(new is old for new, old in zip(inputs, node.inputs)):
        return list(node.outputs)
    return node_with(node, inputs, is_serial)


def is_of_one_sum(variable: Any, placements: Mapping[Any, Placement]) -> bool:
    """Whether a variable is made of one that is no larger and can be reduced in its place, for others too."""
    node = variable.owner
    if node is None or not isinstance(node.op, (ops.Elemwise, ops.DimShuffle)):
        return False
    sums = [one for one in node.inputs if not isinstance(placements[one], Replicate)]
    return len(sums) == 1 and sums[0].broadcastable.count(False) == variable.broadcastable.count(False)


def is_broadcast(placed: Placed) -> bool:
    """Whether rows are said to lie along an axis that is broadcast, or of a length that is the same on all ranks."""
    return isinstance(placed.placement, Shard) and known_lengths(placed.variable)[placed.placement.axis] is not None


def typed(new: Any, variable: Any) -> Any:
    """A variable of the divided graph, of the type of the user's; but it need not tell lengths other than 1."""
    if new.type == variable.type:
        return new
    if isinstance(new.type, TensorType) and new.dtype == variable.dtype and new.ndim == variable.ndim:
        return with_broadcastable(new, variable.broadcastable)
    raise TypeError(f"{variable}: {new.type} in place of {variable.type}")
