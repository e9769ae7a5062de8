"""A place for one message in shared memory."""

from __future__ import annotations

import pickle
from typing import Callable

import numpy as np

from synkhronos._memory.passage import Passage
from synkhronos._memory.segments import Segment, SegmentRef
from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["Box"]

_MAILBOX_BYTES = 64 * 1024


_HEADER_BYTES = 24


class Box:
    """A message of any length in shared memory: short ones inline, long ones in a segment of their own.

    Messages are numbered: one that is the one before is neither written nor read again.

    Attributes
    ----------
    is_long : bool
        Whether the message that this process has read last was in a segment of its own.
    """

    def __init__(self) -> None:
        segment = Segment.create(_MAILBOX_BYTES)
        segment.close_fd()
        self._bytes = segment.bytes.data
        self._header = segment.array((3,), np.int64).data  # number and length of the message, and whether it is inline
        self._written: bytes | None = None  # what this process has written, if it is there, inline
        self._read = (0, b"")  # the last message that this process has read, with its number
        self._long: tuple[str, np.ndarray] | None = None  # if that was a long one
        self.is_long = False

    def put(self, message: bytes, give: Callable[[Segment], None]) -> None:
        """Write a message; ``give`` lets those who will read it have memory."""
        if message is self._written:
            return
        self._written = None
        header, inline = self._header, len(message) <= _MAILBOX_BYTES - _HEADER_BYTES
        if not inline:
            overflow = Segment.create(len(message))
            overflow.bytes.data[: len(message)] = message
            give(overflow)
            overflow.close_fd()
            message = pickle.dumps((overflow.ref, len(message)))
        self._bytes[_HEADER_BYTES : _HEADER_BYTES + len(message)] = message
        header[0], header[1], header[2] = header[0] + 1, len(message), inline
        if inline:
            self._written = message

    def get(self, passage: Passage) -> bytes:
        """The message that was written."""
        number, length, inline = self._header
        if number == self._read[0]:
            return self._read[1]
        message = bytes(self._bytes[_HEADER_BYTES : _HEADER_BYTES + length])
        if inline:
            self._read, self._long, self.is_long = (number, message), None, False
            return message
        ref, length = pickle.loads(message)
        assert isinstance(ref, SegmentRef)
        if self._long is None or self._long[0] != ref.key:
            with deferred_interrupts():
                self._long = ref.key, passage.map(ref)
        self.is_long = True
        return self._long[1][:length].tobytes()
