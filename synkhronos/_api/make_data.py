"""`synk.data`: determine dtype and dimensions, and make the array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _graph
from synkhronos._api.data_arrays import Data, check_shape
from synkhronos._backends import TITLE
from synkhronos._session import current
from synkhronos.typing import Input


def data(
    value: Any = None,
    var: Input | None = None,
    dtype: Any = None,
    ndim: int | None = None,
    shape: Sequence[int] | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
) -> Data:
    """Make an array in shared memory, which functions take as input without copying it in each call.

    It is called in the controller. Every rank of this node maps the memory and reads its own rows where they lie; other
    nodes are sent the rows that they need.

    Parameters
    ----------
    value : array_like, optional
        Initial contents, copied. A `numpy.memmap` of a file or a part of it (C-contiguous, not of mode ``"c"``) is
        shared as the file that it is, and not copied.
    var : variable, optional
        The input that this is for: determines dtype and ndim, and the default of ``name``.
    dtype : dtype, optional
        Default: that of ``var``, or else of ``value``. It never changes later.
    ndim : int, optional
        Number of dimensions. Default: that of ``var``, or else of ``value`` or ``shape``. It never changes later.
    shape : tuple of int, optional
        Shape to allocate, filled with zeros, if there is no value.
    minibatch : bool
        Whether this will hold just the current batch. Then row 0 is the lowest row of a range in ``batch``, and row i
        belongs to the i-th index of an index list.
    force_cast : bool
        Convert the value even if that loses precision.
    oversize : float
        From 1 to 2: allocate this many times the memory needed, so that the array can grow in place.
    name : str, optional
        Shown in messages and by ``repr``. Default: that of ``var``.

    Returns
    -------
    Data
        Of shape ``(0, ...)`` and without memory, if neither ``value`` nor ``shape`` is given.

    Raises
    ------
    SessionError
        Without a session.
    TypeError, ValueError
        If dtype or ndim stay unknown, or the value does not fit them.
    MemoryError
        If there is too little shared memory.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], x.mean())
    ...     d = synk.data([1, 2, 6], var=x, force_cast=True)
    ...     print(f(d), f(d, batch=[0, 2]))
    3.0 3.5
    """
    current("data")
    if var is not None:
        wanted: Any = getattr(var, "variable", var)
        if not _graph.is_tensor_variable(wanted):
            raise TypeError(f"var is {wanted!r}; expected a {TITLE} tensor variable")
        if dtype is not None and np.dtype(dtype) != np.dtype(wanted.dtype):
            raise TypeError(f"dtype is {dtype!r}, and that of var is {wanted.dtype}; leave one of the two out")
        if ndim is not None and ndim != wanted.ndim:
            raise TypeError(f"ndim is {ndim!r}, and that of var is {wanted.ndim}; leave one of the two out")
        dtype, ndim, name = wanted.dtype, wanted.ndim, name or wanted.name
    if value is not None and (dtype is None or ndim is None):
        array = np.asarray(value)
        dtype = array.dtype if dtype is None else dtype
        ndim = array.ndim if ndim is None else ndim
    if shape is not None:
        shape = check_shape(shape, ndim)
        ndim = len(shape)
    if dtype is None or ndim is None:
        raise TypeError("got no dtype or no number of dimensions; pass var, or value, or dtype with ndim or shape")
    made = Data(np.dtype(dtype), ndim, bool(minibatch), name)
    if value is not None:
        made.set_value(value, force_cast=force_cast, oversize=oversize)
        if shape is not None and made.shape != shape:
            raise ValueError(f"shape is {shape}, and that of value is {made.shape}; leave one of the two out")
    elif shape is not None:
        made.set_shape(shape, oversize=oversize)
    return made
