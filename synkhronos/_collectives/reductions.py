"""Reductions of NumPy arrays over ranks and over slices, computed by the compiled core.

The table `OPS` defines the properties of each op. All code except the compiled core reads them there.

``avg`` is the weighted mean ``sum(w_k x_k) / sum(w_k)``. The weight ``w_k`` is the number of data points from which
``x_k`` was computed. If each ``x_k`` is a mean over data points, the result is therefore the mean over all data points.
Operands of weight 0 are ignored, even if they contain NaNs. If all weights are 0, they count as equal.

The mean is correct wherever its dtype can represent it: elements whose sum overflows are computed again, with weights
that sum to one. Averages of integers are exact. Sums, products and averages of half precision are computed in single
precision and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, TypeVar

import numpy as np

from synkhronos._native import native

_Documented = TypeVar("_Documented", bound=Callable[..., Any])


class ReduceOp(NamedTuple):
    """Element-wise reduction of the values of several ranks or slices, in their order.

    Attributes
    ----------
    on_device : str
        C expression for a GPU that combines an element ``b`` into ``a``; ``s`` is the weight of ``b``.
    nccl : str or None
        Name of the op in NCCL; ``None`` if NCCL does not support it.
    weighted : bool
        Whether the result is a weighted mean. On a GPU, ``on_device`` then gets weights that sum to one.
    widens : bool
        Whether a returned result has NumPy's dtype for sums, so that small integers do not overflow.
    """

    on_device: str
    nccl: str | None
    weighted: bool = False
    widens: bool = False


#: Ops by name. The maximum and minimum of NaN and a number are NaN, as in NumPy.
OPS: dict[str, ReduceOp] = {
    "avg": ReduceOp("a = a + b * s", "sum", weighted=True),
    "sum": ReduceOp("a = a + b", "sum", widens=True),
    "prod": ReduceOp("a = a * b", "prod", widens=True),
    "max": ReduceOp("a = (a > b || a != a) ? a : b", "max"),
    "min": ReduceOp("a = (a < b || a != a) ? a : b", "min"),
}


def check_op(what: str, op: Any, *others: Any) -> Any:
    """Check an op that the user has passed, and return its name.

    Parameters
    ----------
    what : str
        Start of the error message: the argument or output to which the op belongs.
    op : object
        The user's argument. The prefix ``c_`` of the 2017 release is removed.
    *others
        Values that are accepted in addition to the keys of `OPS`; may include ``None``.

    Returns
    -------
    str or None
        Key of `OPS`, or one of ``others``.

    Raises
    ------
    ValueError
        If there is no such op.
    """
    plain = op[2:] if isinstance(op, str) and op.startswith("c_") else op
    known = (*OPS, *others)
    if not (plain is None or isinstance(plain, str)) or plain not in known:
        raise ValueError(f"{what}: got op {op!r}; expected one of {', '.join(map(repr, known))}")
    return plain


def lists_ops(function: _Documented) -> _Documented:
    """Replace ``{ops}`` in a function's docstring with the names of all ops."""
    if function.__doc__:
        names = [f'``"{name}"``' for name in OPS]
        function.__doc__ = function.__doc__.replace("{ops}", f"{', '.join(names[:-1])} or {names[-1]}")
    return function


def result_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """Return the dtype that NumPy's mean, sum, … would have; for example, integers average to float64."""
    if OPS[op].weighted:
        return np.dtype(np.float64) if dtype.kind in "iub" else dtype
    if OPS[op].widens and dtype.kind in "iub":
        return np.zeros(1, dtype).sum().dtype
    return dtype


@functools.lru_cache(maxsize=256)
def reduction_of(op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...]) -> native.Reduction:
    """Return an object that reduces as many 1-d arrays as there are weights, element by element; it is cached."""
    return native.Reduction(op, dtype, returned, weights)


def combine(arrays: Sequence[Any], op: str, weights: Sequence[float], what: str) -> np.ndarray:
    """Reduce or gather arrays into a new array.

    Parameters
    ----------
    arrays : sequence of array
        Array of each rank or slice, in order.
    op : str
        Key of `OPS`, or ``"gather"``: concatenate along axis 0, with 0-d arrays as arrays of length 1.
    weights : sequence of float
        Weight of each array; only weighted ops use it.
    what : str
        Name of the arrays in error messages.

    Returns
    -------
    array
        Result of dtype `result_dtype`; gathered arrays keep their dtype.

    Raises
    ------
    ValueError
        If the shapes do not fit together: they must be equal, for ``"gather"`` except on axis 0.
    """
    first = np.asarray(arrays[0])
    if op == "gather":
        shapes = [np.shape(array) for array in arrays]
        if len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(f"{what}: got the shapes {shapes}; op 'gather' needs equal ones beyond axis 0")
        return np.concatenate([np.atleast_1d(array) for array in arrays])
    dtype, returned, reduction = _way(op, first.dtype, tuple(weights) if OPS[op].weighted else (1,) * len(arrays))
    operands = [np.asarray(array, dtype, "C") for array in arrays]
    shape = first.shape
    for operand in operands:
        if operand.shape != shape:
            check_equal_shapes([one.shape for one in operands], op, what)
    out = np.empty(shape, returned)
    reduction(operands, [out])
    return out


