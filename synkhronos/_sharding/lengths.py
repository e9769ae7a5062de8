"""Symbolic shape inference: which axes and integers of a graph are exactly "number of rows × k".

Here k is a product of constants, lengths and other integers that do not depend on the rows. Such an axis can be sharded
by rows, and such an integer, in a reshape for example, is replaced by "this rank's rows × k". The functions in
`_LENGTH_RULES` prove that a length has this form. All other numbers that are computed from shapes (N + 1, N // 2, a
cast to floats) keep the serial program's value, which is the same on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos._backends import T, TensorConstant, TensorType, constant_value, known_lengths, length_along, ops, scalar
from synkhronos._sharding.placements import ONE, ROWS, UNKNOWN, Length


class RowCounts:
    """Numbers of rows of a call, as symbolic int64 scalars.

    Parameters
    ----------
    total : variable
        Number of rows on all ranks together.
    first : variable
        Index of this rank's first row.
    local : variable
        Number of rows on this rank.
    """

    def __init__(self, total: Any, first: Any, local: Any) -> None:
        self.total, self.first, self.local = total, first, local

    @classmethod
    def as_inputs(cls) -> RowCounts:
        """Return the numbers as new inputs of a function."""
        return cls(T.lscalar("rows"), T.lscalar("first row"), T.lscalar("rows here"))


def constant_of(variable: Any) -> int | None:
    """Return the value of an integer variable that the backend recognizes as constant, else ``None``."""
    value = constant_value(variable)
    return int(value) if value is not None and np.asarray(value).dtype.kind in "iub" else None


def reduced_axes(node: Any) -> tuple[int, ...]:
    """Return the axes over which a node reduces its input."""
    n_axes = node.inputs[0].ndim
    if not n_axes:
        return ()  # PyTensor may reduce a scalar over an axis 0
    return tuple(range(n_axes)) if node.op.axis is None else tuple(axis % n_axes for axis in node.op.axis)


class Lengths:
    """Known lengths and integers of the user's graph, with their symbolic values.

    Parameters
    ----------
    rows : RowCounts
    new : callable
        Returns the counterpart of a variable of the user's graph in the sharded graph.
    replicated : callable
        Returns the serial value of a variable of the user's graph.

    Attributes
    ----------
    ranges : dict
        Lengths of the arrays that are known to be 0, 1, 2, … along axis 0, and have length 1 along all others.
    common : list of variables
        Symbolic lengths read from the shape of a rank's own values, along axes that are not sharded.
    """

    def __init__(self, rows: RowCounts, new: Callable[[Any], Any], replicated: Callable[[Any], Any]) -> None:
        self._rows = rows
        self._new, self._replicated = new, replicated
        self._numbers: dict[tuple[Any, int | None], int] = {}
        self._symbols: list[tuple[Any, int | None]] = [(None, None)]  # symbol 0: the number of rows
        self._scalars: dict[Any, Length] = {}
        self._vectors: dict[Any, tuple[Length, ...]] = {}
        self._dims: dict[Any, tuple[Length, ...]] = {}
        self._values: dict[Length, Any] = {}
        self.ranges: dict[Any, Length] = {}
        self.common: list[Any] = []

    # -- known lengths

    def _symbol(self, variable: Any, axis: int | None) -> Length:
        key = (variable, axis)
        if key not in self._numbers:
            self._numbers[key] = len(self._symbols)
            self._symbols.append(key)
        return Length(1, (self._numbers[key],))

    def scalar(self, variable: Any) -> Length:
        """Return an integer variable of the user's graph as a `Length`."""
        if variable not in self._scalars:
            constant = constant_of(variable)
            self._scalars[variable] = (
                self._symbol(variable, None) if constant is None or constant < -1 else Length(constant)
            )
        return self._scalars[variable]

    def vector(self, variable: Any) -> tuple[Length, ...] | None:
        """Return the elements of an integer vector as lengths; ``None`` if they are unknown."""
        is_constant = isinstance(variable, TensorConstant) and variable.ndim == 1 and variable.dtype == "int64"
        if variable not in self._vectors and is_constant and all(variable.data >= -1):
            self._vectors[variable] = tuple(Length(int(number)) for number in variable.data)
        return self._vectors.get(variable)

    def dims(self, variable: Any) -> tuple[Length, ...]:
        """Return the shape that a variable has in the serial program."""
        if variable not in self._dims:
            known = variable.data.shape if isinstance(variable, TensorConstant) else known_lengths(variable)
            dims = [self._symbol(variable, axis) if n is None else Length(n) for axis, n in enumerate(known)]
            self._dims[variable] = tuple(dims)
        return self._dims[variable]

    def set_scalar(self, variable: Any, length: Length) -> None:
        """Record that an integer variable equals a length."""
        self._scalars[variable] = length

    def set_vector(self, variable: Any, lengths: Sequence[Length]) -> None:
        """Record that the elements of an integer vector equal some lengths."""
        self._vectors[variable] = tuple(lengths)

    def set_length(self, variable: Any, axis: int, length: Length) -> None:
        """Record the length of a variable along one axis."""
        dims = list(self.dims(variable))
        dims[axis] = length
        self._dims[variable] = tuple(dims)

    def set_dims(self, variable: Any, lengths: Sequence[Length | None]) -> None:
        """Record the known lengths of a variable, except along broadcastable axes; ``None`` for unknown lengths."""
        for axis, length in enumerate(lengths):
            if length is not None and not variable.broadcastable[axis]:
                self.set_length(variable, axis, length)

    def is_sure(self, length: Length) -> bool:
        """Return whether a length is known not to be negative; a computed integer may be the -1 of a Reshape."""
        return length.constant >= 0 and all(self._symbols[symbol][1] is not None for symbol in length.symbols if symbol)

    def takes_all(self, index: Any, length: Length) -> bool:
        """Return whether a basic index selects all of an axis of a given length, in order."""
        if not isinstance(index, slice):
            return False
        begins = index.start is None or self.scalar(index.start) == Length(0)
        ends = index.stop is None or self.scalar(index.stop) == length
        return begins and ends and (index.step is None or self.scalar(index.step) == ONE)

    @staticmethod
    def per_row(length: Length) -> Length | None:
        """Return k if a length is rows × k, else ``None``."""
        return length.over(ROWS)

    # -- symbolic values

    def value(self, length: Length) -> Any:
        """Return the serial program's value of a length: a symbolic int64 scalar."""
        if length not in self._values:
            factors = [self._value_of_symbol(symbol) for symbol in length.symbols]
            if length.constant != 1 or not factors:
                factors.insert(0, T.constant(length.constant, dtype="int64"))
            self._values[length] = functools.reduce(lambda a, b: a * b, factors)
        return self._values[length]

    def _value_of_symbol(self, symbol: int) -> Any:
        if symbol == 0:
            return self._rows.total
        variable, axis = self._symbols[symbol]
        if axis is None:
            return T.cast(T.as_tensor_variable(self._replicated(variable)), "int64")
        length = length_along(self._new(variable), axis)
        self.common.append(length)
        return length

    def local(self, per_row: Length) -> Any:
        """Return k times the number of rows on this rank, as a symbolic scalar."""
        return self._rows.local if per_row == ONE else self._rows.local * self.value(per_row)

    def resolve(self, variable: Any, entries: Sequence[Length]) -> tuple[Length, ...]:
        """Return the entries of a new shape, with each -1 replaced by its length if that can be inferred.

        Parameters
        ----------
        variable : variable
            Input of the Reshape.
        entries : sequence of Length
        """
        others = functools.reduce(Length.times, [one for one in entries if one != UNKNOWN], ONE)
        size = functools.reduce(Length.times, self.dims(variable), ONE).over(others)
        return tuple(size if one == UNKNOWN and size is not None else one for one in entries)


