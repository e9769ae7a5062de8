"""Rows of arrays in shared memory, excerpted by each rank for itself."""

from __future__ import annotations

import numpy as np

from synkhronos._memory import SegmentTable
from synkhronos._rank.commands import RowsRef, Source
from synkhronos._utils.rows import Rows, Selection

__all__ = ["Excerpts"]


class Excerpts:
    """Takes one rank's rows; those picked one by one go to buffers that are used again.

    No view is kept: the master's memory is the program's until nobody has a view of it any more.

    Parameters
    ----------
    segments : SegmentTable
    """

    def __init__(self, segments: SegmentTable) -> None:
        self._segments = segments
        self._buffers: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, rows: RowsRef) -> Selection:
        """A range, or the index array that lies in shared memory."""
        return rows if isinstance(rows, Rows) else self._segments.view(rows)

    def take(self, source: Source, part: Rows, key: tuple[int, int] | None = None, first: int = 0) -> np.ndarray:
        """Rows ``part`` of what ``source`` selects: a view where they are contiguous, else copied.

        A range begins ``first`` rows further on than ``source`` says. With a ``key`` (function, input) the copy goes to
        a buffer that the next excerpt of that key overwrites.
        """
        array, chosen, axis = source
        data = self._segments.view(array)
        if chosen is None:
            return data
        if isinstance(chosen, Rows):
            first += chosen[0]
            places = slice(first + part[0], first + part[1])
            return data[(slice(None),) * axis + (places,)] if axis else data[places]
        rows = self._segments.view(chosen)[part.start : part.stop]
        if key is None or axis:
            return data.take(rows, axis=axis, mode="clip")
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