@functools.lru_cache(maxsize=256)
def _way(op: str, dtype: np.dtype, weights: tuple[float, ...]) -> tuple[np.dtype, np.dtype, native.Reduction]:
    """Return the dtype of the operands, the dtype of the result, and the reduction."""
    dtype = dtype.newbyteorder("=")
    returned = result_dtype(dtype, op)
    return dtype, returned, reduction_of(op, dtype, returned, weights)


def check_equal_shapes(shapes: Sequence[tuple[int, ...]], op: str, what: str) -> None:
    """Raise `ValueError` unless all shapes are equal."""
    if shapes.count(shapes[0]) < len(shapes):
        raise ValueError(
            f'{what}: got the shapes {shapes}; op "{op}" needs equal ones on all ranks and slices. '
            'Use "gather" for results with one row for each data point'
        )


class Accumulator:
    """Reduce the results of a rank's slices, one slice at a time.

    Only the partial result is kept, except for ``"gather"``, which keeps all results.

    Parameters
    ----------
    op : str
        Key of `OPS`, or ``"gather"``.
    total : int
        Number of data points in all slices together.
    what : str
        Name of the accumulated value in error messages.
    dtype : dtype, optional
        Dtype of the result; default: that of `result_dtype`.
    """

    def __init__(self, op: str, total: int, what: str, dtype: np.dtype | None = None) -> None:
        self._op = op
        self._total = total
        self._what = what
        self._parts: list[np.ndarray] = []
        self._sums: np.ndarray | None = None
        self._shape: tuple[int, ...] | None = None
        self._dtype = dtype

    def add(self, value: Any, count: int) -> None:
        """Add the result of one slice of ``count`` data points."""
        value = np.asarray(value)
        if self._op == "gather":
            self._parts.append(value)
            return
        if self._dtype is None:
            self._dtype = result_dtype(value.dtype, self._op)
        if self._shape is not None:
            check_equal_shapes([self._shape, value.shape], self._op, self._what)
        self._shape = value.shape
        if OPS[self._op].weighted:
            self._add_to_sums(np.ascontiguousarray(value, value.dtype.newbyteorder("=")), count)
        else:
            value = value.astype(_accumulated(value.dtype), copy=False)
            self._parts = [combine([*self._parts, value], self._op, (), self._what) if self._parts else value]

    def _add_to_sums(self, value: np.ndarray, count: int) -> None:
        """Add a weighted value to the sums of a running mean; see `native.add_to_sums`."""
        is_integer = value.dtype.kind in "iub"
        if self._sums is None:
            wider = _accumulated(value.dtype)
            self._sums = np.zeros((value.size, 2), np.int64) if is_integer else np.full(value.size, -0.0, wider)
        share = count / self._total if self._total else 1.0
        native.add_to_sums(self._sums, value, (count if self._total else 1) if is_integer else share)

    def result(self) -> np.ndarray:
        """Return the reduction; a weighted op weights each value by its number of data points."""
        if self._op == "gather":
            return combine(self._parts, "gather", (), self._what)
        assert self._dtype is not None
        if self._sums is None:
            return as_stored(self._parts[0], self._dtype)
        assert self._shape is not None
        mean = self._sums
        if mean.ndim == 2:
            mean = np.empty(len(mean), self._dtype if self._dtype.kind in "iub" else np.float64)
            native.mean_of_sums(self._sums, max(1, self._total), mean)
        return as_stored(mean, self._dtype).reshape(self._shape)


def _accumulated(dtype: np.dtype) -> np.dtype:
    """Return the dtype of partial results: float32 for float16, so that the result is rounded only once."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def as_stored(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert a result to ``dtype``; floating-point values are rounded to the nearest integer for an integer dtype."""
    if value.dtype == dtype:
        return value
    if value.dtype.kind == "f" and dtype.kind in "iub":
        value = np.asarray(np.rint(value))
    return value.astype(dtype)
