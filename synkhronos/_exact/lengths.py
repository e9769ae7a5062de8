"""What is known of lengths: which numbers of the serial program are exactly rows × k, and along which axes they lie.

All that is not known is a symbol of its own, whose value is the serial program's. So a number is rows × k only where
that is proven, by the kinds of nodes in `follow` alone; whatever else is computed from shapes (N + 1, N // 2, a cast
to floats) is a plain number, the same on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import theano
import theano.tensor as T
from theano.compile.ops import Rebroadcast, Shape, Shape_i
from theano.tensor.basic import (
    Alloc,
    ARange,
    Dot,
    Join,
    MaxAndArgmax,
    Reshape,
    ScalarFromTensor,
    TensorFromScalar,
)
from theano.tensor.elemwise import All, Any as AnyOp, CAReduce, CAReduceDtype, DimShuffle, Elemwise, Prod, Sum
from theano.tensor.opt import MakeVector
from theano.tensor.subtensor import IncSubtensor, Subtensor, get_idx_list

from synkhronos._exact.placements import ONE, ROWS, UNKNOWN, Length

__all__ = ["Lengths", "Rows", "constant_of", "reduced_axes"]

_REDUCTIONS = (CAReduce, CAReduceDtype, Sum, Prod, All, AnyOp, MaxAndArgmax)


class Rows:
    """The rows of a call, as symbolic int64 scalars: how many in all, the first one here, how many here."""

    def __init__(self, whole: Any, first: Any, here: Any) -> None:
        self.whole, self.first, self.here = whole, first, here


def constant_of(variable: Any) -> int | None:
    """The value of an integer that never changes, as far as Theano sees that; else ``None``."""
    try:
        value = T.get_scalar_constant_value(variable, only_process_constants=False)
    except (T.NotScalarConstantError, AttributeError, TypeError):
        return None
    return int(value) if np.asarray(value).dtype.kind in "iub" else None


def reduced_axes(node: Any) -> tuple[int, ...]:
    """The axes over which a node reduces its input."""
    n_axes = node.inputs[0].ndim
    return tuple(range(n_axes)) if node.op.axis is None else tuple(axis % n_axes for axis in node.op.axis)


class Lengths:
    """Lengths of the variables of the user's graph.

    Parameters
    ----------
    rows : Rows
    new : dict
        For each variable of the user's graph, that of the divided graph; it grows while the graph is walked.
    """

    def __init__(self, rows: Rows, new: dict[Any, Any]) -> None:
        self._rows = rows
        self._new = new
        self._numbers: dict[tuple[Any, int | None], int] = {}
        self._symbols: list[tuple[Any, int | None]] = [(None, None)]  # 0: the rows
        self._scalars: dict[Any, Length] = {}
        self._vectors: dict[Any, tuple[Length, ...]] = {}
        self._dims: dict[Any, tuple[Length, ...]] = {}
        self._ranges: dict[Any, Length] = {}
        self._values: dict[Length, Any] = {}

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
        if variable not in self._vectors and isinstance(variable, T.TensorConstant) and variable.dtype == "int64":
            if variable.ndim == 1 and all(variable.data >= -1):
                self._vectors[variable] = tuple(Length(int(number)) for number in variable.data)
        return self._vectors.get(variable)

    def dims(self, variable: Any) -> tuple[Length, ...]:
        """The serial program's shape of a variable."""
        if variable not in self._dims:
            if isinstance(variable, T.TensorConstant):
                dims = tuple(map(Length, variable.data.shape))
            else:
                dims = tuple(
                    ONE if fixed else self._symbol(variable, axis) for axis, fixed in enumerate(variable.broadcastable)
                )
            self._dims[variable] = dims
        return self._dims[variable]

    def set_length(self, variable: Any, axis: int, length: Length) -> None:
        """Take notice of a length along one axis."""
        dims = list(self.dims(variable))
        dims[axis] = length
        self._dims[variable] = tuple(dims)

    def range(self, variable: Any) -> Length | None:
        """The length of what is 0, 1, 2, …, rows × k - 1; else ``None``."""
        return self._ranges.get(variable)

    def is_sure(self, length: Length) -> bool:
        """Whether a length cannot be negative, as a number of the program's own may be: -1, in Reshape."""
        return length.constant >= 0 and all(self._symbols[symbol][1] is not None for symbol in length.symbols if symbol)

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
        new = self._new[variable]
        return T.cast(T.as_tensor_variable(new), "int64") if axis is None else Shape_i(axis)(new)

    def here(self, per_row: Length) -> Any:
        """The twin of rows × k: rows here × k."""
        return self._rows.here if per_row == ONE else self._rows.here * self.value(per_row)

    # -- what nodes make of it

    def follow(self, node: Any) -> None:
        """Take notice of the outputs of a node, where it is of a kind that is understood."""
        follower = _FOLLOWERS.get(type(node.op))
        if follower is not None:
            follower(self, node)

    def _follow_shape(self, node: Any) -> None:
        if isinstance(node.inputs[0].type, T.TensorType):
            self._vectors[node.outputs[0]] = self.dims(node.inputs[0])

    def _follow_shape_i(self, node: Any) -> None:
        self._scalars[node.outputs[0]] = self.dims(node.inputs[0])[node.op.i]

    def _follow_make_vector(self, node: Any) -> None:
        if node.outputs[0].dtype == "int64":
            self._vectors[node.outputs[0]] = tuple(map(self.scalar, node.inputs))

    def _follow_join(self, node: Any) -> None:
        if node.outputs[0].ndim == 1 and node.outputs[0].dtype == "int64":
            parts = [self.vector(part) for part in node.inputs[1:]]
            if all(part is not None for part in parts):
                self._vectors[node.outputs[0]] = tuple(length for part in parts for length in part or ())

    def _follow_subtensor(self, node: Any) -> None:
        lengths, output = self.vector(node.inputs[0]), node.outputs[0]
        index = get_idx_list(node.inputs, node.op.idx_list)
        if lengths is not None:
            found = _pick(lengths, index[0])
            if isinstance(found, Length):
                self._scalars[output] = found
            elif found is not None:
                self._vectors[output] = found
        kept, axis = [], 0
        for axis, one in enumerate(index):
            if _is_full(one):
                kept.append((len(kept), axis))
            elif isinstance(one, slice):
                kept.append((len(kept), -1))
        kept += [(len(kept) + i, old) for i, old in enumerate(range(len(index), node.inputs[0].ndim))]
        dims = self.dims(node.inputs[0])
        for place, axis in kept:
            if axis >= 0 and not output.broadcastable[place]:
                self.set_length(output, place, dims[axis])

    def _follow_copy(self, node: Any) -> None:
        if getattr(node.inputs[0], "ndim", 0) == 0:
            self._scalars[node.outputs[0]] = self.scalar(node.inputs[0])
        else:
            self._follow_first(node)

    def _follow_first(self, node: Any) -> None:
        for axis, length in enumerate(self.dims(node.inputs[0])):
            if not node.outputs[0].broadcastable[axis]:
                self.set_length(node.outputs[0], axis, length)

    def _follow_elementwise(self, node: Any) -> None:
        output, scalar_op = node.outputs[0], node.op.scalar_op
        if output.ndim == 0:
            if output.dtype == "int64" and isinstance(scalar_op, (theano.scalar.Cast, theano.scalar.Identity)):
                if node.inputs[0].dtype in T.int_dtypes:
                    self._scalars[output] = self.scalar(node.inputs[0])
            elif output.dtype == "int64" and isinstance(scalar_op, theano.scalar.Mul):
                self._product(output, list(map(self.scalar, node.inputs)))
            return
        for axis in range(output.ndim):
            lengths = [self.dims(one)[axis] for one in node.inputs if not one.broadcastable[axis]]
            if lengths and not output.broadcastable[axis]:  # all are equal: prefer what tells most
                best = min(lengths, key=lambda length: (0 not in length.symbols, len(length.symbols)))
                for one in node.outputs:
                    self.set_length(one, axis, best)

    def _product(self, output: Any, lengths: Sequence[Length]) -> None:
        if all(length.constant >= 0 for length in lengths):
            self._scalars[output] = functools.reduce(Length.times, lengths, ONE)

    def _follow_dimshuffle(self, node: Any) -> None:
        output, order = node.outputs[0], node.op.new_order
        if node.inputs[0].ndim == 0:
            if order == () and node.inputs[0].dtype == "int64":
                self._scalars[output] = self.scalar(node.inputs[0])
            elif order == ("x",) and node.inputs[0].dtype == "int64":
                self._vectors[output] = (self.scalar(node.inputs[0]),)
            return
        dims = self.dims(node.inputs[0])
        for place, axis in enumerate(order):
            if axis != "x":
                self.set_length(output, place, dims[axis])

    def _follow_reduction(self, node: Any) -> None:
        lengths, output = self.vector(node.inputs[0]), node.outputs[0]
        scalar_op = getattr(node.op, "scalar_op", None)
        if lengths is not None and output.dtype == "int64" and isinstance(scalar_op, theano.scalar.Mul):
            self._product(output, lengths)
        kept = [axis for axis in range(node.inputs[0].ndim) if axis not in reduced_axes(node)]
        for one in node.outputs:
            for place, axis in enumerate(kept):
                self.set_length(one, place, self.dims(node.inputs[0])[axis])

    def _follow_dot(self, node: Any) -> None:
        a, b = node.inputs
        for place, length in enumerate((*self.dims(a)[:-1], *self.dims(b)[1:])):
            self.set_length(node.outputs[0], place, length)

    def _follow_alloc(self, node: Any) -> None:
        for place, number in enumerate(node.inputs[1:]):
            if not node.outputs[0].broadcastable[place]:
                self.set_length(node.outputs[0], place, self.scalar(number))

    def _follow_reshape(self, node: Any) -> None:
        entries = self.vector(node.inputs[1])
        for place, length in enumerate(self.resolve(node.inputs[0], entries) if entries else ()):
            if self.is_sure(length) and not node.outputs[0].broadcastable[place]:
                self.set_length(node.outputs[0], place, length)

    def resolve(self, variable: Any, entries: Sequence[Length]) -> tuple[Length, ...]:
        """The entries of a new shape, with what -1 stands for where that can be told."""
        others = functools.reduce(Length.times, [one for one in entries if one != UNKNOWN], ONE)
        size = functools.reduce(Length.times, self.dims(variable), ONE).over(others)
        return tuple(size if one == UNKNOWN and size is not None else one for one in entries)

    def _follow_arange(self, node: Any) -> None:
        start, stop, step = map(self.scalar, node.inputs)
        if start == Length(0) and step == ONE and stop.constant >= 0:
            self.set_length(node.outputs[0], 0, stop)
            if self.per_row(stop) is not None:
                self._ranges[node.outputs[0]] = stop


