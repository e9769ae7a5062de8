"""Messages between processes: mailboxes in shared memory, and channels that send segments as file descriptors.

The kernel passes a segment's descriptor over a pair of sockets (``SCM_RIGHTS``). So a segment needs no name. Opening it
through ``/proc`` instead would require the permission to inspect another process, which the kernel refuses after
``setuid`` and for undumpable processes.
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

_MAILBOX_BYTES = 64 * 1024


_HEADER_BYTES = 24


class Mailbox:
    """Mailbox in shared memory for one message of any length.

    A short message is stored inline, a long one in a segment of its own. Messages are numbered: if `put` gets the same
    bytes object as the last time, it writes nothing, and `get` returns the message that it has read already.

    Attributes
    ----------
    is_long : bool
        Whether the last message that this process read was stored in a segment of its own.
    """

    def __init__(self) -> None:
        segment = Segment.create(_MAILBOX_BYTES)
        segment.close_fd()
        self._bytes = segment.bytes.data
        self._header = segment.array((3,), np.int64).data  # the message's number, its length, and whether it is inline
        self._written: bytes | None = None  # last message written by this process, if it is inline
        self._read = (0, b"")  # number and bytes of the last inline message read by this process
        self._long: tuple[str, np.ndarray] | None = None  # key and mapping of the last long message
        self.is_long = False

    def put(self, message: bytes, give: Callable[[Segment], None]) -> None:
        """Write a message; ``give(segment)`` sends a segment to the processes that will read the message."""
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

    def get(self, channel: FdChannel) -> bytes:
        """Read the message; ``channel`` maps the segment if the message is long."""
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
                self._long = ref.key, channel.map(ref)
        self.is_long = True
        return self._long[1][:length].tobytes()


_MOST_BYTES_OF_A_KEY = 128


class FdChannel:
    """One end of a channel that sends segments to another process.

    A segment that is sent at one end can be mapped once at the other. Segments can be mapped in any order.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = OwnedSocket(end)
        self._arrived: dict[str, Descriptor] = {}  # received segments that are not mapped yet, by key

    @classmethod
    def pair(cls) -> tuple[FdChannel, FdChannel]:
        """Create a channel and return both ends. Call it before a fork; then each process closes the other's end."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def give(self, segment: Segment) -> None:
        """Send a segment to the other end, unless it was sent before; its descriptor may be closed afterwards.

        Raises
        ------
        SessionError
            If the program has closed the channel's or the segment's descriptor.
        """
        if self in segment.given_to:
            return
        try:
            descriptor = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fileno()]))
            with self._end.use() as end:
                end.sendmsg([segment.ref.key.encode()], [descriptor], socket.MSG_NOSIGNAL)
        except ConnectionError:  # the other process is dead; whoever waits for its reply reports that
            return
        segment.given_to.add(self)

    def map(self, ref: SegmentRef) -> np.ndarray:
        """Map a segment that was sent at the other end, as a uint8 array; if this fails, it can be called again.

        Raises
        ------
        MemoryError
            If the kernel refuses.
        OSError
            If this process has too many open files.
        SessionError
            If the program has closed the channel's or the segment's descriptor.
        """
        with deferred_interrupts():  # if an interrupt lost the descriptor, its memory would stay allocated
            if ref.key not in self._arrived:
                self._receive()
            content = map_shared(self._arrived[ref.key].fileno(), ref.size, ref.offset, ref.writable)
            self._arrived.pop(ref.key).close()
        return content

    def clear(self) -> None:
        """Discard received segments that were not mapped."""
        with deferred_interrupts():
            self._receive()
            self._arrived.clear()

    def close(self) -> None:
        """Close the descriptors of this process; the other end stays open."""
        with deferred_interrupts():
            self._end.close()
            self._arrived.clear()

    def _receive(self) -> None:
        with self._end.use() as end:
            while True:
                try:  # if this process may not open another file, the kernel discards the descriptor that arrives
                    os.close(os.dup(end.fileno()))
                except OSError as error:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
                try:
                    key, fds, _, _ = socket.recv_fds(end, _MOST_BYTES_OF_A_KEY, 1, socket.MSG_CMSG_CLOEXEC)
                except BlockingIOError:
                    return
                if not key:  # the other end is closed
                    return
                for fd in fds:  # after an interrupt, `give` may send a descriptor again; it replaces the first one
                    self._arrived[key.decode()] = Descriptor(fd)
