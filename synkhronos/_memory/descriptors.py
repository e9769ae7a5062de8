"""File descriptors that the library owns: kept off the standard streams, and compared before they are used or closed.

A program may close descriptors that it did not open (`os.closerange`, as daemons do), or put other files in their
places (`os.dup2`). A descriptor that outlives the call that opened it therefore belongs to a `Descriptor` or an
`OwnedSocket`, which know the device and the inode of its file. The comparison and the use are two system calls: a
thread of the program that replaces the file between them is not detected.
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
    """Return a descriptor of the same file whose number is not that of a standard stream.

    In a program that was started without these streams, or has closed them, the kernel assigns their numbers to other
    files, and text that a library prints would be written to those.
    """
    if fd >= _FIRST:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(fd)


class Descriptor(native.Descriptor):
    """Owner of a file descriptor; closes it when it is deleted, unless the number belongs to another file by then.

    Parameters
    ----------
    fd : int
    """

    __slots__ = ()

    def __new__(cls, fd: int) -> Descriptor:
        """Own a descriptor; its number changes if it is that of a standard stream."""
        return super().__new__(cls, clear_of_streams(fd))

    def fileno(self) -> int:
        """Return the descriptor.

        Raises
        ------
        SessionError
            If the program has closed it.
        ValueError
            If its owner has closed it.
        """
        fd = self.find()
        if fd < 0:
            raise SessionError(_CLOSED_BY_PROGRAM)
        return fd


class OwnedSocket:
    """Socket whose descriptor is compared before each use; it never blocks.

    Parameters
    ----------
    end : socket.socket
        Its descriptor is detached and owned by this object.
    """

    def __init__(self, end: socket.socket) -> None:
        self._kind = end.family, end.type, end.proto
        self._descriptor = Descriptor(end.detach())

    @contextlib.contextmanager
    def use(self) -> Iterator[socket.socket]:
        """Provide the socket for one block, in which signals are deferred.

        Raises
        ------
        SessionError
            If the program has closed it.
        """
        with deferred_interrupts():  # a socket object that an interrupt drops would close the descriptor
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
