"""Means of integers by whole weights, exact: quotients and remainders are summed apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["WholeMean", "mean_by_distances"]


class WholeMean:
    """The mean of integer arrays that are added one after the other.

    With a total weight of W, each value is ``q W + r``. The mean is the weighted sum of the ``q``, which no
    intermediate overflow harms (integers wrap around, and the mean itself fits), and that of the ``r`` over W.

    Parameters
    ----------
    total : int
        The sum of the weights; from `FEW` on, Python's own integers are used, which are slow.
    """

    FEW = 2**31

    def __init__(self, total: int) -> None:
        self._total = total
        self._quotients: Any = None
        self._rests: Any = None
        self._shape: tuple[int, ...] = ()

    def add(self, values: np.ndarray, weight: int) -> None:
        """Take in an array (of the shape of those before), which counts as often as ``weight`` says."""
        self._shape = values.shape
        kind: Any = object if self._total >= self.FEW else np.uint64 if values.dtype == np.uint64 else np.int64
        number = int if kind is object else kind
        values, total, times = values.reshape(-1).astype(kind), number(self._total), number(weight)
        rests = np.remainder(values, total)
        quotients = np.floor_divide(values, total) * times
        rests = rests * times
        if self._quotients is not None:
            quotients, rests = self._quotients + quotients, self._rests + rests
        self._quotients, self._rests = quotients, rests

    def result(self, dtype: np.dtype) -> np.ndarray:
        """The mean: the nearest integer (of two the even one), or a floating-point number."""
        number: Any = int if self._rests.dtype == object else self._rests.dtype.type
        total = number(self._total)
        wholes = self._quotients + np.floor_divide(self._rests, total)
        rests = np.remainder(self._rests, total)
        if dtype.kind in "iub":
            twice = rests * number(2)
            up = (twice > total) | ((twice == total) & (np.remainder(wholes, number(2)) == 1))
            mean = (wholes + up.astype(wholes.dtype)).astype(dtype)
        else:
            mean = wholes.astype(dtype) + (rests / total).astype(dtype)
        return np.asarray(mean).reshape(self._shape)


def mean_by_distances(arrays: Sequence[np.ndarray], shares: Sequence[float], dtype: np.dtype) -> np.ndarray | None:
    """The mean of integers by weights that sum to one, from their distances to the first; ``None`` if that is far."""
    first = arrays[0]
    if not first.size:
        return np.zeros(first.shape, dtype)
    if first.dtype.itemsize > 4:
        bounds = [int(bound) for array in arrays for bound in (array.min(), array.max())]
        if max(bounds) - min(bounds) >= 2**32:
            return None
    else:
        first = first.astype(np.int64)
    total = np.zeros(first.shape)
    for array, share in zip(arrays[1:], shares[1:]):
        distance = np.asarray(array.astype(first.dtype) - first)
        total += distance.view(np.int64) * share  # of unsigned integers, too, the difference wraps around
    if dtype.kind not in "iub":
        return np.asarray(first.astype(dtype) + total.astype(dtype))
    return np.asarray((first + np.rint(total).astype(np.int64).astype(first.dtype)).astype(dtype))
