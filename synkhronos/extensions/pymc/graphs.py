"""Rewrite the graphs of PyMC's functions into graphs that can be sharded by the rows of a model's data."""

from __future__ import annotations

import collections
import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from synkhronos._backends import (
    Mode,
    T,
    TensorConstant,
    TensorType,
    ancestors,
    compile_function,
    constant_value,
    copied,
    equal_computations,
    io_toposort,
    known_lengths,
    ops,
    scalar,
)
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos.extensions.pymc.rows import LARGE, NOT_SHOWN, ModelData

__all__ = [
    "check_after_sum",
    "folded",
    "forget_call",
    "lengths_computed",
    "missing_by_rows",
    "rewritten",
    "sum_of_parts",
    "without_checks",
]

#: Operations on numbers that take about as long as to read the result from memory.
_QUICK = (
    *(scalar.Add, scalar.Sub, scalar.Mul, scalar.Neg, scalar.Abs, scalar.Sqr, scalar.Identity, scalar.Cast),
    *(scalar.Switch, scalar.Maximum, scalar.Minimum, scalar.Second),
    *(scalar.LogicalComparison, scalar.FixedLogicalComparison, scalar.BinaryBitOp, scalar.UnaryBitOp),
)
#: Operations on arrays that take longer.
_SLOW = (ops.Dot, ops.BatchedDot, ops.Blockwise, ops.CAReduce, ops.SortOp, ops.ArgSortOp, ops.CumOp)
#: The size of values that replace data, relative to that of the data, and in bytes.
_MOST_TIMES, _MOST_BYTES = 256, 1 << 30


def forget_call(expressions: Sequence[Any]) -> None:
    """Remove the traces of variables that PyMC has made in this call, such as densities and gradients.

    Messages and reports then name the lines in which the program built the model, rather than that of the call.
    """
    frames = (frame for frame, _ in traceback.walk_stack(None))
    lines = ((frame.f_code.co_filename, frame.f_lineno) for frame in frames)
    call = next((line for line in lines if not line[0].startswith(NOT_SHOWN)), None)
    for one in ancestors(list(expressions)):
        if any(frame[:2] == call for trace in getattr(one.tag, "trace", None) or () for frame in trace):
            one.tag.trace = []


def rewritten(
    expressions: Sequence[Any],
    rewrite: Callable[[Any, list[Any]], Any] = lambda node, inputs: None,
    *,
    leaves: Sequence[Any],
    replace: Mapping[Any, Any] = MappingProxyType({}),
) -> list[Any]:
    """Rewrite expressions from their inputs on.

    Parameters
    ----------
    expressions : list of variables
    rewrite : callable
        ``rewrite(node, inputs)`` returns expressions for the outputs of an Apply node, given its rewritten inputs;
        ``None``: the node stays.
    leaves : list of variables
        Variables that stay, although they may be computed from others.
    replace : dict
        Variables that are replaced by others.
    """
    new, stay = dict(replace), {*leaves, *replace}
    for node in io_toposort(list(leaves), list(expressions)):
        inputs = [new.get(one, one) for one in node.inputs]
        found = rewrite(node, inputs)
        if found is None and inputs != node.inputs:
            found = copied(node, inputs)
        new.update((old, one) for old, one in zip(node.outputs, found or ()) if old not in stay)
    return [new.get(one, one) for one in expressions]


