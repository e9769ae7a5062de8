"""Read a rank's rows of arrays in shared memory, and return a worker's results to the controller.

A small result is copied to the worker's outbox, which the controller maps. A large one stays in the shared heap, or is
copied there. If there is no room, or the controller is on another node, the bytes are sent with the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._backends import is_device_array, read
from synkhronos._collectives import Workspace
from synkhronos._memory import SegmentTable, aligned, dtype_spec
from synkhronos._native import native
from synkhronos._rank.commands import RowsRef, Source
from synkhronos._rank.messages import Arrays, Placed, Sent
from synkhronos._utils import KeyedCache
from synkhronos._utils.rows import Rows, Selection


class RowViews:
    """Select one rank's rows of arrays; rows picked by index are copied to buffers, which are reused.

    Views are not cached, because the controller cannot reuse memory while a view of it exists.

    Parameters
    ----------
    segments : SegmentTable
    """

    def __init__(self, segments: SegmentTable) -> None:
        self._segments = segments
        self._buffers: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, rows: RowsRef) -> Selection:
        """Return a range itself, or an index array as a view of shared memory."""
        return rows if isinstance(rows, Rows) else self._segments.view(rows)

    def take(self, source: Source, part: Rows, key: tuple[int, int] | None = None, first: int = 0) -> np.ndarray:
        """Return rows ``part`` of the rows that ``source`` selects: a view of a range, a copy of rows picked by index.

        Parameters
        ----------
        source : Source
        part : Rows
            Positions in the selected rows.
        key : tuple of (function, input), optional
            Copy to the buffer of this key, which the next copy of the same key overwrites.
        first : int
            Offset that is added to a range's start.

        Returns
        -------
        array
            The full array where the source selects no rows.
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
        # the controller has checked the indices; with mode="raise", take() would copy twice
        return np.take(data, rows, axis=0, out=buffer[: len(rows)], mode="clip")

    def forget(self, function: int) -> None:
        """Free the buffers of a function."""
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] != function}


_MOST_PLACES = 256


class ResultPublisher:
    """Publish one rank's arrays; read those of other ranks on the controller.

    Parameters
    ----------
    workspace : Workspace
    heap : Heap
        The shared heap.
    rank : int
        This rank on its node.
    by_message : bool
        Whether the controller is on another node and maps none of this memory.
    """

    def __init__(self, workspace: Workspace, heap: native.Heap, rank: int, *, by_message: bool) -> None:
        self._by_message = by_message
        self._heap = heap
        self._memory = [workspace.outboxes.reshape(-1)]
        if heap.base is not None:
            self._memory.append(np.frombuffer(memoryview(heap).toreadonly(), np.uint8))
        self._room = workspace.outboxes.shape[1]
        self._first = rank * self._room
        self._used = 0
        self._handed_out: list[Any] = []
        self._small: KeyedCache[tuple[Placed, np.ndarray]] = KeyedCache(_MOST_PLACES)
        self._read: KeyedCache[list[np.ndarray | None]] = KeyedCache()

    def forget(self) -> None:
        """Release the published arrays: the next command has come, so the controller does not read them any more."""
        self._handed_out.clear()
        self._used = 0

    def publish(self, values: Sequence[Any]) -> Arrays:
        """Publish arrays, which stay where they are until `forget`."""
        return Arrays([None if value is None else self._place(value) for value in values])

    def _place(self, value: Any) -> Placed | Sent:
        if is_device_array(value):
            host = np.empty(value.shape, value.dtype)
            read(value, host)
            value = host
        array = np.asarray(value, order="C")
        if self._by_message:
            return Sent(array.tobytes(), array.shape, dtype_spec(array.dtype))
        if array.nbytes <= self._room - self._used and array.nbytes < native.SMALLEST_BLOCK:
            placed, view = self._small_place(self._used, array.shape, array.dtype)
            self._used += aligned(array.nbytes)
            view[...] = array
            return placed
        offset = self._heap.offset(array)
        if offset is None:
            array = array.copy()  # in the shared heap, if it has room
            offset = self._heap.offset(array)
        if offset is None:
            return Sent(array.tobytes(), array.shape, dtype_spec(array.dtype))
        self._handed_out.append(array)
        return Placed(1, offset, array.shape, dtype_spec(array.dtype))

    def _small_place(self, used: int, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Placed, np.ndarray]:
        """Return the place of a small array and a view of it, cached because shapes repeat from call to call."""
        found = self._small.get((used, shape), dtype)
        if found is None:
            placed = Placed(0, self._first + used, shape, dtype_spec(dtype))
            found = self._small.put((used, shape), dtype, (placed, self._view(placed)))
        return found

    def _view(self, one: Placed | Sent) -> np.ndarray:
        if isinstance(one, Sent):
            return np.ndarray(one.shape, one.dtype, one.content)
        return np.ndarray(one.shape, one.dtype, self._memory[one.memory], one.offset)

    def read(self, place: tuple[int, int], arrays: Arrays) -> list[np.ndarray | None]:
        """Return the arrays that another rank has published, as views that are valid until its next command.

        Parameters
        ----------
        place : tuple of int
            Identifies the rank and the part of its command; the last views are cached by it.
        arrays : Arrays
            The rank's reply.
        """
        views = self._read.get(place, arrays)
        if views is None:
            views = [None if one is None else self._view(one) for one in arrays.values]
            self._read.put(place, arrays, views)
        return views