def infer_lengths(known: Lengths, node: Any) -> None:
    """Record what is known about the lengths and integers of an Apply node's outputs."""
    rule = _LENGTH_RULES.get(type(node.op))
    if rule is not None:
        rule(known, node)


def _set_product(known: Lengths, output: Any, factors: Sequence[Length]) -> None:
    if output.dtype == "int64" and all(length.constant >= 0 for length in factors):
        known.set_scalar(output, functools.reduce(Length.times, factors, ONE))


# -- integers and vectors of integers


def _shape(known: Lengths, node: Any) -> None:
    if isinstance(node.inputs[0].type, TensorType):
        known.set_vector(node.outputs[0], known.dims(node.inputs[0]))


def _shape_i(known: Lengths, node: Any) -> None:
    known.set_scalar(node.outputs[0], known.dims(node.inputs[0])[node.op.i])


def _make_vector(known: Lengths, node: Any) -> None:
    if node.outputs[0].dtype == "int64":
        known.set_vector(node.outputs[0], list(map(known.scalar, node.inputs)))


def _join(known: Lengths, node: Any) -> None:
    if node.outputs[0].ndim == 1 and node.outputs[0].dtype == "int64":
        parts = [known.vector(part) for part in ops.parts_of(node)]
        if all(part is not None for part in parts):
            known.set_vector(node.outputs[0], [length for part in parts for length in part or ()])


