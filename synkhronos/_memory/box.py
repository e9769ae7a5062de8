"""A place for one message in shared memory."""

from __future__ import annotations

import pickle

import numpy as np

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
        self._overflow: Segment | None = None

    def put(self, message: bytes) -> None:
        if self._overflow is not None:
            self._overflow.close_fd()
            self._overflow = None
        inline = len(message) <= _MAILBOX_BYTES - 16
        if not inline:
            self._overflow = Segment.create(len(message))
            self._overflow.bytes.data[: len(message)] = message
            message = pickle.dumps((self._overflow.ref, len(message)))
        self._bytes[16 : 16 + len(message)] = message
        self._lengths[:] = (len(message), inline)

    def get(self) -> bytes:
        length, inline = self._lengths.tolist()
        message = bytes(self._bytes[16 : 16 + length])
        if not inline:
            ref, length = pickle.loads(message)
            assert isinstance(ref, SegmentRef)
            return Segment.attach(ref).bytes[:length].tobytes()
        return message
