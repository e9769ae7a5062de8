"""Weighted means of arrays, right wherever the mean can be held.

With equal weights the mean is the sum times a number, with whole ones the weighted sum over their total, with others
the sum by factors of which the largest is 1, times a number. Where that sum overflows, the elements concerned are
computed again, by weights that sum to one. That it overflowed, the processor notes by itself. So the usual case pays
nothing, and every rank decides alike: it has the same numbers.

Half precision is averaged in single precision. Integers are averaged exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Callable

import numpy as np

from synkhronos._collectives.whole import WholeMean, mean_by_distances

__all__ = ["Average", "add_bounded", "normalized"]

#: In what arrays are averaged that are too narrow, and the smallest factor that is wide enough for.
_WIDER: dict[Any, Any] = {np.dtype(np.float16): np.float32, np.dtype(np.float32): np.float64}
_LEAST_FACTOR: dict[Any, float] = {np.dtype(np.float16): np.inf, np.dtype(np.float32): float(np.finfo(np.float32).tiny)}
_umath: Any = np.core.umath
_OVERFLOW = 7 << _umath.SHIFT_OVERFLOW
_RAISE_OVERFLOW = _umath.ERR_RAISE << _umath.SHIFT_OVERFLOW


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that sum to one; equal ones if all are 0. None but those of 0 become 0."""
    largest = max(weights)
    relative = [max(weight / largest, 5e-324) if weight > 0 else 0.0 for weight in weights] if largest > 0 else None
    if relative is None:
        return [1.0 / len(weights)] * len(weights)
    total = math.fsum(relative)
    return [max(one / total, 5e-324) if one > 0 else 0.0 for one in relative]


class _raised_overflow:
    """What ``np.errstate(over="raise")`` does, in a sixth of the time, which counts where arrays are small."""

    def __enter__(self) -> None:
        self._before = np.geterrobj()  # noqa: NPY201 - gone from NumPy 2, with which Theano does not run
        size, mask, call = self._before
        np.seterrobj([size, mask & ~_OVERFLOW | _RAISE_OVERFLOW, call])  # noqa: NPY201

    def __exit__(self, *exception: object) -> None:
        np.seterrobj(self._before)  # noqa: NPY201


def add_bounded(total: np.ndarray, term: np.ndarray) -> np.ndarray:
    """Add a term of a mean. Where finite numbers overflow, they only did by rounding: that becomes the largest one."""
    try:
        with _raised_overflow():
            return np.asarray(total + term)
    except FloatingPointError:
        with np.errstate(over="ignore", invalid="ignore"):
            result = np.asarray(total + term)
        rounded = np.isinf(result) & np.isfinite(total) & np.isfinite(term)
        np.copyto(result, np.copysign(np.finfo(result.dtype).max, result), where=rounded)
        return result


