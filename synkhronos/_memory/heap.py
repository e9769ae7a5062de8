"""Memory for what ranks compute: a region for each rank, which all of them map.

While a rank executes a command, NumPy allocates in the rank's region (`Regions.call`). With one rank alone, there is
nobody to share with: its region is private memory, which is used again all the same.

Scratch memory that the ranks share: filled anew for each command, growing when it has to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from typing import Callable

import numpy as np

from synkhronos._memory.memfd import new_descriptor
from synkhronos._memory.segments import ArrayRef, Segment, SegmentRef, SegmentTable, aligned, dtype_spec
from synkhronos._native import native
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.resources import free_memory

__all__ = ["Arena", "look_at_free_memory", "make_regions"]


_logger = logging.getLogger("synkhronos")

_UNIT = 2 * 1024 * 1024
_LEAST_BYTES = 64 * 1024 * 1024
_MOST_ADDRESSES = 1 << 45  # for all ranks together; a process has 2^47
_TIMES_MEMORY = 2  # freed blocks of sizes that are not wanted again may leave gaps

os.register_at_fork(before=native.before_fork, after_in_parent=native.after_fork)


def make_regions(n_ranks: int, rank: int) -> native.Heap:
    """Map regions as large as the memory is, as far as limits allow, and take the one of this rank.

    Where the kernel, or a limit, allows none, `Regions` are made that do nothing: memory is malloc's, as ever.
    """
    shared = n_ranks > 1
    with deferred_interrupts():  # handlers may raise errors like those that are caught there
        free = min(free for free, _ in free_memory())
        size, limit = _size(n_ranks, shared, free)
        try:
            if size < _LEAST_BYTES:
                raise OSError(limit)
            regions = _map(shared, n_ranks, rank, size, keep=free // (4 * n_ranks))
        except (OSError, MemoryError) as error:
            text = "what ranks compute cannot lie in memory of which all ranks map all (%s): calls may take longer"
            _logger.warning(text, error)
            return native.Heap(-1, n_ranks, rank, 0, 0)
        regions.allow(free // n_ranks)
    return regions


def look_at_free_memory(regions: native.Heap, n_ranks: int) -> None:
    """Let regions of so many ranks take what is free now."""
    with deferred_interrupts():
        regions.allow(min(free for free, _ in free_memory()) // n_ranks)


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
    """Bytes of each region, and what limits them."""
    sizes = {_TIMES_MEMORY * free: "memory is short", _MOST_ADDRESSES // n_ranks: "there are too many ranks"}
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
            f"files may have {of_file:,} bytes, and this counts as one: ulimit -f"
        )
    size = min(sizes)
    return size // _UNIT * _UNIT, sizes[size]


class Arena:
    """A segment that one rank fills anew for each command, and that grows when it has to.

    Parameters
    ----------
    table : SegmentTable
        This rank's.
    announce, retire : callable
        ``announce(segment)`` is called with each new one, ``retire(key)`` when it is given back.

    Attributes
    ----------
    ref : SegmentRef or None
        What another rank must map before it can see what was placed; ``None`` before the first `reserve`.
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
        """Forget what was placed, and make room for ``n_bytes`` (the sum of `aligned` sizes)."""
        self._used = 0
        if self._segment is None or self._segment.ref.size < n_bytes:
            self.free()
            segment = Segment.create(max(n_bytes, 64 * 1024))
            with deferred_interrupts():
                self._announce(segment)
                self._table.add(segment.ref.key, segment.bytes)
                self._segment = segment

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[ArrayRef, np.ndarray]:
        """Place an array with arbitrary contents; returns where it lies, and a view to fill."""
        assert self._segment is not None
        if dtype.hasobject:  # addresses in this process
            raise TypeError(f"an array of Python objects cannot be in memory that ranks share; got dtype {dtype}")
        view = self._segment.array(shape, dtype, self._used)
        ref = ArrayRef(self._segment.ref.key, self._used, shape, dtype_spec(dtype))
        self._used += aligned(view.nbytes)
        return ref, view

    def place(self, array: np.ndarray) -> ArrayRef:
        """Place a copy of an array."""
        ref, view = self.empty(array.shape, array.dtype)
        view[...] = array
        return ref

    def place_rows(self, array: np.ndarray, rows: np.ndarray) -> ArrayRef:
        """Place a copy of the rows of an array that have the given numbers."""
        ref, view = self.empty((len(rows), *array.shape[1:]), array.dtype)
        np.take(array, rows, axis=0, out=view, mode="clip")  # which, unlike "raise", copies but once
        return ref

    def free(self) -> None:
        """Give the memory back (each rank that mapped it releases its own mapping)."""
        if self._segment is not None:
            with deferred_interrupts():
                key = self._segment.ref.key
                self._segment = None
                self._table.release(key)
                self._retire(key)

    def abandon(self) -> None:
        """In a process that inherited it: let go of it, but for the mapping, which is released like any other."""
        if self._segment is not None:
            self._segment.abandon()
            self._segment = None
