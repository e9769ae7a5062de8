"""`data` and `Data`: function inputs in shared memory, written once, and read in place by every rank.

`DataMemory` is the shared memory of one `Data`; unpickled `Data` share it with the original. The functions at the top
convert and check values, shapes and sizes that users pass.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _graph
from synkhronos._backends import TITLE
from synkhronos._memory import ArrayRef, Segment, dtype_spec, segment_of_file
from synkhronos._session import current, flush
from synkhronos._utils.display import html_table, public_names
from synkhronos.typing import Input


def condition(value: Any, dtype: np.dtype, ndim: int, force_cast: bool) -> np.ndarray:
    """Return ``value`` as an array of the given dtype and ndim, by Theano's rules for implicit casts.

    An array is cast if ``dtype`` can hold all values of the array's dtype. Numbers and lists are cast if they compare
    equal after the cast. A Python float is cast to any floating dtype. ``force_cast`` allows all casts.
    """
    array = np.asanyarray(value) if isinstance(value, np.memmap) else np.asarray(value)
    if array.ndim != ndim:
        raise TypeError(f"got {array.ndim} dimensions (shape {array.shape}); expected {ndim}")
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
                f"got {array.dtype} values, which {dtype} cannot hold without loss; convert them first, by "
                f'numpy.asarray(value, "{dtype}")'
            )
    try:
        return array.astype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"got {array.dtype} values, which cannot be converted to {dtype}: {error}") from None


def _same_values(array: np.ndarray, dtype: np.dtype) -> bool:
    if dtype.kind not in "biufc" or (array.dtype.kind == "c" and dtype.kind != "c"):
        return False
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        back = cast.astype(array.dtype)  # large integers and the floats next to them compare equal, as floats
    has_nan = array.dtype.kind in "fc"
    return all(np.array_equal(one, array, equal_nan=has_nan) for one in (cast, back))


def size_in_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def check_shape(shape: Any, ndim: int | None) -> tuple[int, ...]:
    """Check a shape, and return it as a tuple of ``ndim`` lengths (of any number if ``ndim`` is ``None``).

    An int stands for a shape of one dimension.
    """
    if isinstance(shape, (int, np.integer)):
        shape = (shape,)
    try:
        checked = tuple(int(length.__index__()) for length in shape)
    except (AttributeError, TypeError):
        raise TypeError(f"the shape is {shape!r}; expected a tuple of ints") from None
    if ndim is not None and len(checked) != ndim:
        raise TypeError(f"the shape is {shape!r}; expected {ndim} dimensions")
    if any(length < 0 for length in checked):
        raise ValueError(f"the shape is {shape!r}; expected lengths of at least 0")
    return checked


def check_oversize(oversize: Any) -> None:
    if isinstance(oversize, bool) or not isinstance(oversize, (int, float, np.number)):
        raise TypeError(f"oversize is {oversize!r}; expected a number from 1 to 2")
    if not 1 <= oversize <= 2:
        raise ValueError(f"oversize is {oversize}; expected a number from 1 to 2")


#: The memory that this process allocated or inherited, by key.
_known: Any = weakref.WeakValueDictionary()


class DataMemory:
    """Shared memory that is freed with the last `Data` that uses it.

    Parameters
    ----------
    key : str
        Key of the segment, the same on all ranks.
    content : uint8 array
        All bytes of the memory.
    is_file : bool
        Whether the memory is a mapped file of the user's.
    """

    def __init__(self, key: str, content: np.ndarray, is_file: bool) -> None:
        self.key = key
        self.bytes = content
        self.is_file = is_file
        _known[key] = self

    @classmethod
    def allocate(cls, n_bytes: int) -> DataMemory:
        """Allocate memory, filled with zeros."""
        return cls.share(current("Data").allocate(n_bytes), n_bytes, is_file=False)

    @classmethod
    def share(cls, segment: Segment, n_bytes: int, is_file: bool) -> DataMemory:
        """Share memory that this process has mapped with all ranks."""
        session = current("Data")
        made = cls(segment.ref.key, segment.bytes[:n_bytes], is_file)
        session.share(segment, made.bytes)
        return made

    @classmethod
    def find(cls, key: str) -> DataMemory | None:
        """Return the memory with this key, or ``None`` if this process does not have it."""
        found: DataMemory | None = _known.get(key)
        return found


#: The largest number of dimensions of an array; NumPy 2 has no public constant for it.
_MAX_DIMENSIONS = getattr(np, "MAXDIMS", 64)


class Data:
    """An array in shared memory, made by `data`. It is read and written like a NumPy array.

    ``copy.copy`` and ``copy.deepcopy`` copy the memory. Unpickled `Data` shares the memory of the original. It can be
    unpickled in the process that made the original, and in processes forked from it later. In other processes,
    unpickling raises `TypeError`: pickle ``numpy.asarray(data)`` instead.

    Attributes
    ----------
    data : numpy.ndarray
        View of the memory. Processes that are forked later read and write the same memory through it.
    dtype, ndim, shape, size
        Those of the array, as in NumPy.
    alloc_size : int
        Number of elements that the allocated memory can hold.
    minibatch : bool
        Whether the array holds only the rows of the current batch; see `data`.
    name : str or None

    Examples
    --------
    >>> with synk.session(2):
    ...     d = synk.data(np.zeros((3, 2)))
    ...     d[1] = 7
    ...     print(d.shape, np.asarray(d).sum())
    (3, 2) 14.0
    """

    def __init__(self, dtype: np.dtype, ndim: int, minibatch: bool, name: str | None) -> None:
        if dtype.hasobject:
            raise TypeError(f"dtype {dtype} holds Python objects; expected numbers or bytes, which ranks can share")
        if isinstance(ndim, bool) or not isinstance(ndim, (int, np.integer)) or ndim < 0:
            raise TypeError(f"ndim is {ndim!r}; expected an int of at least 0")
        if ndim > _MAX_DIMENSIONS:
            raise ValueError(f"ndim is {ndim}; expected at most {_MAX_DIMENSIONS}, NumPy's limit")
        self.minibatch = minibatch
        self.name = name
        self._array = np.zeros((0,) * ndim, dtype)
        self._held: DataMemory | None = None
        self._ref: ArrayRef | None = None

    dtype = property(lambda self: self._array.dtype)
    ndim = property(lambda self: self._array.ndim)
    shape = property(lambda self: self._array.shape)
    size = property(lambda self: self._array.size)
    data = property(lambda self: self._array)
    alloc_size = property(lambda self: self._n_bytes // max(1, self.dtype.itemsize))

    @property
    def ref(self) -> ArrayRef:
        """Place of the array in shared memory, for the other ranks."""
        if self._held is None:
            raise ValueError(f"{self!r} has no memory; set its value or shape first")
        if self._ref is None or self._ref.key != self._held.key or self._ref.shape != self._array.shape:
            self._ref = ArrayRef(self._held.key, 0, self._array.shape, dtype_spec(self._array.dtype))
        return self._ref

    @property
    def memory(self) -> Any:
        """Object that keeps the array's memory alive even if this `Data` is dropped or takes other memory."""
        return None if self._held is None else self._held.bytes

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> Any:
        return self._array[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._array[key] = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False and dtype is not None and np.dtype(dtype) != self.dtype:
            raise ValueError(f"dtype is {np.dtype(dtype)}; expected {self.dtype}, or copy=None")
        return self._array.astype(dtype if dtype is not None else self.dtype, copy=bool(copy))

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        minibatch = ", minibatch" if self.minibatch else ""
        return f"<synkhronos.Data {name}shape {self.shape}, {self.dtype}, {self.data.nbytes:,} bytes{minibatch}>"

    def _repr_html_(self) -> str:
        """Return a table of the attributes, for notebooks."""
        head = ("Data", "shape", "dtype", "bytes", "minibatch")
        line = (self.name or "", self.shape, self.dtype, f"{self.data.nbytes:,}", self.minibatch)
        return html_table([head, line])

    def __dir__(self) -> list[str]:
        return public_names(self, "memory", "ref")

    def condition_data(self, value: Any, force_cast: bool = False) -> np.ndarray:
        """Return ``value`` as `set_value` would store it: as an array with the dtype and ndim of this `Data`.

        Parameters
        ----------
        value : array_like or Data
            A value of any shape with the same number of dimensions.
        force_cast : bool
            Convert the value even if that loses precision.

        Returns
        -------
        numpy.ndarray
            ``value`` itself if it is an array of this dtype already, otherwise a new array.

        Raises
        ------
        TypeError
            If the number of dimensions differs, or the value cannot be cast without loss and ``force_cast`` is false.

        Examples
        --------
        >>> with synk.session(2):
        ...     d = synk.data(dtype="float32", ndim=1)
        ...     print(d.condition_data([1, 2]).dtype)
        float32
        """
        return condition(value.data if isinstance(value, Data) else value, self.dtype, self.ndim, force_cast)

    def set_value(self, value: Any, force_cast: bool = False, oversize: float = 1) -> None:
        """Store a value of any shape. New memory is allocated only if the present memory is too small.

        Parameters
        ----------
        value : array_like or Data
            A value of any shape with the same number of dimensions, which is copied. The file of a `numpy.memmap` is
            shared instead, as by `data`.
        force_cast : bool
            Convert the value even if that loses precision.
        oversize : float
            If new memory is allocated, allocate this many times the memory needed, from 1 to 2.

        Raises
        ------
        SessionError
            If new memory is needed, and there is no session.
        TypeError, ValueError
            If the value does not match the dtype or ndim, or ``oversize`` is out of range.
        MemoryError
            If there is too little shared memory. The old contents are kept.

        Examples
        --------
        >>> with synk.session(2):
        ...     d = synk.data([1.0, 2.0, 6.0])
        ...     d.set_value([3.0, 4.0])
        ...     print(d.shape, d[:], d.alloc_size)
        (2,) [3. 4.] 3
        """
        check_oversize(oversize)
        array = self.condition_data(value, force_cast)
        file = segment_of_file(array)
        if file is not None:
            self._hold(DataMemory.share(file, array.nbytes, is_file=True))
            self._array = array.view(np.ndarray)
            return
        fits = self._fits(array.shape) and not self._is_file
        fresh = self._view(array.shape) if fits else self._allocate(array.shape, oversize)
        np.copyto(fresh, array)
        self._array = fresh

    def set_shape(self, shape: Sequence[int], oversize: float = 1) -> None:
        """Change the shape. Elements inside both the old and the new shape are kept, new elements are zeros.

        If the memory is a mapped file, rows that are removed and added again have the file's contents.

        Parameters
        ----------
        shape : tuple of int, or int
            The new shape, with the same number of dimensions.
        oversize : float
            If new memory is allocated, allocate this many times the memory needed, from 1 to 2.

        Raises
        ------
        SessionError
            If new memory is needed, and there is no session.
        TypeError, ValueError
            For an invalid shape or ``oversize``.
        MemoryError
            If there is too little shared memory.

        Examples
        --------
        >>> with synk.session(2):
        ...     d = synk.data([[1.0, 2.0], [3.0, 4.0]])
        ...     d.set_shape((3, 1))
        ...     print(d[:].tolist())
        [[1.0], [3.0], [0.0]]
        """
        check_oversize(oversize)
        shape = check_shape(shape, self.ndim)
        if shape == self.shape and self._held is not None:
            return
        old = self._array
        if shape[1:] == old.shape[1:] and self._fits(shape):  # only the length of axis 0 changes, in place
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
        """Change the length of axis 0. Remaining rows are kept, new rows are zeros. Shrinking allocates no memory.

        Parameters
        ----------
        length : int
            The new length.
        oversize : float
            If new memory is allocated, allocate this many times the memory needed, from 1 to 2.

        Raises
        ------
        TypeError
            For 0-dimensional data, and as `set_shape`.
        SessionError, ValueError, MemoryError
            As `set_shape`.

        Examples
        --------
        >>> with synk.session(2):
        ...     d = synk.data([1.0, 2.0])
        ...     d.set_length(4)
        ...     print(d[:])
        [1. 2. 0. 0.]
        """
        if self.ndim == 0:
            raise TypeError(f"{self!r} is 0-dimensional; expected at least one dimension")
        self.set_shape((length, *self.shape[1:]), oversize)

    def free_memory(self) -> None:
        """Free the memory on all ranks immediately. All lengths of the shape become 0.

        The memory is not freed while other, unpickled `Data` share it.

        Raises
        ------
        WorkerError
            If a rank fails.

        Examples
        --------
        >>> with synk.session(2):
        ...     d = synk.data([1.0, 2.0])
        ...     d.free_memory()
        ...     print(d.shape, d.alloc_size)
        (0,) 0
        """
        held = self._held is not None
        self._hold(None)
        if held:
            flush()

    # -- memory

    @property
    def _n_bytes(self) -> int:
        return 0 if self._held is None else self._held.bytes.nbytes

    @property
    def _is_file(self) -> bool:
        return self._held is not None and self._held.is_file

    def _view(self, shape: tuple[int, ...]) -> np.ndarray:
        assert self._held is not None
        return np.ndarray(shape, self.dtype, self._held.bytes)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return self._held is not None and size_in_bytes(shape, self.dtype) <= self._n_bytes

    def _allocate(self, shape: tuple[int, ...], oversize: float) -> np.ndarray:
        """Return a view of the given shape, in new memory."""
        self._hold(DataMemory.allocate(max(1, int(size_in_bytes(shape, self.dtype) * oversize))))
        return self._view(shape)

    def _hold(self, memory: DataMemory | None) -> None:
        """Replace the current memory; the array becomes empty."""
        self._array = np.zeros((0,) * self.ndim, self.dtype)
        self._held = memory

    # -- copies

    def __copy__(self) -> Data:
        made = Data(self.dtype, self.ndim, self.minibatch, self.name)
        if self._held is not None:
            made.set_value(self._array)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Data:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        held = None if self._held is None else self._held.key
        return _unpickled, (held, self.shape, dtype_spec(self.dtype), self.minibatch, self.name)


def _unpickled(key: str | None, shape: tuple[int, ...], dtype: Any, minibatch: bool, name: str | None) -> Data:
    """Return `Data` over the memory of the pickled one."""
    made = Data(np.dtype(dtype), len(shape), minibatch, name)
    if key is not None:
        held = DataMemory.find(key)
        if held is None:
            raise TypeError(
                f"got pickled Data of shape {shape}, whose memory only the process that made it has (while it holds "
                "it), and processes forked from it later; pickle numpy.asarray(data) instead"
            )
        made._hold(held)
        made._array = made._view(shape)
    return made


# -- making the array


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

    Call it in the controller. Every rank of the controller's node maps the memory and reads its own rows in place.
    Other nodes are sent the rows that they need.

    Parameters
    ----------
    value : array_like, optional
        Initial contents, which are copied. A `numpy.memmap` is not copied: its file is shared. It must be C-contiguous,
        and its mode must not be ``"c"``; it may be a part of the file.
    var : variable, optional
        The input that the data is for. It determines dtype and ndim, and the default of ``name``.
    dtype : dtype, optional
        The dtype, which is fixed. Default: that of ``var``, or else of ``value``.
    ndim : int, optional
        Number of dimensions, which is fixed. Default: that of ``var``, or else of ``value`` or ``shape``.
    shape : tuple of int, optional
        Shape to allocate, filled with zeros, if no value is given.
    minibatch : bool
        Whether the array will hold only the rows of the current batch. Then row 0 is the lowest row of a range in
        ``batch``, and row i belongs to the i-th index of an index list.
    force_cast : bool
        Convert the value even if that loses precision.
    oversize : float
        Allocate this many times the memory needed, from 1 to 2, so that the array can grow in place.
    name : str, optional
        Name in messages and in ``repr``. Default: that of ``var``.

    Returns
    -------
    Data
        If neither ``value`` nor ``shape`` is given, its shape is ``(0, ...)``, and no memory is allocated.

    Raises
    ------
    SessionError
        Without a session.
    TypeError, ValueError
        If dtype or ndim are not known, or the value does not match them.
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
