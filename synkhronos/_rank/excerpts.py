"""Rows of arrays in shared memory, excerpted by each rank for itself."""

from __future__ import annotations

import numpy as np

from synkhronos._memory import ArrayRef, SegmentTable
from synkhronos._partition import Rows, Selection
from synkhronos._rank.commands import RowsRef, Source

__all__ = ["Excerpts"]


class Excerpts:
    """Takes one rank's rows; those picked one by one go to buffers that are used again.

    Parameters
    ----------
    segments : SegmentTable
    keeps_views : bool
        Whether views may be kept from call to call. Not on the master, where memory is the program's until nobody has a
        view of it any more.
    """

    def __init__(self, segments: SegmentTable, *, keeps_views: bool) -> None:
        self._segments = segments
        self._keeps_views = keeps_views
        self._views: dict[tuple[int, int], tuple[Source, Rows, np.ndarray]] = {}
        self._buffers: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, rows: RowsRef) -> Selection:
        """A range, or the index array that lies in shared memory."""
        return rows if isinstance(rows, Rows) else self._segments.view(rows)

    def view(self, source: Source, part: Rows, key: tuple[int, int]) -> np.ndarray:
        """As `take`; views are kept for calls that repeat, until memory is released."""
        last = self._views.get(key)
        if last is not None and last[0] is source and last[1] is part:
            return last[2]
        view = self.take(source, part, key)
        if self._keeps_views and not isinstance(source.rows, ArrayRef):
            self._views[key] = source, part, view
        return view

    def take(self, source: Source, part: Rows, key: tuple[int, int] | None = None) -> np.ndarray:
        """Rows ``part`` of what ``source`` selects: a view where they are contiguous, else copied.

        With a ``key`` (function, input) the copy goes to a buffer that the next excerpt of that key overwrites.
        """
        data = self._segments.view(source.array)
        chosen = source.rows
        if chosen is None:
            return data
        if isinstance(chosen, Rows):
            return data[(slice(None),) * source.axis + (slice(chosen.start + part.start, chosen.start + part.stop),)]
        rows = self._segments.view(chosen)[part.start : part.stop]
        if key is None or source.axis:
            return data.take(rows, axis=source.axis, mode="clip")
        buffer = self._buffers.get(key)
        if (
            buffer is None
            or len(buffer) < len(rows)
            or buffer.shape[1:] != data.shape[1:]
            or buffer.dtype != data.dtype
        ):
            buffer = self._buffers[key] = np.empty((len(rows), *data.shape[1:]), data.dtype)
        # the indexes were checked by the master; mode="raise" would make take() copy twice
        return np.take(data, rows, axis=0, out=buffer[: len(rows)], mode="clip")

    def forget(self, function: int) -> None:
        """Give back the buffers of a function."""
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] != function}

    def forget_views(self) -> None:
        """Memory, or a function, is dropped."""
        self._views.clear()