def without_checks(expressions: Sequence[Any], graph: Callable[..., list[Any]]) -> tuple[list[Any], list[Any]]:
    """Leave out the checks of PyMC that otherwise become a log-probability of minus infinity.

    All ranks would need to know the result of a check, before they can compute with the value that it guards.

    Parameters
    ----------
    expressions : list of variables
    graph : callable
        `rewritten`, for the leaves of the expressions.

    Returns
    -------
    expressions : list of variables
    conditions : list of variables
        One variable: whether all conditions that were left out hold. Empty if none was left out.
    """
    conditions: dict[Any, Any] = {}

    def unchecked(node: Any, inputs: Sequence[Any]) -> Any:
        if not getattr(node.op, "can_be_replaced_by_ninf", False):
            return None
        for one in inputs[1:]:
            conditions.setdefault(_structure(one), one)  # gradients may repeat checks
        return inputs[:1]

    found = graph(expressions, unchecked)
    numbers = [T.cast(one, "int8") for one in conditions.values()]  # numba cannot compile "and" in a loop over scalars
    return found, [functools.reduce(T.minimum, numbers)] if numbers else []


def _structure(variable: Any) -> Any:
    """Return an object that is equal for expressions that are computed in the same way from the same arrays."""
    names: dict[Any, Any] = {}
    calls: list[Any] = []
    for node in io_toposort([], [variable]):
        for one in node.inputs:
            if isinstance(one, TensorConstant):
                is_small = one.data.size < LARGE
                names[one] = (one.dtype, one.data.shape, one.data.tobytes() if is_small else id(one.data))
        names.update((one, (len(calls), k)) for k, one in enumerate(node.outputs))
        calls.append((node.op, *(names.get(one, one) for one in node.inputs)))
    return tuple(calls) or variable


