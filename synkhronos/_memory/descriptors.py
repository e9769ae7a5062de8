"""File descriptors of our own, kept clear of those that other code writes to."""

from __future__ import annotations

import fcntl
import os

__all__ = ["clear_of_streams"]

_FIRST = 3  # after standard input, output and error


def clear_of_streams(fd: int) -> int:
    """The same file under a number that is no standard stream's.

    In a program that was started without these streams, or has closed them, the kernel gives their numbers away; and
    what a library then prints would be written into memory, or into a pipe that ends workers.
    """
    if fd >= _FIRST:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(fd)
