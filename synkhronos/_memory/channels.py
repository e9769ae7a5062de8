"""A place for one message in shared memory.

The way by which memory that one process has made comes to another: its descriptor, over a pair of sockets.

The kernel passes the file itself (``SCM_RIGHTS``). So it needs no name, no ``/proc``, and no permission to look
into a process, which the kernel refuses after ``setuid``, or if a process was made undumpable.
"""

from __future__ import annotations

import array
import errno
import os
import pickle
import socket
from typing import Callable

import numpy as np

from synkhronos._memory.descriptors import Descriptor, OwnedSocket
from synkhronos._memory.segments import Segment, SegmentRef, map_shared
from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["Box", "Passage"]


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


_MOST_BYTES_OF_A_KEY = 128


class Passage:
    """One end of a pair. What is given at one end can be mapped at the other, once or never, in any order."""

    def __init__(self, end: socket.socket) -> None:
        self._end = OwnedSocket(end)
        self._arrived: dict[str, Descriptor] = {}  # what has come and was not mapped yet

    @classmethod
    def pair(cls) -> tuple[Passage, Passage]:
        """Both ends; they are made before a fork, and each process closes the one that is not its own."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def give(self, segment: Segment) -> None:
        """Let the other end have memory, unless it was given before; its descriptor may be closed afterwards.

        Raises
        ------
        SessionError
            If the program has closed a descriptor that this needs.
        """
        if self in segment.given_to:
            return
        try:
            descriptor = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fileno()]))
            with self._end.use() as end:
                end.sendmsg([segment.ref.key.encode()], [descriptor], socket.MSG_NOSIGNAL)
        except ConnectionError:  # the other process is dead, as whoever waits for it will see
            return
        segment.given_to.add(self)

    def map(self, ref: SegmentRef) -> np.ndarray:
        """Map what was given, as a uint8 array; what cannot be mapped can be tried again.

        Raises
        ------
        MemoryError
            If the kernel refuses.
        OSError
            If this process has too many open files.
        SessionError
            If the program has closed a descriptor that this needs.
        """
        with deferred_interrupts():  # a descriptor that is lost keeps its memory
            if ref.key not in self._arrived:
                self._receive()
            content = map_shared(self._arrived[ref.key].fileno(), ref.size, ref.offset, ref.writable)
            self._arrived.pop(ref.key).close()
        return content

    def clear(self) -> None:
        """Forget what has come and was not mapped."""
        with deferred_interrupts():
            self._receive()
            self._arrived.clear()

    def close(self) -> None:
        """Close the descriptors, in this process."""
        with deferred_interrupts():
            self._end.close()
            self._arrived.clear()

    def _receive(self) -> None:
        with self._end.use() as end:
            while True:
                try:  # what arrives in a process that may open no file more is lost
                    os.close(os.dup(end.fileno()))
                except OSError as error:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
                try:
                    key, fds, _, _ = socket.recv_fds(end, _MOST_BYTES_OF_A_KEY, 1, socket.MSG_CMSG_CLOEXEC)
                except BlockingIOError:
                    return
                if not key:  # the other end is closed
                    return
                for fd in fds:  # one that is given twice, because giving it was interrupted, replaces the first
                    self._arrived[key.decode()] = Descriptor(fd)