def _arange(known: Lengths, node: Any) -> None:
    start, stop, step = map(known.scalar, node.inputs)
    if start == Length(0) and step == ONE and known.is_sure(stop):
        known.set_length(node.outputs[0], 0, stop)
        if node.outputs[0].dtype in ("int32", "int64"):  # narrower dtypes may overflow
            known.ranges[node.outputs[0]] = stop


def _copy(known: Lengths, node: Any) -> None:
    if getattr(node.inputs[0], "ndim", 0) == 0:
        known.set_scalar(node.outputs[0], known.scalar(node.inputs[0]))
    else:
        _first(known, node)


# -- shapes


def _first(known: Lengths, node: Any) -> None:
    known.set_dims(node.outputs[0], known.dims(node.inputs[0]))


def _subtensor(known: Lengths, node: Any) -> None:
    output, index = node.outputs[0], ops.basic_index(node.inputs, node.op)
    numbers = known.vector(node.inputs[0])
    if numbers is not None and index:
        _pick(known, output, numbers, index[0])
    dims = known.dims(node.inputs[0])
    index = (*index, *[slice(None)] * (len(dims) - len(index)))
    kept = [(dims[axis], one) for axis, one in enumerate(index) if isinstance(one, slice)]
    known.set_dims(output, [length if known.takes_all(one, length) else None for length, one in kept])


def _pick(known: Lengths, output: Any, numbers: Sequence[Length], index: Any) -> None:
    """Record the elements that a constant index selects from a vector of lengths."""
    if not isinstance(index, slice):
        place = constant_of(index)
        if place is not None and -len(numbers) <= place < len(numbers):
            known.set_scalar(output, numbers[place])
        return
    given = (index.start, index.stop, index.step)
    bounds = [None if one is None else constant_of(one) for one in given]
    if not any(bound is None and one is not None for bound, one in zip(bounds, given)):
        known.set_vector(output, numbers[slice(*bounds)])


def _elementwise(known: Lengths, node: Any) -> None:
    output, kind = node.outputs[0], node.op.scalar_op
    if output.ndim == 0:
        if isinstance(kind, scalar.Mul):
            _set_product(known, output, list(map(known.scalar, node.inputs)))
        is_cast = isinstance(kind, (scalar.Cast, scalar.Identity))
        is_least = isinstance(kind, scalar.Minimum) and len(set(map(known.scalar, node.inputs))) == 1
        if is_least or (is_cast and node.inputs[0].dtype in ("int8", "int16", "int32", "int64")):
            _set_product(known, output, [known.scalar(node.inputs[0])])
    best = [_common(known, node.inputs, axis) for axis in range(output.ndim)]
    for one in node.outputs:
        known.set_dims(one, best)


def _dimshuffle(known: Lengths, node: Any) -> None:
    variable, output, order = node.inputs[0], node.outputs[0], node.op.new_order
    if order == () and variable.ndim == 0:
        _set_product(known, output, [known.scalar(variable)])
    elif order == ("x",) and variable.ndim == 0 and variable.dtype == "int64":
        known.set_vector(output, [known.scalar(variable)])
    dims = known.dims(variable)
    known.set_dims(output, [None if axis == "x" else dims[axis] for axis in order])
    if variable in known.ranges and order[:1] == (0,):
        known.ranges[output] = known.ranges[variable]