class Average:
    """The mean of as many arrays as there are weights.

    Parameters
    ----------
    weights : sequence of float
        Not negative. An array of weight 0 is left out altogether, NaNs in it too. If all are 0 they count as equal.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = normalized(weights)
        self._weights = weights if any(weights) else (1,) * len(weights)
        self._present = [i for i, share in enumerate(shares) if share > 0]
        self._shares = [shares[i] for i in self._present]
        self._largest = max(self._shares)
        self._relative = [share / self._largest for share in self._shares]
        self._least = min(self._relative)
        self._plans: dict[Any, tuple[list[Any], Callable[..., Any], Any]] = {}

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def by(weights: tuple[float, ...]) -> Average:
        """The average by these weights, made once."""
        return Average(weights)

    @functools.cached_property
    def _whole(self) -> tuple[list[int], int]:
        """The weights as whole numbers without a common divisor, and their sum."""
        exact = [Fraction(self._weights[i]) for i in self._present]
        denominator = math.lcm(*[one.denominator for one in exact])
        wholes = [int(one * denominator) for one in exact]
        divisor = math.gcd(*wholes)
        wholes = [one // divisor for one in wholes]
        return wholes, sum(wholes)

    def _plan(self, dtype: np.dtype) -> tuple[list[Any], Callable[..., Any], Any]:
        """Factors, and what makes a mean of the weighted sum: a function, and its second argument."""
        if dtype not in self._plans:
            number = dtype.type
            wholes, total = self._whole
            if self._least == 1:
                self._plans[dtype] = [1] * len(wholes), np.multiply, number(self._largest)
            elif total <= 1 << np.finfo(dtype).nmant:
                self._plans[dtype] = [one if one == 1 else number(one) for one in wholes], np.divide, number(total)
            else:
                factors = [1 if one == 1 else number(one) for one in self._relative]
                self._plans[dtype] = factors, np.multiply, number(self._largest)
        return self._plans[dtype]

    def of(self, arrays: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
        """The mean, as a new array of the given dtype."""
        flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        out = np.empty(arrays[0].shape, dtype)
        self.into(out.reshape(-1), flat, lambda: flat)
        return out

    def into(
        self,
        out: np.ndarray,
        operands: Sequence[np.ndarray],
        again: Callable[[], Sequence[np.ndarray]],
        scratch: np.ndarray | None = None,
    ) -> None:
        """Write the mean of flat arrays to ``out``.

        Parameters
        ----------
        out : array
            It may be one of the first two operands. Averages of integers become the nearest integer, the even one of
            two, or are exact to the last bit but one in a floating dtype.
        operands : sequence of array
        again : callable
            Gives the operands once more, if ``out`` or ``scratch`` are among them and were overwritten.
        scratch : array, optional
            Where sums are formed rather than in ``out``, which then keeps its values until they are no longer needed.
        """
        dtype = operands[0].dtype
        present = [operands[i] for i in self._present]
        if len(present) == 1 and out.dtype == dtype:
            np.copyto(out, present[0])
        elif dtype.kind in "iub":
            np.copyto(out, self._of_integers(present, out.dtype))
        elif dtype.kind == "c":
            real = out.real.dtype
            views = [operand.view(real) for operand in operands]
            self.into(
                out.view(real),
                views,
                lambda: [operand.view(real) for operand in again()],
                None if scratch is None else scratch.view(real),
            )
        elif self._least < _LEAST_FACTOR.get(dtype, 0):
            wide = [operand.astype(_WIDER[dtype]) for operand in operands]
            mean = np.empty(out.shape, _WIDER[dtype])
            self.into(mean, wide, lambda: wide)
            np.copyto(out, mean, casting="same_kind")
        else:
            self._of_floats(out, present, again, out if scratch is None else scratch[: out.size])

    def _of_floats(
        self, out: np.ndarray, present: list[np.ndarray], again: Callable[[], Sequence[np.ndarray]], total: np.ndarray
    ) -> None:
        factors, scale, by = self._plan(out.dtype)
        try:
            with _raised_overflow():
                _add(total, present, factors)
        except FloatingPointError:
            operands = again()
            present = [operands[i] for i in self._present]
            with np.errstate(over="ignore", invalid="ignore"):
                plain = np.empty_like(out)
                _add(plain, present, factors)
                scale(plain, by, out=plain)
                bounded = present[0] * out.dtype.type(self._shares[0])
                for operand, share in zip(present[1:], self._shares[1:]):
                    bounded = add_bounded(bounded, operand * out.dtype.type(share))
            np.copyto(out, np.where(np.isfinite(plain), plain, bounded))
        else:
            scale(total, by, out=out)

    def _of_integers(self, present: list[np.ndarray], dtype: np.dtype) -> Any:
        weights, total = self._whole
        if total >= WholeMean.FEW:
            mean = mean_by_distances(present, self._shares, dtype)
            if mean is not None:
                return mean
        exact = WholeMean(total)
        for operand, weight in zip(present, weights):
            exact.add(operand, weight)
        return exact.result(dtype)


def _add(out: np.ndarray, operands: Sequence[np.ndarray], factors: Sequence[Any]) -> None:
    """The sum of two operands or more by their factors, in their order; ``out`` may be one of the first two."""
    weighted = [one if factor == 1 else one * factor for one, factor in zip(operands, factors)]
    np.add(weighted[0], weighted[1], out=out)
    for operand in weighted[2:]:
        np.add(out, operand, out=out)
