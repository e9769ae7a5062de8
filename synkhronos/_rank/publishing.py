"""How a worker hands results to the master: where they lie, if the master sees that, else copied to where it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _graphs
from synkhronos._collectives import Workspace
from synkhronos._core import native
from synkhronos._memory import aligned, dtype_spec
from synkhronos._rank.messages import Arrays, Placed, Sent

__all__ = ["Publisher"]


class Publisher:
    """One rank's way to hand out arrays, and the master's to read them.

    Parameters
    ----------
    workspace : Workspace
    regions : Regions
    rank : int
    """

    def __init__(self, workspace: Workspace, regions: native.Regions, rank: int) -> None:
        self._regions = regions
        self._memory = [workspace.outboxes.reshape(-1)]
        if regions.base is not None:
            self._memory.append(np.frombuffer(memoryview(regions), np.uint8))
        self._room = workspace.outboxes.shape[1]
        self._first = rank * self._room
        self._used = 0
        self._handed_out: list[Any] = []

    def forget(self) -> None:
        """The next command has come: nobody reads any more what was handed out."""
        self._handed_out.clear()
        self._used = 0

    def publish(self, values: Sequence[Any]) -> Arrays:
        """Hand out arrays, which stay where they are until `forget`."""
        return Arrays([None if value is None else self._place(value) for value in values])

    def _place(self, value: Any) -> Placed | Sent:
        if _graphs.is_device_array(value):
            host = np.empty(value.shape, value.dtype)
            _graphs.read(value, host)
            value = host
        array = np.asarray(value, order="C")
        if array.nbytes <= self._room - self._used and array.nbytes < native.SMALLEST_BLOCK:
            placed = Placed(0, self._first + self._used, array.shape, dtype_spec(array.dtype))
            self._used += aligned(array.nbytes)
            self._view(placed)[...] = array
            return placed
        offset = self._regions.offset(array)
        if offset is None:
            array = array.copy()  # in this rank's region, if it has room
            offset = self._regions.offset(array)
        if offset is None:
            return Sent(array.tobytes(), array.shape, dtype_spec(array.dtype))
        self._handed_out.append(array)
        return Placed(1, offset, array.shape, dtype_spec(array.dtype))

    def _view(self, one: Placed | Sent) -> np.ndarray:
        if isinstance(one, Sent):
            return np.ndarray(one.shape, one.dtype, one.content)
        return np.ndarray(one.shape, one.dtype, self._memory[one.memory], one.offset)

    def read(self, arrays: Arrays) -> list[np.ndarray | None]:
        """What another rank has handed out: views that are good until its next command."""
        return [None if one is None else self._view(one) for one in arrays.values]
