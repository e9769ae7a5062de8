"""Scratch memory that the ranks share: filled anew for each command, growing when it has to."""

from __future__ import annotations

from typing import Callable

import numpy as np

from synkhronos._memory.segments import ArrayRef, Segment, SegmentRef, SegmentTable, aligned, dtype_spec
from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["Arena"]


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
