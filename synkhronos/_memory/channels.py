"""Messages and locks of processes: mailboxes and boards in shared memory, channels of descriptors, robust mutexes.

The kernel passes a segment's descriptor over a pair of sockets (``SCM_RIGHTS``). So a segment needs no name. Opening it
through ``/proc`` instead would require the permission to inspect another process, which the kernel refuses after
``setuid`` and for undumpable processes.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import pickle
import socket
import time
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np

from synkhronos._memory.descriptors import Descriptor, OwnedSocket
from synkhronos._memory.segments import Segment, SegmentRef, aligned, map_shared
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


# -- locks

_libc = ctypes.CDLL(None)
_SHARED = 1  # PTHREAD_PROCESS_SHARED
_ROBUST = 1  # PTHREAD_MUTEX_ROBUST
_ATTRIBUTE_BYTES = 16  # more than a pthread_mutexattr_t has
_POLL = 0.05  # seconds between two checks that the wait still makes sense
#: Clock of the function that waits for a lock. Old C libraries have only that for the clock that can be set.
_CLOCK = time.CLOCK_MONOTONIC if hasattr(_libc, "pthread_mutex_clocklock") else time.CLOCK_REALTIME

#: Bytes for one lock: a cache line, which is more than a pthread_mutex_t has.
LOCK_BYTES = 64


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class SharedLocks:
    """Locks of several processes, in memory that they share.

    If the owner of a lock dies, the kernel releases it, and the next process that acquires it becomes the owner. What
    the lock protects may then be half changed.

    Parameters
    ----------
    memory : uint8 array of shape (n, LOCK_BYTES)
        Shared memory, aligned to a cache line.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._first = memory.__array_interface__["data"][0]

    @classmethod
    def create(cls, memory: np.ndarray) -> SharedLocks:
        """Make free locks, in memory that no process uses yet."""
        locks = cls(memory)
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        for index in range(len(memory)):
            _check(_libc.pthread_mutex_init(locks._address(index), attributes))
        _check(_libc.pthread_mutexattr_destroy(attributes))
        return locks

    def _address(self, index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._first + index * LOCK_BYTES)

    @contextlib.contextmanager
    def hold(self, index: int, check: Callable[[], None]) -> Iterator[None]:
        """Acquire a lock, and release it at the end of the block. Signal handlers are deferred until then.

        Parameters
        ----------
        index : int
        check : callable
            Called while this process waits; it raises if the wait must end.
        """
        lock = self._address(index)
        with deferred_interrupts():
            code = _libc.pthread_mutex_trylock(lock)
            while code in (errno.EBUSY, errno.ETIMEDOUT):
                check()
                seconds, rest = divmod(time.clock_gettime(_CLOCK) + _POLL, 1)
                code = _wait_for(lock, ctypes.byref(_Timespec(int(seconds), int(rest * 1e9))))
            if code == errno.EOWNERDEAD:
                code = _libc.pthread_mutex_consistent(lock)
            _check(code)
            try:
                yield
            finally:
                _check(_libc.pthread_mutex_unlock(lock))


def _wait_for(lock: ctypes.c_void_p, until: Any) -> int:
    """Wait for a lock until a time of `_CLOCK`, and return the code."""
    if _CLOCK == time.CLOCK_MONOTONIC:
        return int(_libc.pthread_mutex_clocklock(lock, _CLOCK, until))
    return int(_libc.pthread_mutex_timedlock(lock, until))


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


# -- exchanges of a training loop

_PART = 1 << 16  # elements of a centre that one lock protects


class Board:
    """Memory of a node in which ranks exchange parameters without waiting for each other.

    Parameters
    ----------
    memory : uint8 array
        Shared memory of `n_bytes` bytes.
    engine : str
        ``"centre"`` or ``"gossip"``.
    n_ranks : int
    size : int
        Number of parameters.
    dtype : dtype
        Their dtype.

    Attributes
    ----------
    locks : SharedLocks
        Lock 0 protects the counters. The others protect one part of the centre each, or one rank's mailboxes.
    counters : int64 array of shape (3,)
        Number of batches that ranks have taken in a command, number of exchanges, and number of the command.
    parts : list of slice
        Parts of the centre.
    centre : array of shape (size,)
    is_full : int64 array of shape (n_ranks, n_ranks)
        Whether there is a message for a rank (first axis) from another.
    weights : float64 array of shape (n_ranks, n_ranks)
    messages : array of shape (n_ranks, n_ranks, size)
    """

    def __init__(self, memory: np.ndarray, engine: str, n_ranks: int, size: int, dtype: np.dtype) -> None:
        used = 0

        def take(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            nonlocal used
            start, used = used, used + aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            return memory[start:used][: int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

        self.parts = [slice(start, min(start + _PART, size)) for start in range(0, size, _PART)]
        n_locks = 1 + (len(self.parts) if engine == "centre" else n_ranks)
        self.lock_memory = take((n_locks, LOCK_BYTES), np.uint8)
        self.locks = SharedLocks(self.lock_memory)
        self.counters = take((3,), np.int64)
        if engine == "centre":
            self.centre = take((size,), dtype)
        else:
            self.is_full = take((n_ranks, n_ranks), np.int64)
            self.weights = take((n_ranks, n_ranks), np.float64)
            self.messages = take((n_ranks, n_ranks, size), dtype)

    def take_batch(self, command: int, check: Callable[[], None]) -> int:
        """Take a batch of a command, and return the number of batches of it that ranks have taken before."""
        with self.locks.hold(0, check):
            if self.counters[2] != command:  # it has just begun
                self.counters[0], self.counters[2] = 0, command
            number = int(self.counters[0])
            self.counters[0] = number + 1
        return number

    def count_exchange(self, check: Callable[[], None]) -> int:
        """Increment the number of exchanges, and return its value before."""
        with self.locks.hold(0, check):
            number = int(self.counters[1])
            self.counters[1] = number + 1
        return number

    def create(self, x: np.ndarray) -> None:
        """Initialize the memory, which is all zero: make the locks, and set the centre to the parameters."""
        SharedLocks.create(self.lock_memory)
        if hasattr(self, "centre"):
            self.centre[:] = x

    @staticmethod
    def n_bytes(engine: str, n_ranks: int, size: int, dtype: np.dtype) -> int:
        """Return the bytes that a board needs."""
        n_parts = -(-size // _PART)
        arrays = [LOCK_BYTES * (1 + (n_parts if engine == "centre" else n_ranks)), 24]
        n_vectors = 1 if engine == "centre" else n_ranks * n_ranks
        arrays += [] if engine == "centre" else [8 * n_vectors] * 2
        return sum(map(aligned, [*arrays, n_vectors * size * np.dtype(dtype).itemsize]))
