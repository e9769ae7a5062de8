"""What nodes make of lengths that are known: the only ways in which a number of the program is known to be rows × k."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

from synkhronos._backends import TensorType, known_lengths, ops, scalar
from synkhronos._exact.lengths import Lengths, constant_of, reduced_axes
from synkhronos._exact.placements import ONE, Length

__all__ = ["follow"]


def follow(known: Lengths, node: Any) -> None:
    """Take notice of the outputs of a node, where it is of a kind that is understood."""
    follower = _FOLLOWERS.get(type(node.op))
    if follower is not None:
        follower(known, node)


def _set_dims(known: Lengths, output: Any, lengths: Sequence[Length | None]) -> None:
    for axis, length in enumerate(lengths):
        if length is not None and not output.broadcastable[axis]:
            known.set_length(output, axis, length)


def _set_product(known: Lengths, output: Any, factors: Sequence[Length]) -> None:
    if output.dtype == "int64" and all(length.constant >= 0 for length in factors):
        known.set_scalar(output, functools.reduce(Length.times, factors, ONE))


# -- numbers and vectors of numbers


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
        if node.outputs[0].dtype in ("int32", "int64"):  # narrower ones may overflow
            known.set_range(node.outputs[0], stop)


def _copy(known: Lengths, node: Any) -> None:
    if getattr(node.inputs[0], "ndim", 0) == 0:
        known.set_scalar(node.outputs[0], known.scalar(node.inputs[0]))
    else:
        _first(known, node)


# -- shapes


def _first(known: Lengths, node: Any) -> None:
    _set_dims(known, node.outputs[0], known.dims(node.inputs[0]))


def _subtensor(known: Lengths, node: Any) -> None:
    output, index = node.outputs[0], ops.basic_index(node.inputs, node.op)
    numbers = known.vector(node.inputs[0])
    if numbers is not None and index:
        _pick(known, output, numbers, index[0])
    dims = known.dims(node.inputs[0])
    index = (*index, *[slice(None)] * (len(dims) - len(index)))
    kept = [(dims[axis], one) for axis, one in enumerate(index) if isinstance(one, slice)]
    _set_dims(known, output, [length if known.takes_all(one, length) else None for length, one in kept])


def _pick(known: Lengths, output: Any, numbers: Sequence[Length], index: Any) -> None:
    """What an index of constants takes of a vector's numbers."""
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
        _set_dims(known, one, best)


def _dimshuffle(known: Lengths, node: Any) -> None:
    variable, output, order = node.inputs[0], node.outputs[0], node.op.new_order
    if order == () and variable.ndim == 0:
        _set_product(known, output, [known.scalar(variable)])
    elif order == ("x",) and variable.ndim == 0 and variable.dtype == "int64":
        known.set_vector(output, [known.scalar(variable)])
    dims = known.dims(variable)
    _set_dims(known, output, [None if axis == "x" else dims[axis] for axis in order])


def _reduction(known: Lengths, node: Any) -> None:
    numbers, axes = known.vector(node.inputs[0]), reduced_axes(node)
    if numbers is not None and axes and isinstance(getattr(node.op, "scalar_op", None), scalar.Mul):
        _set_product(known, node.outputs[0], numbers)
    kept = [length for axis, length in enumerate(known.dims(node.inputs[0])) if axis not in axes]
    for output in node.outputs:
        _set_dims(known, output, kept)


def _dot(known: Lengths, node: Any) -> None:
    a, b = node.inputs
    if a.ndim <= 2 and b.ndim <= 2:
        _set_dims(known, node.outputs[0], (*known.dims(a)[:-1], *known.dims(b)[1:]))


def _blockwise(known: Lengths, node: Any) -> None:
    """An operation for each place along some first axes; the axes after these have names."""
    op, n_batch = node.op, node.op.batch_ndim(node)
    named: dict[str, Length] = {}
    for one, names in zip(node.inputs, op.inputs_sig):
        for axis, name in enumerate(names, n_batch):
            named.setdefault(name, known.dims(one)[axis])
    for output, names in zip(node.outputs, op.outputs_sig):
        batch = [_common(known, node.inputs, axis) for axis in range(n_batch)]
        _set_dims(known, output, [*batch, *map(named.get, names)])


def _common(known: Lengths, inputs: Sequence[Any], axis: int) -> Length | None:
    """Of lengths along an axis, all of which are equal but for those of 1, what tells most."""
    lengths = [known.dims(one)[axis] for one in inputs if not one.broadcastable[axis]]
    return min(lengths, key=lambda length: (0 not in length.symbols, len(length.symbols)), default=None)


def _specified(known: Lengths, node: Any) -> None:
    output = node.outputs[0]
    told = zip(known.dims(node.inputs[0]), known_lengths(output))
    _set_dims(known, output, [one if fixed is None or known.per_row(one) else None for one, fixed in told])


def _alloc(known: Lengths, node: Any) -> None:
    sizes = node.inputs[len(node.inputs) - node.outputs[0].ndim :]  # after the value that Alloc fills in
    lengths = map(known.scalar, sizes)  # none of them is negative, once it is made
    _set_dims(known, node.outputs[0], [one if known.per_row(one) or known.is_sure(one) else None for one in lengths])


def _reshape(known: Lengths, node: Any) -> None:
    entries = known.resolve(node.inputs[0], known.vector(node.inputs[1]) or ())
    _set_dims(known, node.outputs[0], [length if known.is_sure(length) else None for length in entries])


_REDUCTIONS = (
    *(ops.CAReduce, ops.CAReduceDtype, ops.Sum, ops.Prod, ops.ProdWithoutZeros, ops.All, ops.AnyOp),
    *(ops.Max, ops.Min, ops.Argmax, ops.MaxAndArgmax),
)

_FOLLOWERS: dict[type, Callable[[Lengths, Any], None]] = {
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
    ops.SpecifyShape: _specified,
    ops.Alloc: _alloc,
    ops.AllocEmpty: _alloc,
    ops.Reshape: _reshape,
}