def _reduction(known: Lengths, node: Any) -> None:
    numbers, axes = known.vector(node.inputs[0]), reduced_axes(node)
    if numbers is not None and axes and isinstance(getattr(node.op, "scalar_op", None), scalar.Mul):
        _set_product(known, node.outputs[0], numbers)
    kept = [length for axis, length in enumerate(known.dims(node.inputs[0])) if axis not in axes]
    for output in node.outputs:
        known.set_dims(output, kept)


def _dot(known: Lengths, node: Any) -> None:
    a, b = node.inputs
    if a.ndim <= 2 and b.ndim <= 2:
        known.set_dims(node.outputs[0], (*known.dims(a)[:-1], *known.dims(b)[1:]))


def _blockwise(known: Lengths, node: Any) -> None:
    """Record the output shapes of a Blockwise: first its batch axes, then the core axes, which have names."""
    op, n_batch = node.op, node.op.batch_ndim(node)
    named: dict[str, Length] = {}
    for one, names in zip(node.inputs, op.inputs_sig):
        for axis, name in enumerate(names, n_batch):
            named.setdefault(name, known.dims(one)[axis])
    for output, names in zip(node.outputs, op.outputs_sig):
        batch = [_common(known, node.inputs, axis) for axis in range(n_batch)]
        known.set_dims(output, [*batch, *map(named.get, names)])


def _diagonals(known: Lengths, node: Any) -> None:
    dims, op = known.dims(node.inputs[0]), node.op
    parts = {op.axis1 % len(dims), op.axis2 % len(dims)}
    known.set_dims(node.outputs[0], [*(one for axis, one in enumerate(dims) if axis not in parts), None])


def _common(known: Lengths, inputs: Sequence[Any], axis: int) -> Length | None:
    """Return the length of an axis that the inputs share, in its most useful form; broadcast axes are left out.

    A form with the number of rows as a factor is preferred, then the one with the fewest symbols.
    """
    lengths = [known.dims(one)[axis] for one in inputs if not one.broadcastable[axis]]
    return min(lengths, key=lambda length: (0 not in length.symbols, len(length.symbols)), default=None)


def _specified(known: Lengths, node: Any) -> None:
    output = node.outputs[0]
    fixed_lengths = zip(known.dims(node.inputs[0]), known_lengths(output))
    known.set_dims(output, [one if fixed is None or known.per_row(one) else None for one, fixed in fixed_lengths])


def _alloc(known: Lengths, node: Any) -> None:
    sizes = node.inputs[len(node.inputs) - node.outputs[0].ndim :]  # without the value of an Alloc
    lengths = map(known.scalar, sizes)  # none is negative once the array exists
    known.set_dims(node.outputs[0], [one if known.per_row(one) or known.is_sure(one) else None for one in lengths])


def _reshape(known: Lengths, node: Any) -> None:
    entries = known.resolve(node.inputs[0], known.vector(node.inputs[1]) or ())
    output = node.outputs[0]
    known.set_dims(output, [length if known.is_sure(length) else None for length in entries])
    if node.inputs[0] in known.ranges and all(output.broadcastable[1:]):
        known.ranges[output] = known.ranges[node.inputs[0]]


_REDUCTIONS = (
    *(ops.CAReduce, ops.CAReduceDtype, ops.Sum, ops.Prod, ops.ProdWithoutZeros, ops.All, ops.AnyOp),
    *(ops.Max, ops.Min, ops.Argmax, ops.MaxAndArgmax),
)

_LENGTH_RULES: dict[type, Callable[[Lengths, Any], None]] = {
    ops.Shape: _shape,
    ops.Shape_i: _shape_i,
    ops.MakeVector: _make_vector,
    ops.Join: _join,
    ops.ARange: _arange,
    ops.ScalarFromTensor: _copy,
    ops.TensorFromScalar: _copy,
    ops.Rebroadcast: _copy,
    ops.IncSubtensor: _first,
    ops.Subtensor: _subtensor,
    ops.Elemwise: _elementwise,
    ops.DimShuffle: _dimshuffle,
    **dict.fromkeys(_REDUCTIONS, _reduction),
    ops.Dot: _dot,
    ops.Blockwise: _blockwise,
    ops.ExtractDiag: _diagonals,
    ops.SpecifyShape: _specified,
    ops.Alloc: _alloc,
    ops.AllocEmpty: _alloc,
    ops.Reshape: _reshape,
}
