"""Reductions of NumPy arrays over ranks and over slices, which the compiled core computes.

``avg`` is the weighted mean ``sum(w_k x_k) / sum(w_k)``, where ``w_k`` is the number of data points behind ``x_k``;
with a mean over the data points as ``x_k`` it is the mean over all of them. An operand of weight 0 is left out
altogether, NaNs in it too. If all weights are 0 they count as equal.

It is right wherever the mean can be held: where the sum overflows, the elements concerned are computed again, by
weights that sum to one. Integers are averaged exactly. Sums, products and averages of half precision are computed in
single precision and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._collectives.ops import OPS
from synkhronos._native import native

__all__ = [
    "Accumulator",
    "as_stored",
    "check_equal_shapes",
    "combine",
    "reduction_of",
    "result_dtype",
]


def result_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype of a reduction that is returned: NumPy's, so integers and booleans average to float64."""
    if OPS[op].weighted:
        return np.dtype(np.float64) if dtype.kind in "iub" else dtype
    if OPS[op].widens and dtype.kind in "iub":
        return np.zeros(1, dtype).sum().dtype
    return dtype


@functools.lru_cache(maxsize=256)
def reduction_of(op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...]) -> native.Reduction:
    """What reduces as many flat arrays as there are weights, made once."""
    return native.Reduction(op, dtype, returned, weights)


def combine(arrays: Sequence[Any], op: str, weights: Sequence[float], what: str) -> np.ndarray:
    """Reduce or gather arrays into a new one.

    Parameters
    ----------
    arrays : sequence of array
        One for each rank (or slice), in order.
    op : str
        A key of `OPS`, or ``"gather"`` (concatenate on axis 0; 0-d arrays count as length 1).
    weights : sequence of float
        As many; used by a weighted op alone.
    what : str
        What the arrays are, for messages.

    Returns
    -------
    array
        Of the dtype `result_dtype`; gathered arrays keep theirs.

    Raises
    ------
    ValueError
        If the shapes do not allow it.
    """
    first = np.asarray(arrays[0])
    if op == "gather":
        shapes = [np.shape(array) for array in arrays]
        if len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(f"{what}: cannot gather shapes that differ beyond axis 0: {shapes}")
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
    """The dtype of the operands, that of what is returned, and what reduces them."""
    dtype = dtype.newbyteorder("=")
    returned = result_dtype(dtype, op)
    return dtype, returned, reduction_of(op, dtype, returned, weights)


def check_equal_shapes(shapes: Sequence[tuple[int, ...]], op: str, what: str) -> None:
    """Raise `ValueError` where an op that needs equal shapes did not get them."""
    if shapes.count(shapes[0]) < len(shapes):
        raise ValueError(
            f'{what}: op "{op}" needs equal shapes on all ranks and slices; got {shapes}. '
            'Use "gather" for results with one row for each data point'
        )


class Accumulator:
    """Reduces the results of a rank's slices one after the other, holding no more than one of them.

    Parameters
    ----------
    op : str
        A key of `OPS`, or ``"gather"``.
    total : int
        Number of data points in all slices together.
    what : str
        What is accumulated, for messages.
    dtype : numpy.dtype, optional
        Of the result; default: `result_dtype`.
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
        whole = value.dtype.kind in "iub"
        if self._sums is None:
            wider = _accumulated(value.dtype)
            self._sums = np.zeros((value.size, 2), np.int64) if whole else np.full(value.size, -0.0, wider)
        share = count / self._total if self._total else 1.0
        native.add_to_sums(self._sums, value, (count if self._total else 1) if whole else share)

    def result(self) -> np.ndarray:
        """The reduction (for a weighted op, of values weighted by their counts)."""
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
    """The dtype of partial results: single precision for half precision, which is rounded once, at the end."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def as_stored(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A reduction result in the dtype of the variable that will hold it; averages of integers round to the nearest."""
    if value.dtype == dtype:
        return value
    if value.dtype.kind == "f" and dtype.kind in "iub":
        value = np.asarray(np.rint(value))
    return value.astype(dtype)
