"""`synk.data`: function inputs in shared memory, written once and read by every rank where they lie."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _graphs
from synkhronos._data.conversion import check_oversize, check_shape, condition, size_in_bytes
from synkhronos._keywords import checks_keywords
from synkhronos._memory import ArrayRef, OpenFile, dtype_spec
from synkhronos._session import current, drop_segment, settle

__all__ = ["Data", "data"]


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
    var : Theano variable, optional
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
            raise TypeError(f"var must be a Theano tensor variable; got {var!r}")
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


class Data:
    """An array in shared memory; made by `data`. Reads and writes like a NumPy array.

    Attributes
    ----------
    data : numpy.ndarray
        A view of the memory. Processes forked later read and write the same memory through it.
    dtype, ndim, shape, size
        As NumPy's.
    alloc_size : int
        Number of elements that there is memory for.
    minibatch : bool
    name : str or None
    """

    def __init__(self, dtype: np.dtype, ndim: int, minibatch: bool, name: str | None) -> None:
        if dtype.hasobject:
            raise TypeError(f"dtype {dtype} holds Python objects, which cannot lie in shared memory")
        if isinstance(ndim, bool) or not isinstance(ndim, (int, np.integer)) or ndim < 0:
            raise TypeError(f"ndim must be an int of at least 0; got {ndim!r}")
        if ndim > np.MAXDIMS:
            raise ValueError(f"NumPy's arrays have at most {np.MAXDIMS} dimensions; got ndim={ndim}")
        self.minibatch = minibatch
        self.name = name
        self._array = np.zeros((0,) * ndim, dtype)
        self._buffer = np.zeros(0, np.uint8)
        self._key: str | None = None
        self._is_file = False
        self._finalizer: Any = None

    dtype = property(lambda self: self._array.dtype)
    ndim = property(lambda self: self._array.ndim)
    shape = property(lambda self: self._array.shape)
    size = property(lambda self: self._array.size)
    data = property(lambda self: self._array)
    alloc_size = property(lambda self: self._buffer.nbytes // max(1, self.dtype.itemsize))

    @property
    def ref(self) -> ArrayRef:
        """Where the array lies, for the other ranks."""
        if self._key is None:
            raise ValueError(f"{self!r} has no memory: set its value or shape first")
        return ArrayRef(self._key, 0, self._array.shape, dtype_spec(self._array.dtype))

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> Any:
        return self._array[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._array[key] = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array.astype(dtype if dtype is not None else self.dtype, copy=bool(copy))

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        minibatch = ", minibatch" if self.minibatch else ""
        return f"<synkhronos.Data {name}shape {self.shape}, {self.dtype}, {self.data.nbytes:,} bytes{minibatch}>"

    def condition_data(self, value: Any, force_cast: bool = False) -> np.ndarray:
        """What `set_value` would store: ``value`` as an array of this dtype and ndim.

        Raises
        ------
        TypeError
            If the ndim differs, or the dtype cannot hold every value of ``value``'s dtype and ``force_cast`` is false.
        """
        return condition(value.data if isinstance(value, Data) else value, self.dtype, self.ndim, force_cast)

    def set_value(self, value: Any, force_cast: bool = False, oversize: float = 1) -> None:
        """Store a value of any shape; memory is allocated anew only if it does not fit.

        Raises
        ------
        TypeError, ValueError
        MemoryError
            If shared memory is too small; the old contents stand.
        """
        check_oversize(oversize)
        array = self.condition_data(value, force_cast)
        file = OpenFile.of(array)
        if file is not None:
            session = current("Data")
            self._release()
            self._keep(file.ref.key, file.bytes, is_file=True)
            session.share(file)
            self._array = array.view(np.ndarray)
            return
        if self._is_file or not self._fits(array.shape):
            fresh = self._allocate(array.shape, oversize)
        else:
            fresh = self._view(array.shape)
        np.copyto(fresh, array)
        self._array = fresh

    def set_shape(self, shape: Sequence[int], oversize: float = 1) -> None:
        """Change the shape: what lies inside both the old and the new shape stays, the rest becomes zeros.

        (Rows that were cut off data that is a file come back as they are in the file.)
        """
        check_oversize(oversize)
        shape = check_shape(shape, self.ndim)
        if shape == self.shape and self._key is not None:
            return
        old = self._array
        if shape[1:] == old.shape[1:] and self._fits(shape):  # only the length changes, in place
            self._array = self._view(shape)
            if self.ndim and not self._is_file:
                self._array[len(old) :] = np.zeros((), self.dtype)
            return
        common = tuple(slice(min(one, two)) for one, two in zip(old.shape, shape))
        kept = old[common].copy()
        in_place = self._fits(shape) and not self._is_file
        fresh = self._view(shape) if in_place else self._allocate(shape, oversize)
        if in_place:
            fresh[...] = np.zeros((), self.dtype)
        if old.size:
            fresh[common] = kept
        self._array = fresh

    def set_length(self, length: int, oversize: float = 1) -> None:
        """Change the length of axis 0; the rows that remain are kept. Shrinking never re-allocates."""
        if self.ndim == 0:
            raise TypeError("0-dimensional data has no length")
        self.set_shape((length, *self.shape[1:]), oversize)

    def free_memory(self) -> None:
        """Give the memory back, on all ranks, now; the shape becomes all zeros."""
        held = self._key is not None
        self._release()
        if held:
            settle()

    # -- memory

    def _view(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.ndarray(shape, self.dtype, self._buffer)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return self._key is not None and size_in_bytes(shape, self.dtype) <= self._buffer.nbytes

    def _allocate(self, shape: tuple[int, ...], oversize: float) -> np.ndarray:
        """A view of the given shape, in new memory."""
        n_bytes = max(1, int(size_in_bytes(shape, self.dtype) * oversize))
        segment = current("Data").allocate(n_bytes)
        self._release()
        self._keep(segment.ref.key, segment.array((n_bytes,), np.uint8), is_file=False)
        return self._view(shape)

    def _keep(self, key: str, buffer: np.ndarray, is_file: bool) -> None:
        self._key, self._buffer, self._is_file = key, buffer, is_file
        self._finalizer = weakref.finalize(self, drop_segment, key, os.getpid())
        self._finalizer.atexit = False

    def _release(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._key, self._is_file, self._finalizer = None, False, None
        self._buffer = np.zeros(0, np.uint8)
        self._array = np.zeros((0,) * self.ndim, self.dtype)
