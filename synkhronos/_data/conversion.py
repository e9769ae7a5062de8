"""Values, shapes and sizes that users give, brought into form or refused."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["check_oversize", "check_shape", "condition", "size_in_bytes"]


def condition(value: Any, dtype: np.dtype, ndim: int, force_cast: bool) -> np.ndarray:
    """``value`` as an array of the given dtype and ndim, by Theano's rules for what may be cast without being asked.

    An array is cast if its dtype's values all fit into ``dtype``; other values (numbers, lists) if they come out
    equal; a Python float always becomes any floating dtype.
    """
    array = np.asanyarray(value) if isinstance(value, np.memmap) else np.asarray(value)
    if array.ndim != ndim:
        raise TypeError(f"expected {ndim} dimensions; got {array.ndim} (shape {array.shape})")
    if array.dtype == dtype:
        return array
    if not force_cast:
        if isinstance(value, (np.ndarray, np.generic)):
            fits = np.can_cast(array.dtype, dtype, "safe")
        else:
            is_float = type(value) is float and dtype.kind == "f"
            fits = is_float or (array.dtype.kind in "biufc" and _same_values(array, dtype))
        if not fits:
            raise TypeError(
                f"{array.dtype} values cannot be stored as {dtype} without loss; pass force_cast=True to do it"
            )
    try:
        return array.astype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{array.dtype} values cannot be stored as {dtype}: {error}") from None


def _same_values(array: np.ndarray, dtype: np.dtype) -> bool:
    if dtype.kind not in "biufc" or (array.dtype.kind == "c" and dtype.kind != "c"):
        return False
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    return bool(np.array_equal(cast, array, equal_nan=array.dtype.kind in "fc"))


def size_in_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    n_bytes = dtype.itemsize
    for length in shape:
        n_bytes *= length
    return n_bytes


def check_shape(shape: Any, ndim: int | None) -> tuple[int, ...]:
    """``shape`` (an int counts as one dimension) as a tuple, of ``ndim`` dimensions if that is not ``None``."""
    if isinstance(shape, (int, np.integer)):
        shape = (shape,)
    try:
        checked = tuple(int(length.__index__()) for length in shape)
    except (AttributeError, TypeError):
        raise TypeError(f"a shape must be a tuple of ints; got {shape!r}") from None
    if ndim is not None and len(checked) != ndim:
        raise TypeError(f"expected a shape of {ndim} dimensions; got {shape!r}")
    if any(length < 0 for length in checked):
        raise ValueError(f"a shape cannot be negative; got {shape!r}")
    return checked


def check_oversize(oversize: Any) -> None:
    if isinstance(oversize, bool) or not isinstance(oversize, (int, float, np.number)):
        raise TypeError(f"oversize must be a number from 1 to 2; got {oversize!r}")
    if not 1 <= oversize <= 2:
        raise ValueError(f"oversize must be from 1 to 2; got {oversize}")
