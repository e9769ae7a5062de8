"""`synk.data`: reading what kind of array is wanted, and making it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _graphs
from synkhronos._data.array import Data
from synkhronos._data.conversion import check_shape
from synkhronos._engine import TITLE
from synkhronos._keywords import checks_keywords
from synkhronos._session import current

__all__ = ["data"]


@checks_keywords
def data(
    value: Any = None,
    var: Any = None,
    dtype: Any = None,
    ndim: int | None = None,
    shape: Sequence[int] | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
) -> Data:
    """Make an array in shared memory, to be given to functions as input.

    Parameters
    ----------
    value : array_like, optional
        Initial contents, copied; a `numpy.memmap` of a whole or part of a file (C-contiguous, not of mode ``"c"``) is
        shared as the file that it is, and not copied.
    var : variable, optional
        The input that this is for: gives dtype and ndim.
    dtype, ndim : optional
        Given explicitly. dtype and ndim never change later.
    shape : tuple of int, optional
        Shape to allocate, filled with zeros, if there is no value.
    minibatch : bool
        Whether this will hold just the current batch, so that ``batch`` indexes count from the lowest one asked for.
    force_cast : bool
        Convert the value even if that loses precision.
    oversize : float
        From 1 to 2: allocate this many times the memory needed, so that it can grow in place.
    name : str, optional

    Returns
    -------
    Data

    Raises
    ------
    SessionError
        A `RuntimeError`: before ``fork``.
    TypeError, ValueError
        If dtype or ndim stay unknown, or the value does not fit them.
    MemoryError
        If shared memory is too small.
    """
    current("data")
    if var is not None:
        var = getattr(var, "variable", var)
        if not _graphs.is_tensor_variable(var):
            raise TypeError(f"var must be a {TITLE} tensor variable; got {var!r}")
        if dtype is not None and np.dtype(dtype) != np.dtype(var.dtype):
            raise TypeError(f"dtype={dtype!r} contradicts var, whose dtype is {var.dtype}")
        if ndim is not None and ndim != var.ndim:
            raise TypeError(f"ndim={ndim!r} contradicts var, whose ndim is {var.ndim}")
        dtype, ndim, name = var.dtype, var.ndim, name or var.name
    if value is not None and (dtype is None or ndim is None):
        array = np.asarray(value)
        dtype = array.dtype if dtype is None else dtype
        ndim = array.ndim if ndim is None else ndim
    if shape is not None:
        shape = check_shape(shape, ndim)
        ndim = len(shape)
    if dtype is None or ndim is None:
        raise TypeError(
            "data needs a dtype and a number of dimensions: give var, or value, or dtype with ndim or shape"
        )
    made = Data(np.dtype(dtype), ndim, bool(minibatch), name)
    if value is not None:
        made.set_value(value, force_cast=force_cast, oversize=oversize)
        if shape is not None and made.shape != shape:
            raise ValueError(f"shape={shape}, but the value has shape {made.shape}")
    elif shape is not None:
        made.set_shape(shape, oversize=oversize)
    return made
