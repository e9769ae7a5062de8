"""A place for one message in shared memory."""

from __future__ import annotations

import pickle
from typing import Callable

import numpy as np

from synkhronos._interrupts import deferred_interrupts
from synkhronos._memory.passage import Passage
from synkhronos._memory.segments import Segment, SegmentRef

__all__ = ["Box"]

_MAILBOX_BYTES = 64 * 1024


class Box:
    """A message of any length in shared memory: short ones inline, long ones in a segment of their own."""

    def __init__(self) -> None:
        segment = Segment.create(_MAILBOX_BYTES)
        segment.close_fd()
        self._bytes = segment.bytes.data
        self._lengths = segment.array((2,), np.int64)
        self._long: tuple[str, np.ndarray] | None = None  # the last long message that this process has read

    def put(self, message: bytes, give: Callable[[Segment], None]) -> None:
        """Write a message; ``give`` lets those who will read it have memory."""
        inline = len(message) <= _MAILBOX_BYTES - 16
        if not inline:
            overflow = Segment.create(len(message))
            overflow.bytes.data[: len(message)] = message
            give(overflow)
            overflow.close_fd()
            message = pickle.dumps((overflow.ref, len(message)))
        self._bytes[16 : 16 + len(message)] = message
        self._lengths[:] = (len(message), inline)

    def get(self, passage: Passage) -> bytes:
        """The message that was written."""
        length, inline = self._lengths.tolist()
        message = bytes(self._bytes[16 : 16 + length])
        if inline:
            self._long = None
            return message
        ref, length = pickle.loads(message)
        assert isinstance(ref, SegmentRef)
        if self._long is None or self._long[0] != ref.key:
            with deferred_interrupts():
                self._long = ref.key, passage.map(ref)
        return self._long[1][:length].tobytes()