def check_after_sum(node: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """Apply a check of parameters to a sum, in place of its terms, which are then summed before ranks meet."""
    check = inputs[0].owner if inputs else None
    if check is None or not isinstance(check.op, ops.CheckAndRaise):
        return None
    terms, *conditions = check.inputs
    if isinstance(node.op, ops.Sum):
        return [check.op(*copied(node, [terms]), *conditions)]
    reads_shape = isinstance(getattr(node.op, "scalar_op", None), scalar.Second)  # as gradients do
    return copied(node, [terms, *inputs[1:]]) if reads_shape or isinstance(node.op, (ops.Shape, ops.Shape_i)) else None


def sum_of_parts(node: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """Replace a sum over joined arrays, such as the terms of a time series and of its beginning, by a sum of sums."""
    joined = _joined(inputs[0]) if isinstance(node.op, ops.Sum) else None
    if joined is not None:
        axis, parts = joined
        if node.op.axis is None or axis in node.op.axis:
            return [functools.reduce(T.add, [copied(node, [part])[0] for part in parts])]
    filled = inputs[0].owner if isinstance(node.op, ops.Split) else None  # in gradients of such sums
    if filled is not None and isinstance(getattr(filled.op, "scalar_op", None), scalar.Second):
        like, value = filled.inputs
        joined = _joined(like)
        if joined is not None and joined[0] == node.op.axis:
            axis, parts = joined
            if value.broadcastable[axis] and _are_lengths(inputs[1], parts, axis):
                return [T.second(part, value) for part in parts]
    return None


def _are_lengths(sizes: Any, parts: Sequence[Any], axis: int) -> bool:
    """Return whether a vector is known to have the lengths of some arrays along an axis."""
    made = sizes.owner is not None and isinstance(sizes.owner.op, ops.MakeVector)
    entries = sizes.owner.inputs if made else list(getattr(sizes, "data", ()))
    if len(entries) != len(parts):
        return False
    for entry, part in zip(entries, parts):
        known = known_lengths(part)[axis]
        is_known = known is not None and constant_value(T.as_tensor_variable(entry)) == known
        if not (is_known or (made and equal_computations([entry], [part.shape[axis]]))):
            return False
    return True


def _joined(one: Any) -> tuple[int, list[Any]] | None:
    """Return the axis along which arrays are joined to a variable, and the arrays."""
    is_join = one.owner is not None and isinstance(one.owner.op, ops.Join)
    return (ops.axis_of(one.owner), ops.parts_of(one.owner)) if is_join else None


def folded(expressions: Sequence[Any], data: ModelData, graph: Callable[..., list[Any]]) -> list[Any]:
    """Replace what depends on constant data alone, and takes long to compute, by its value.

    PyTensor does so in PyMC's own functions, but not where data are variables. What is computed quickly is left out: to
    read it from memory may take longer.
    """
    fixed: dict[Any, int] = {}  # with the bytes of the data on which it depends
    slow: set[Any] = set()
    ends: dict[Any, None] = {}

    def find(node: Any, inputs: Sequence[Any]) -> None:
        for one in inputs:
            if isinstance(one, TensorConstant) and one not in fixed:
                fixed[one] = 0 if data.axis(one) is None else one.data.nbytes
        n_bytes = sum([fixed.get(one, 0) for one in inputs])
        if all(one in fixed for one in inputs) and _has_values(node, n_bytes):
            fixed.update(dict.fromkeys(node.outputs, n_bytes))
            if _is_slow(node.op) or not slow.isdisjoint(inputs):
                slow.update(node.outputs)
        else:
            ends.update((_viewed(one), None) for one in inputs if one in slow and fixed[one])

    ends.update((_viewed(one), None) for one in graph(expressions, find) if one in slow and fixed[one])
    ends = {one: None for one in ends if one.owner is not None}
    if not ends:
        return list(expressions)
    try:
        values = compile_function([], list(ends), mode=Mode(linker="py", optimizer=None))()
    except Exception as error:  # the function raises it when it is called
        let_interrupts_pass(error)
        return list(expressions)
    new = {one: TensorConstant(one.type, data.same(value)) for one, value in zip(ends, values)}
    return graph(expressions, replace=new)


def _viewed(one: Any) -> Any:
    """Return the variable of which this one is transposed, reshaped or a part; else itself."""
    while one.owner is not None and getattr(one.owner.op, "view_map", None):
        one = one.owner.inputs[0]
    return one


def _has_values(node: Any, n_bytes: int) -> bool:
    """Return whether the outputs of an Apply node are arrays, not many times as large as data of so many bytes.

    They must depend on the values of the data, not on the shapes alone.
    """
    are_arrays = all(isinstance(one.type, TensorType) for one in node.outputs)
    if not are_arrays or isinstance(node.op, (ops.Shape, ops.Shape_i)):
        return False
    lengths = [known_lengths(one) for one in node.outputs]
    if n_bytes == 0 or any(None in one for one in lengths):
        return n_bytes == 0
    sizes = [math.prod(shape) * np.dtype(one.dtype).itemsize for shape, one in zip(lengths, node.outputs)]
    return sum(sizes) <= min(_MOST_TIMES * n_bytes, _MOST_BYTES)


def _is_slow(op: Any) -> bool:
    """Return whether an operation takes longer than to read its result from memory."""
    return isinstance(op, _SLOW) or (isinstance(op, ops.Elemwise) and not isinstance(op.scalar_op, _QUICK))


def lengths_computed(expressions: Sequence[Any], data: ModelData, graph: Callable[..., list[Any]]) -> list[Any]:
    """Replace constants that PyTensor makes from the number of rows by expressions that each rank computes.

    These are the positions 0, 1, 2, … with which an element of each row is picked, and lengths in shapes. Sharding
    recognizes the expressions.
    """
    constants = [one for one in ancestors(list(expressions)) if isinstance(one, TensorConstant)]
    rows = {one: axis for one in constants if (axis := data.axis(one)) is not None}
    positions = [one for one, axis in rows.items() if _is_positions(one, axis)]
    other = next((one for one in rows if one not in positions), None)
    if other is None:
        return list(expressions)
    n_rows = other.shape[rows[other]]
    replace = {}
    for one in positions:
        order = [0 if axis == rows[one] else "x" for axis in range(one.ndim)]
        replace[one] = T.arange(n_rows, dtype=one.dtype).dimshuffle(order)
    found = graph(expressions, replace=replace)
    if data.n_rows < LARGE or data.use_variables(found):
        return found  # lengths may be those of other axes, or stay the same when the number of rows changes

    def length(one: Any) -> Any:
        if one.ndim == 0:
            return n_rows if constant_value(one) == data.n_rows else one
        if isinstance(one, TensorConstant):
            if data.n_rows not in one.data:
                return one
            return ops.MakeVector("int64")(*(length(T.constant(value, dtype="int64")) for value in one.data))
        if one.owner is not None and isinstance(one.owner.op, ops.MakeVector):
            return one.owner.op(*map(length, one.owner.inputs))
        return one

    def with_lengths(node: Any, inputs: list[Any]) -> Any:
        if not isinstance(node.op, (ops.Alloc, ops.AllocEmpty, ops.Reshape)):
            return None
        first = 0 if isinstance(node.op, ops.AllocEmpty) else 1
        lengths = list(map(length, inputs[first:]))
        return None if lengths == inputs[first:] else copied(node, [*inputs[:first], *lengths])

    return graph(found, with_lengths)


def missing_by_rows(expressions: Sequence[Any], data: ModelData, graph: Callable[..., list[Any]]) -> list[Any]:
    """Replace what is computed for the rows that a constant mask selects by expressions that each rank computes.

    PyMC inserts the parameters for missing values of a covariate with a mask, and picks the expectations of the rows
    with and without an outcome. What is computed from these element by element is computed for all rows in their place;
    the mask then selects the terms of sums, and the values that are inserted.
    """
    selections = _Selections(expressions, data)
    if not selections.masks:
        return list(expressions)
    return list(map(selections.selected, graph(expressions, selections.by_rows)))


class _Mask(NamedTuple):
    """A constant mask of rows, or of their entries.

    Attributes
    ----------
    selects : constant of Booleans
    positions : constant of int64
        The position of each entry in the selected values; of one that is not selected, that of the last one before it.
    n_values : int
        The number of selected values.
    """

    selects: Any
    positions: Any
    n_values: int

    def choose(self, values: Any, other: Any) -> Any:
        """Return the values where the mask selects them, and ``other`` elsewhere."""
        further = values.ndim - self.selects.ndim
        return T.switch(self.selects.dimshuffle([*range(self.selects.ndim), *["x"] * further]), values, other)


#: Number of rows, relative to the selected values, up to which computations are extended to all rows.
_MOST_ROWS = 4
#: What does not change the result of a reduction.
_NEUTRAL = {scalar.Add: 0, scalar.Mul: 1, scalar.AND: True}


class _Selections:
    """The values that are computed from what masks of the rows select, and their replacements for all rows.

    Parameters
    ----------
    expressions : list of variables
    data : ModelData

    Attributes
    ----------
    masks : dict of int to _Mask
        The masks with which the expressions select values, by the ids of their arrays.
    """

    def __init__(self, expressions: Sequence[Any], data: ModelData) -> None:
        self._data = data
        self.masks: dict[int, _Mask] = {}
        self._found: dict[Any, tuple[_Mask, Any]] = {}  # mask and replacement, by selected values
        self._selected: dict[Any, Any] = {}
        for one in ancestors(list(expressions)):
            if one.owner is not None:
                self._mask(one.owner, one.owner.inputs)
        masks = [mask for mask in self.masks.values() if mask.n_values]
        numbers = collections.Counter(mask.n_values for mask in masks)
        self._by_number = {mask.n_values: mask for mask in masks if numbers[mask.n_values] == 1}
        # a computation for each of many masks would take longer for all rows than for those that they select
        n_values = sum(numbers.elements())
        self._expands = sum(mask.selects.data.size for mask in masks) <= _MOST_ROWS * n_values

    def by_rows(self, node: Any, inputs: list[Any]) -> list[Any] | None:
        """Return replacements of an Apply node's outputs, or ``None``, as `rewritten` expects it."""
        if isinstance(node.op, (ops.Shape, ops.Shape_i)):
            return None
        found = None
        if isinstance(node.op, (ops.AdvancedIncSubtensor, ops.AdvancedSubtensor)):
            mask, inserts = self._mask(node, inputs), isinstance(node.op, ops.AdvancedIncSubtensor)
            if mask is not None:
                found = self._inserted(node, mask, *inputs[:2]) if inserts else self._picked(node, mask, inputs)
            elif inserts and inputs[1] in self._found and not node.op.set_instead_of_inc:
                found = self._added(node, inputs)
            elif not inserts and self._expands:
                found = self._repeated(node, inputs)
        elif isinstance(node.op, ops.Elemwise):
            found = self._computed(node, inputs)
        elif isinstance(node.op, ops.Alloc):
            found = self._allocated(node, inputs)
        elif isinstance(node.op, ops.CAReduce):
            found = self._reduced(node, inputs)
        if found is None:
            new = list(map(self.selected, inputs))
            found = None if new == inputs else copied(node, new)
        return found

    def selected(self, one: Any) -> Any:
        """Return a variable; in place of values that a mask selects, a sum over all rows that has them."""
        if one not in self._found:
            return one
        if one not in self._selected:
            self._selected[one] = self._gathered(*self._found[one])
        return self._selected[one]

    def _gathered(self, mask: _Mask, rows: Any) -> Any:
        further = [rows.shape[axis] for axis in range(mask.selects.ndim, rows.ndim)]
        zeros = T.zeros((mask.n_values, *further), rows.dtype)
        return T.inc_subtensor(zeros[mask.positions], mask.choose(rows, T.zeros((), rows.dtype)))

    def _mask(self, node: Any, inputs: Sequence[Any]) -> _Mask | None:
        """Return the mask with which an Apply node selects values, if it is a constant mask of the rows."""
        if not isinstance(node.op, (ops.AdvancedIncSubtensor, ops.AdvancedSubtensor)):
            return None
        index, *others = ops.advanced_index(inputs[isinstance(node.op, ops.AdvancedIncSubtensor) :], node.op)
        if others or not isinstance(index, TensorConstant) or index.dtype != "bool" or self._data.axis(index) != 0:
            return None
        if known_lengths(inputs[0])[: index.ndim] != index.data.shape:
            return None
        values = self._data.same(index.data)
        if id(values) not in self.masks:
            numbers = np.cumsum(values).reshape(values.shape)
            positions = T.constant(self._data.same(np.maximum(numbers - 1, 0)))
            self.masks[id(values)] = _Mask(index, positions, int(values.sum()))
        return self.masks[id(values)]

    def _rows(self, one: Any, mask: _Mask) -> Any:
        """Return the replacement of a variable in computations for all rows, ``None`` if it has none."""
        if one in self._found:
            its, rows = self._found[one]
            return rows if its is mask else None
        if one.broadcastable[0]:
            return one.dimshuffle([*["x"] * mask.selects.ndim, *range(1, one.ndim)])
        if known_lengths(one)[0] != mask.n_values:
            return None
        if isinstance(one, TensorConstant):
            return self._constant(one, mask)
        return one[mask.positions]

    def _constant(self, one: Any, mask: _Mask) -> Any:
        return T.constant(self._data.same(one.data[mask.positions.data])) if one.ndim else one

    def _note(self, outputs: list[Any], mask: _Mask, rows: list[Any]) -> list[Any]:
        self._found.update(zip(outputs, ((mask, one) for one in rows)))
        return outputs

    def _picked(self, node: Any, mask: _Mask, inputs: list[Any]) -> list[Any] | None:
        if self._expands and mask.n_values:
            return self._note(copied(node, inputs), mask, inputs[:1])
        is_few = 0 < mask.n_values <= mask.selects.data.size // 2
        return [self._gathered(mask, inputs[0])] if is_few else None

    def _inserted(self, node: Any, mask: _Mask, x: Any, values: Any) -> list[Any] | None:
        if mask.n_values == 0:
            return [x]
        rows = self._rows(values, mask) if values.ndim == x.ndim - mask.selects.ndim + 1 else None
        if rows is None:
            value = constant_value(values) if values.ndim else values
            if value is None:
                return None
            rows = T.as_tensor_variable(value).dimshuffle(["x"] * x.ndim)
        rows = T.cast(rows, x.dtype)
        return [mask.choose(rows, x) if node.op.set_instead_of_inc else x + mask.choose(rows, T.zeros((), x.dtype))]

    def _added(self, node: Any, inputs: list[Any]) -> list[Any] | None:
        """Add what is computed from selected values to the elements from which such values were picked."""
        (mask, rows), index = self._found[inputs[1]], _positions(node, inputs)
        if {len(one.data) for one in index if one.ndim} != {mask.n_values}:
            return None
        places = inputs[0][tuple([self._constant(one, mask) for one in index])]
        return [T.inc_subtensor(places, mask.choose(rows, T.zeros((), rows.dtype)))]

    def _repeated(self, node: Any, inputs: list[Any]) -> list[Any] | None:
        """Note elements that are picked for each selected value, such as the scale of its column."""
        index = _positions(node, inputs)
        lengths = {len(one.data) for one in index if one.ndim}
        mask = self._by_number.get(lengths.pop()) if len(lengths) == 1 else None
        if mask is None:
            return None
        rows = inputs[0][tuple([self._constant(one, mask) for one in index])]
        return self._note(copied(node, inputs), mask, [rows])

    def _computed(self, node: Any, inputs: list[Any]) -> list[Any] | None:
        mask = next((self._found[one][0] for one in inputs if one in self._found), None)
        if mask is None and self._expands:  # observed values of which others are missing
            lengths = [len(one.data) for one in inputs if one.ndim and self._data.is_observed(one)]
            mask = next((self._by_number[length] for length in lengths if length in self._by_number), None)
        if mask is None or isinstance(node.op.scalar_op, (scalar.IntDiv, scalar.Mod)):  # may raise in other rows
            return None
        rows = [self._rows(one, mask) for one in inputs]
        return None if any(one is None for one in rows) else self._note(copied(node, inputs), mask, copied(node, rows))

    def _allocated(self, node: Any, inputs: list[Any]) -> list[Any] | None:
        value, (output,) = inputs[0], node.outputs
        if value not in self._found or value.ndim != output.ndim or known_lengths(value) != known_lengths(output):
            return None
        mask, rows = self._found[value]
        return self._note(copied(node, inputs), mask, [rows])

    def _reduced(self, node: Any, inputs: list[Any]) -> list[Any] | None:
        if inputs[0] not in self._found:
            return None
        (mask, rows), axis = self._found[inputs[0]], node.op.axis
        neutral = _NEUTRAL.get(type(node.op.scalar_op))
        if neutral is None or not (axis is None or 0 in axis):
            return None
        first = mask.selects.ndim - 1
        axes = None if axis is None else (*range(first), *(one + first for one in axis))
        return [node.op.clone(axis=axes)(mask.choose(rows, T.constant(neutral, dtype=rows.dtype)))]


def _positions(node: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the index of an Apply node that picks elements, or adds to them, if it consists of constant positions."""
    index = ops.advanced_index(inputs[isinstance(node.op, ops.AdvancedIncSubtensor) :], node.op)
    are_positions = [isinstance(one, TensorConstant) and one.ndim < 2 and one.dtype != "bool" for one in index]
    return index if all(are_positions) else []


def _is_positions(constant: Any, axis: int) -> bool:
    """Return whether a constant is 0, 1, 2, … along an axis, and all others have length 1."""
    values = constant.data
    if constant.dtype not in ("int32", "int64") or values.size != values.shape[axis]:
        return False
    return np.array_equal(values.ravel(), np.arange(values.size))
