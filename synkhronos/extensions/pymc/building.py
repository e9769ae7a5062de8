"""Build exact functions in place of the functions that PyMC requests from PyTensor, if they use a model's data."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

import synkhronos
from synkhronos._backends import (
    FOLDER,
    LIBRARIES,
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
    is_random_state,
    known_lengths,
    ops,
    scalar,
)
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos.extensions.pymc.rows import LARGE, ModelData, Scattered

__all__ = ["Builder", "Each", "ModelFunction"]

#: Arguments of `pytensor.function` that are passed in another way, or that exact functions do not use.
_OWN = ("inputs", "outputs", "updates", "givens", "accept_inplace", "rebuild_strict")

#: Error message if a function is called, or sent to be called, in another process.
_OTHER_PROCESS = (
    "under synkhronos.extensions.pymc.parallel all ranks together evaluate the model, so another process cannot: its "
    "functions can be called in the program's own process only"
)

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

_n_forks = 0  # number of forks between the process that imported this module and this process


def _note_fork() -> None:
    global _n_forks
    _n_forks += 1


os.register_at_fork(after_in_child=_note_fork)


class Builder:
    """Builds the functions that PyMC requests from `pytensor.function`.

    Parameters
    ----------
    data : ModelData
    """

    def __init__(self, data: ModelData) -> None:
        self._data = data
        self._maps = False

    @contextlib.contextmanager
    def mapping(self) -> Iterator[None]:
        """Build the first function with inputs in a ``with`` block for several points at once, if it uses the data."""
        self._maps = True
        try:
            yield
        finally:
            self._maps = False

    def __call__(self, plain: Callable[..., Any], asked: dict[str, Any]) -> Any:
        """Build an exact function, or PyMC's own if it does not use the data or only draws random numbers.

        Functions without inputs are PyMC's own, too.

        Parameters
        ----------
        plain : callable
            ``pytensor.function``.
        asked : dict
            The arguments of PyMC's request, by name.
        """
        outputs, inputs = asked["outputs"], [getattr(one, "variable", one) for one in asked["inputs"]]
        updates, givens = dict(asked["updates"] or ()), dict(asked["givens"] or ())
        many = isinstance(outputs, (list, tuple))
        results = [getattr(one, "variable", one) for one in (outputs if many else [outputs])]
        only_draws = bool(updates) and all(map(is_random_state, updates))
        are_tensors = all(isinstance(getattr(one, "type", None), TensorType) for one in results)
        if only_draws or not are_tensors or not (inputs or updates):
            return plain(**asked)
        maps, self._maps = self._maps, False
        given = [*results, *updates.values()]
        self._data.fit(given)
        conditions: list[Any] = []
        graph = functools.partial(_rewritten, leaves=[*inputs, *givens])
        if updates:
            found = graph(given, _check_after_sum)
        else:
            found, conditions = _without_checks(given, graph)
        found = graph([*found, *conditions], _sum_of_parts)
        found = _folded(found, self._data, graph)
        found = _lengths_computed(found, self._data, graph)
        expressions, conditions = found[: len(given)], found[len(given) :]
        _forget_call([*given, *expressions])
        data = self._data.used_by(expressions, inputs, givens)
        if not data:
            self._data.warn_of(expressions)
            return plain(**asked)
        scattered = list(dict.fromkeys(one for _, one in data))
        kwargs = {name: value for name, value in asked.items() if name not in _OWN}

        def build(outputs: Any, new: Sequence[Any], **options: Any) -> Any:
            return synkhronos.function(
                [],
                outputs,
                bcast_inputs=asked["inputs"],
                updates=list(zip(updates, new)),
                exact=True,
                **kwargs,
                **options,
            )

        of_points = Each if maps else lambda function: function

        def of_all_rows() -> Any:
            return of_points(build(results if many else results[0], list(updates.values()), givens=givens))

        def divided() -> Any:
            outputs, new = [*expressions[: len(results)], *conditions], expressions[len(results) :]
            made = functools.partial(
                build,
                outputs if many or conditions else outputs[0],
                new,
                givens=[*((source, one.expression) for source, one in data), *givens.items()],
                sliceable_shareds=[one.variable for one in scattered],
                whole={one.variable: one.whole for one in scattered},
                rebuild_strict=False,
            )
            if maps:
                with contextlib.suppress(ValueError):
                    return made(blocked=True, mapped=inputs)
            try:
                exact = made(blocked=True)
            except ValueError:  # `blocked` allows only all-reduces, at the end of the graph
                exact = made()
            return of_points(exact)

        own = lambda: of_points(plain(**asked))  # noqa: E731
        return ModelFunction(divided(), scattered, of_all_rows, own, many if conditions else None)


class Each:
    """Evaluates a function for each of several points, in one call each.

    Parameters
    ----------
    function : callable
        Function of one point.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, points: Any) -> list[Any]:
        """Return the results, stacked along axis 0."""
        return [np.stack(values) for values in zip(*map(self.function, points))]

    def copy(self, *args: Any, **kwargs: Any) -> Each:
        """Copy the function, with the arguments of PyTensor's ``Function.copy``."""
        return Each(self.function.copy(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # is not there yet, while the object is copied
            raise AttributeError(name)
        return getattr(self.function, name)


class ModelFunction:
    """Function of a model that all ranks compute, and that PyMC calls like a function of PyTensor.

    Data cannot be sharded if there are fewer rows than ranks, or if arrays have different numbers of rows. In these
    cases every rank computes the function with all rows.

    Parameters
    ----------
    exact : synkhronos.Function
    data : list of Scattered
        The data that the function uses.
    build_undivided : callable
        ``build_undivided()`` builds the function for unsharded data.
    build_own : callable
        ``build_own()`` builds PyMC's own function.
    many : bool, optional
        If given, ``exact`` lacks checks, and has one more output: whether their conditions hold. If they do not,
        PyMC's own function computes the results, or raises the error. With ``many``, the results are a list.

    Attributes
    ----------
    exact : synkhronos.Function
        The exact function. Other attributes are looked up there.
    data : list of Scattered
    trust_input : bool
        Can be set, but has no effect: inputs are always checked.
    """

    trust_input = False

    def __init__(
        self,
        exact: Any,
        data: Sequence[Scattered],
        build_undivided: Callable[[], Any],
        build_own: Callable[[], Any],
        many: bool | None,
    ) -> None:
        self.exact, self.data, self._n_forks = exact, data, _n_forks
        self._out_of_date = [one for one in data if one.is_variable]
        self._undivided = functools.cache(build_undivided)
        self._own, self._many = functools.cache(build_own), many

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on all ranks, with the current data of the model.

        Raises
        ------
        ValueError
            If the computation fails because ``set_data`` set data of different lengths; the message names the lengths.
        SessionError
            If this process is not the program's own.
        """
        if self._n_forks != _n_forks:
            raise synkhronos.SessionError(_OTHER_PROCESS)
        if self._out_of_date:
            for one in self._out_of_date:
                one.send()
            if len({one.n_rows for one in self.data}) > 1:
                return self._of_different_lengths(args, kwargs)
            if not all(one.is_divided for one in self._out_of_date):
                return self._undivided()(*args, **kwargs)
        try:
            found = self.exact(*args, **kwargs)
        except ValueError:  # a new session does not have the data; other errors are raised again
            self._out_of_date = list(self.data)  # there may be more ranks now than constants have rows
            for one in self._out_of_date:
                one.scatter()
            if not all(one.is_divided for one in self.data):
                return self._undivided()(*args, **kwargs)
            found = self.exact(*args, **kwargs)
        if self._many is None:
            return found
        *results, hold = found
        if not hold.all():
            return self._own()(*args, **kwargs)
        return results if self._many else results[0]

    def copy(self, *args: Any, **kwargs: Any) -> ModelFunction:
        """Copy the function, with the arguments of PyTensor's ``Function.copy``."""
        undivided, own = self._undivided, self._own
        return ModelFunction(
            self.exact.copy(*args, **kwargs),
            self.data,
            lambda: undivided().copy(*args, **kwargs),
            lambda: own().copy(*args, **kwargs),
            self._many,
        )

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Call PyMC's own function, in the controller only."""
        return self._own()(*args, **kwargs)

    def _of_different_lengths(self, args: Any, kwargs: Any) -> Any:
        lengths = ", ".join(f"{one}: {one.n_rows}" for one in self.data)
        is_new = self._undivided.cache_info().currsize == 0
        try:
            result = self._undivided()(*args, **kwargs)
        except synkhronos.WorkerError as error:
            raise ValueError(
                f"pm.set_data gave the data of the model different lengths: {lengths}; expected equal lengths. Set all "
                "data in one call of pm.set_data"
            ) from error
        if is_new:
            warnings.warn(
                f"the data of the model have different lengths since pm.set_data, and are not divided: {lengths}. "
                "Every rank computes with all rows",
                RuntimeWarning,
                stacklevel=3,
            )
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exact, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise synkhronos.SessionError(_OTHER_PROCESS)


# -- graphs that can be sharded


def _forget_call(expressions: Sequence[Any]) -> None:
    """Remove the traces of variables that PyMC has made in this call, such as densities and gradients.

    Messages and reports then name the lines in which the program built the model, rather than that of the call.
    """
    not_shown = (*LIBRARIES, FOLDER, synkhronos.__path__[0])
    frames = (frame for frame, _ in traceback.walk_stack(None))
    lines = ((frame.f_code.co_filename, frame.f_lineno) for frame in frames)
    call = next((line for line in lines if not line[0].startswith(not_shown)), None)
    for one in ancestors(list(expressions)):
        if any(frame[:2] == call for trace in getattr(one.tag, "trace", None) or () for frame in trace):
            one.tag.trace = []


def _rewritten(
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


def _without_checks(expressions: Sequence[Any], graph: Callable[..., list[Any]]) -> tuple[list[Any], list[Any]]:
    """Leave out the checks of PyMC that otherwise become a log-probability of minus infinity.

    All ranks would need to know the result of a check, before they can compute with the value that it guards.

    Parameters
    ----------
    expressions : list of variables
    graph : callable
        `_rewritten`, for the leaves of the expressions.

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


def _check_after_sum(node: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """Apply a check of parameters to a sum, in place of its terms, which are then summed before ranks meet."""
    check = inputs[0].owner if inputs else None
    if check is None or not isinstance(check.op, ops.CheckAndRaise):
        return None
    terms, *conditions = check.inputs
    if isinstance(node.op, ops.Sum):
        return [check.op(*copied(node, [terms]), *conditions)]
    reads_shape = isinstance(getattr(node.op, "scalar_op", None), scalar.Second)  # as gradients do
    return copied(node, [terms, *inputs[1:]]) if reads_shape or isinstance(node.op, (ops.Shape, ops.Shape_i)) else None


def _sum_of_parts(node: Any, inputs: Sequence[Any]) -> list[Any] | None:
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


def _folded(expressions: Sequence[Any], data: ModelData, graph: Callable[..., list[Any]]) -> list[Any]:
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


def _lengths_computed(expressions: Sequence[Any], data: ModelData, graph: Callable[..., list[Any]]) -> list[Any]:
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


def _is_positions(constant: Any, axis: int) -> bool:
    """Return whether a constant is 0, 1, 2, … along an axis, and all others have length 1."""
    values = constant.data
    if constant.dtype not in ("int32", "int64") or values.size != values.shape[axis]:
        return False
    return np.array_equal(values.ravel(), np.arange(values.size))
