"""File descriptors owned by the library, verified before each use.

A program may close descriptors that it did not open (`os.closerange`, as daemons do), or replace their files
(`os.dup2`). So each descriptor that outlives the call that opened it belongs to a `Descriptor` or an `OwnedSocket`.
These record the device and the inode of the file, and compare them before they use or close the descriptor. The
comparison and the use are two system calls: if another thread replaces the file in between, this is not detected.

Descriptors never have the numbers of the standard streams, 0 to 2.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

from synkhronos._native import native
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos.errors import SessionError

_FIRST = 3  # after standard input, output and error

_CLOSED_BY_PROGRAM = (
    "the program closed file descriptors that synkhronos needs for this call (os.closerange or os.dup2, as daemons use "
    "them); call synkhronos.close(), then synkhronos.fork() again, and close only descriptors that the program opened"
)


def clear_of_streams(fd: int) -> int:
    """Duplicate a descriptor if its number is that of a standard stream; return the new descriptor.

    If a program was started without these streams, or has closed them, the kernel assigns their numbers to other files.
    Text that a library prints would then be written to these files. The original descriptor is closed.
    """
    if fd >= _FIRST:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(fd)


class Descriptor(native.Descriptor):
    """Owner of a file descriptor, which closes it on deletion unless the number belongs to another file by then.

    Parameters
    ----------
    fd : int
    """

    __slots__ = ()

    def __new__(cls, fd: int) -> Descriptor:
        """Take ownership of a descriptor; duplicate it if its number is that of a standard stream."""
        return super().__new__(cls, clear_of_streams(fd))

    def fileno(self) -> int:
        """Return the descriptor.

        Raises
        ------
        SessionError
            If the program has closed it.
        ValueError
            If `close` was called.
        """
        fd = self.find()
        if fd < 0:
            raise SessionError(_CLOSED_BY_PROGRAM)
        return fd


class OwnedSocket:
    """Non-blocking socket whose descriptor is verified before each use.

    Parameters
    ----------
    end : socket.socket
        The socket. Its descriptor is detached, and belongs to this object afterwards.
    """

    def __init__(self, end: socket.socket) -> None:
        self._kind = end.family, end.type, end.proto
        self._descriptor = Descriptor(end.detach())

    @contextlib.contextmanager
    def use(self) -> Iterator[socket.socket]:
        """Return a context manager that provides the socket and defers signals.

        Raises
        ------
        SessionError
            If the program has closed it.
        """
        with deferred_interrupts():  # if an interrupt dropped the socket object, it would close the descriptor
            one = socket.socket(*self._kind, self._descriptor.fileno())
            try:
                one.setblocking(False)
                yield one
            finally:
                one.detach()

    def fileno(self) -> int:
        """Return the descriptor; see `Descriptor.fileno`."""
        return self._descriptor.fileno()

    def close(self) -> None:
        """Close the socket, unless another file has its number."""
        self._descriptor.close()
