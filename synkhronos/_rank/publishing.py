"""How a worker hands results to the master: where they lie, if the master sees that, else copied to where it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._collectives import Workspace
from synkhronos._engine import is_device_array, read
from synkhronos._memory import aligned, dtype_spec
from synkhronos._native import native
from synkhronos._rank.messages import Arrays, Placed, Sent

__all__ = ["Publisher"]

_MOST_PLACES = 256


class Publisher:
    """One rank's way to hand out arrays, and the master's to read them.

    Parameters
    ----------
    workspace : Workspace
    regions : Regions
    rank : int
    by_message : bool
        Whether the master is on another machine, and sees none of this memory.
    """

    def __init__(self, workspace: Workspace, regions: native.Heap, rank: int, *, by_message: bool) -> None:
        self._by_message = by_message
        self._regions = regions
        self._memory = [workspace.outboxes.reshape(-1)]
        if regions.base is not None:
            self._memory.append(np.frombuffer(memoryview(regions), np.uint8))
        self._room = workspace.outboxes.shape[1]
        self._first = rank * self._room
        self._used = 0
        self._handed_out: list[Any] = []
        self._small: dict[tuple[int, tuple[int, ...], np.dtype], tuple[Placed, np.ndarray]] = {}
        self._read: dict[tuple[int, int], tuple[Arrays, list[np.ndarray | None]]] = {}  # the last ones

    def forget(self) -> None:
        """The next command has come: nobody reads any more what was handed out."""
        self._handed_out.clear()
        self._used = 0

    def publish(self, values: Sequence[Any]) -> Arrays:
        """Hand out arrays, which stay where they are until `forget`."""
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
        offset = self._regions.offset(array)
        if offset is None:
            array = array.copy()  # in this rank's region, if it has room
            offset = self._regions.offset(array)
        if offset is None:
            return Sent(array.tobytes(), array.shape, dtype_spec(array.dtype))
        self._handed_out.append(array)
        return Placed(1, offset, array.shape, dtype_spec(array.dtype))

    def _small_place(self, used: int, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Placed, np.ndarray]:
        """Where a small array goes, and a view of that; functions return the same shapes again and again."""
        key = used, shape, dtype
        if key not in self._small:
            if len(self._small) >= _MOST_PLACES:
                self._small.clear()
            placed = Placed(0, self._first + used, shape, dtype_spec(dtype))
            self._small[key] = placed, self._view(placed)
        return self._small[key]

    def _view(self, one: Placed | Sent) -> np.ndarray:
        if isinstance(one, Sent):
            return np.ndarray(one.shape, one.dtype, one.content)
        return np.ndarray(one.shape, one.dtype, self._memory[one.memory], one.offset)

    def read(self, place: tuple[int, int], arrays: Arrays) -> list[np.ndarray | None]:
        """What another rank has handed out in a part of its command: views that are good until its next command."""
        last, views = self._read.get(place, (None, []))
        if arrays is not last:
            views = [None if one is None else self._view(one) for one in arrays.values]
            self._read[place] = arrays, views
        return views