def _is_full(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _pick(lengths: tuple[Length, ...], index: Any) -> Any:
    """What an index of constants takes of a vector's lengths; ``None`` where it is no constant."""
    if not isinstance(index, slice):
        place = constant_of(index)
        return lengths[place] if place is not None and -len(lengths) <= place < len(lengths) else None
    bounds = [None if one is None else constant_of(one) for one in (index.start, index.stop, index.step)]
    if any(one is None and given is not None for one, given in zip(bounds, (index.start, index.stop, index.step))):
        return None
    return lengths[slice(*bounds)]


_FOLLOWERS: dict[type, Callable[[Lengths, Any], None]] = {
    Shape: Lengths._follow_shape,
    Shape_i: Lengths._follow_shape_i,
    MakeVector: Lengths._follow_make_vector,
    Join: Lengths._follow_join,
    Subtensor: Lengths._follow_subtensor,
    IncSubtensor: Lengths._follow_first,
    ScalarFromTensor: Lengths._follow_copy,
    TensorFromScalar: Lengths._follow_copy,
    Rebroadcast: Lengths._follow_copy,
    Elemwise: Lengths._follow_elementwise,
    DimShuffle: Lengths._follow_dimshuffle,
    **dict.fromkeys(_REDUCTIONS, Lengths._follow_reduction),
    Dot: Lengths._follow_dot,
    Alloc: Lengths._follow_alloc,
    Reshape: Lengths._follow_reshape,
    ARange: Lengths._follow_arange,
}
