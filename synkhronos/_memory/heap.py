"""The shared heap, which holds computed arrays, and scratch memory for commands.

The shared heap has one region for each rank, and all ranks map all regions. While a rank executes a command, NumPy
allocates in the rank's own region (`native.Heap.call`). A session with a single rank has one region of private memory,
which caches freed blocks in the same way.

An `Arena` is scratch memory: one rank fills it again for each command, and it grows as needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._memory.descriptors import new_descriptor
from synkhronos._memory.segments import ArrayRef, Segment, SegmentRef, SegmentTable, aligned, dtype_spec
from synkhronos._native import native
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.resources import free_memory
from synkhronos._utils.rows import Rows

_logger = logging.getLogger("synkhronos")

_UNIT = 2 * 1024 * 1024
_LEAST_BYTES = 64 * 1024 * 1024
_MOST_ADDRESSES = 1 << 45  # for all ranks together; a process has 2^47
_TIMES_MEMORY = 2  # addresses per free byte: freed blocks whose sizes do not recur leave gaps

os.register_at_fork(before=native.before_fork, after_in_parent=native.after_fork)


def make_heap(n_ranks: int, rank: int) -> native.Heap:
    """Map the regions of all ranks, as large as memory and limits allow; return the heap of ``rank``.

    If the kernel or a limit does not allow any region, log a warning and return a `native.Heap` without memory. NumPy
    then allocates by malloc.
    """
    shared = n_ranks > 1
    with deferred_interrupts():  # a signal handler may raise an exception of a type that is caught below
        free = min(free for free, _ in free_memory())
        size, limit = _size(n_ranks, shared, free)
        try:
            if size < _LEAST_BYTES:
                raise OSError(limit)
            heap = _map(shared, n_ranks, rank, size, keep=free // (4 * n_ranks))
        except (OSError, MemoryError) as error:
            text = "no shared heap: %s; results are copied, and calls may take longer"
            _logger.warning(text, error)
            return native.Heap(-1, n_ranks, rank, 0, 0)
        heap.allow(free // n_ranks)
    return heap


def look_at_free_memory(heap: native.Heap, n_ranks: int) -> None:
    """Set how much more memory this rank's part of the heap may take: 1 / ``n_ranks`` of what is free now."""
    with deferred_interrupts():
        heap.allow(min(free for free, _ in free_memory()) // n_ranks)


def _map(shared: bool, n_ranks: int, rank: int, size: int, keep: int) -> native.Heap:
    if not shared:
        return native.Heap(-1, n_ranks, rank, size, keep)
    fd = new_descriptor()
    try:
        return native.Heap(fd, n_ranks, rank, size, keep)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise


def _size(n_ranks: int, shared: bool, free: int) -> tuple[int, str]:
    """Return the number of bytes of each region, and a message that says what limits it."""
    sizes = {_TIMES_MEMORY * free: "too little memory is free", _MOST_ADDRESSES // n_ranks: "there are too many ranks"}
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        sizes[max(0, addresses - used) // (4 * n_ranks)] = (
            f"this process may have {addresses:,} bytes in all: ulimit -v"
        )
    of_file = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if shared and of_file != resource.RLIM_INFINITY:
        sizes[max(0, of_file - _UNIT) // n_ranks] = (
            f"files may have {of_file:,} bytes, and shared memory counts as a file: ulimit -f"
        )
    size = min(sizes)
    return size // _UNIT * _UNIT, sizes[size]


class Place(NamedTuple):
    """Place of a C-contiguous array in the shared heap."""

    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: Any  # see `dtype_spec`


def place_of(heap: native.Heap, array: np.ndarray) -> Place | None:
    """Return the place of an array; ``None`` if it is not in memory that ranks share, or not C-contiguous."""
    offset = heap.offset(array) if array.flags.c_contiguous else None
    return None if offset is None else Place(offset, array.shape, dtype_spec(array.dtype))


def array_at(heap: native.Heap, place: Place) -> np.ndarray:
    """Return a read-only view of the array at a place."""
    return np.ndarray(place.shape, place.dtype, memoryview(heap).toreadonly(), place.offset)


def copy_to_heap(array: np.ndarray) -> np.ndarray:
    """Return a C-contiguous copy, in the heap of the running call if it has memory, also of a small array."""
    memory = np.empty(max(array.nbytes, native.SMALLEST_BLOCK), np.uint8)
    copy = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def copy_around(to: np.ndarray, array: np.ndarray, own: Rows) -> None:
    """Copy all rows of an array except for ``own``."""
    to[: own.start] = array[: own.start]
    to[own.stop :] = array[own.stop :]


class Arena:
    """Scratch segment that one rank fills again for each command, and that grows as needed.

    Parameters
    ----------
    table : SegmentTable
        Segments of this rank.
    announce, retire : callable
        ``announce(segment)`` is called with each new segment, and ``retire(key)`` when the segment is freed.

    Attributes
    ----------
    ref : SegmentRef or None
        Reference to the segment, which another rank must map before it can read the arrays in it. ``None`` before the
        first `reserve`, and after `free`.
    """

    def __init__(self, table: SegmentTable, announce: Callable[[Segment], None], retire: Callable[[str], None]) -> None:
        self._table = table
        self._announce = announce
        self._retire = retire
        self._segment: Segment | None = None
        self._used = 0

    @property
    def ref(self) -> SegmentRef | None:
        return self._segment.ref if self._segment is not None else None

    def reserve(self, n_bytes: int) -> None:
        """Discard all arrays in the arena, and make room for ``n_bytes`` (the sum of `aligned` sizes)."""
        self._used = 0
        if self._segment is None or self._segment.ref.size < n_bytes:
            self.free()
            segment = Segment.create(max(n_bytes, 64 * 1024))
            with deferred_interrupts():
                self._announce(segment)
                self._table.add(segment.ref.key, segment.bytes)
                self._segment = segment

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[ArrayRef, np.ndarray]:
        """Allocate an uninitialized array in the arena; return its reference, and a view of it to fill.

        Raises
        ------
        TypeError
            If the dtype holds Python objects.
        """
        assert self._segment is not None
        if dtype.hasobject:  # elements are addresses, which are invalid in other processes
            raise TypeError(f"dtype {dtype} holds Python objects; expected numbers or bytes, which ranks can share")
        view = self._segment.array(shape, dtype, self._used)
        ref = ArrayRef(self._segment.ref.key, self._used, shape, dtype_spec(dtype))
        self._used += aligned(view.nbytes)
        return ref, view

    def place(self, array: np.ndarray) -> ArrayRef:
        """Copy an array into the arena; return its reference."""
        ref, view = self.empty(array.shape, array.dtype)
        view[...] = array
        return ref

    def place_around(self, array: np.ndarray, own: Rows) -> ArrayRef:
        """Copy an array into the arena, except for its rows ``own``; return its reference."""
        ref, view = self.empty(array.shape, array.dtype)
        copy_around(view, array, own)
        return ref

    def place_rows(self, array: np.ndarray, rows: np.ndarray) -> ArrayRef:
        """Copy the rows with the indices ``rows`` (not negative) into the arena; return the reference of the copy."""
        ref, view = self.empty((len(rows), *array.shape[1:]), array.dtype)
        np.take(array, rows, axis=0, out=view, mode="clip")  # mode="raise" would copy twice
        return ref

    def free(self) -> None:
        """Free the segment in this process; ``retire`` lets the other ranks release their mappings."""
        if self._segment is not None:
            with deferred_interrupts():
                key = self._segment.ref.key
                self._segment = None
                self._table.release(key)
                self._retire(key)

    def abandon(self) -> None:
        """Drop a segment that this process inherited by a fork; its mapping is released like any other."""
        if self._segment is not None:
            self._segment.abandon()
            self._segment = None
