"""File descriptors owned by the library, verified before each use, and anonymous files in memory.

A program may close descriptors that it did not open (`os.closerange`, as daemons do), or replace their files
(`os.dup2`). So each descriptor that outlives the call that opened it belongs to a `Descriptor` or an `OwnedSocket`.
These record the device and the inode of the file, and compare them before they use or close the descriptor. The
comparison and the use are two system calls: if another thread replaces the file in between, this is not detected.

Descriptors never have the numbers of the standard streams, 0 to 2.

An anonymous file, whose pages are reserved before use, exists as long as a descriptor or a mapping of it. It is created
by `memfd_create(2)`. Where the kernel does not offer this, or a sandbox refuses it, `posix_ipc` creates a shared memory
object in ``/dev/shm``, which is unlinked at once. If a process is killed between these two calls, its object is left;
`remove_stale` removes it later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import resource
import secrets
import socket
import time
from collections.abc import Iterator

import posix_ipc

from synkhronos._native import native
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.resources import free_memory
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


# -- anonymous files

_FOLDER = "/dev/shm"
_OURS = re.compile(r"synkhronos-\d+-[0-9a-f]{32}")
_STALE_SECONDS = 60
_CLOEXEC, _NOEXEC_SEAL = 1, 8
_PIECE = 8 * 1024 * 1024  # bytes per call of posix_fallocate, which starts over after a signal
_SMALL = 1024 * 1024  # smaller requests are not checked against the free memory
_BLOCK = 1024 * 1024  # bytes of zeros per write, where posix_fallocate is refused
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)

_libc = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "malloc_trim"):
    _libc.malloc_trim.argtypes = (ctypes.c_size_t,)
if hasattr(_libc, "memfd_create"):  # `os.memfd_create` is not in every build of Python
    _libc.memfd_create.argtypes = (ctypes.c_char_p, ctypes.c_uint)


def anonymous_file(size: int, reserved: bool = True) -> Descriptor:
    """Create an anonymous file in memory, of mode 0600 and ``size`` bytes, all of them zero.

    Parameters
    ----------
    size : int
    reserved : bool
        Whether to reserve its pages. If false, call `reserve` before using a part of it.

    Raises
    ------
    MemoryError
        If too little memory is free, or a limit of this process forbids the file.
    """
    if reserved:
        check_room(size)
    with deferred_interrupts():
        file = Descriptor(new_descriptor())
    try:
        if reserved:
            reserve(file.fileno(), 0, size, size)
        else:
            os.ftruncate(file.fileno(), size)
    except BaseException as error:
        file.close()
        if isinstance(error, OSError) and not reserved:
            raise _refusal(error, size, "") from None
        raise
    return file


def reserve(fd: int, start: int, stop: int, size: int) -> None:
    """Reserve the pages of the bytes from ``start`` to ``stop`` (exclusive) of a file.

    Parameters
    ----------
    fd : int
    start, stop : int
        In bytes.
    size : int
        Number of bytes that the error message reports.

    Raises
    ------
    MemoryError
        If too little memory is free, or a limit of this process forbids it.
    """
    for begin in range(start, stop, _PIECE):
        _reserve(fd, begin, min(_PIECE, stop - begin), size)


def check_room(size: int) -> None:
    """Raise `MemoryError` if ``size`` bytes exceed the free memory of this node, or of this process's cgroup."""
    if size < _SMALL:
        return
    with deferred_interrupts():  # a signal handler may raise an exception of a type that `free_memory` catches
        limits = list(free_memory())
    for free, where in limits:
        if size > free:
            raise MemoryError(
                f"cannot allocate {size:,} bytes of shared memory: {free:,} bytes are free {where}. Free some Data "
                "(Data.free_memory), or share the data as a numpy.memmap of a file, which is read as it is needed."
            )


def new_descriptor() -> int:
    """Create an empty anonymous file in memory, of mode 0600; return its descriptor, which the caller must close.

    Raises
    ------
    MemoryError
        If the kernel refuses.
    """
    fd = clear_of_streams(_descriptor())
    os.fchmod(fd, 0o600)
    return fd


def _descriptor() -> int:
    if hasattr(_libc, "memfd_create"):
        for flags in (_CLOEXEC | _NOEXEC_SEAL, _CLOEXEC):  # kernels before Linux 6.3 do not have the seal
            fd: int = _libc.memfd_create(b"synkhronos", flags)
            if fd >= 0:
                return fd
        number = ctypes.get_errno()
        if number not in _REFUSED:
            raise MemoryError(f"cannot create shared memory: {os.strerror(number)}")
    try:
        name = f"/synkhronos-{os.getpid()}-{secrets.token_hex(16)}"  # unguessable; `remove_stale` recognizes it
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0)
        memory.unlink()
    except (OSError, posix_ipc.Error) as error:
        raise MemoryError(f"cannot create shared memory in {_FOLDER}: {error}") from error
    return int(memory.fd)


def _reserve(fd: int, start: int, n_bytes: int, size: int) -> None:
    """Reserve the pages of ``n_bytes`` bytes from byte ``start`` on; ``size`` is the number in the error message."""
    try:
        try:
            os.posix_fallocate(fd, start, n_bytes)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            zeros, done = bytes(min(n_bytes, _BLOCK)), 0
            while done < n_bytes:  # a sandbox that forbids `fallocate` still allows writing
                done += os.pwrite(fd, zeros[: n_bytes - done], start + done)
    except OSError as error:
        if error.errno not in (*_FULL, errno.EFBIG):
            raise
        room = os.fstatvfs(fd)
        where = f", {room.f_bavail * room.f_frsize:,} bytes free in {_FOLDER}" if room.f_blocks else ""
        raise _refusal(error, size, where) from None


def _refusal(error: OSError, size: int, where: str) -> MemoryError:
    """Return the error for a refused allocation; ``where`` is text that says how many bytes are free."""
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return MemoryError(
            f"cannot allocate {size:,} bytes of shared memory, which counts as a file: files of this process may have "
            f"{limit:,} bytes (ulimit -f)"
        )
    return MemoryError(
        f"cannot allocate {size:,} bytes of shared memory{where}. Free some Data (Data.free_memory), or share the data "
        "as a numpy.memmap of a file."
    )


def remove_stale(folder: str = _FOLDER) -> int:
    """Unlink shared memory objects that killed processes of this user left; return their number."""
    removed = 0
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if not _OURS.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > _STALE_SECONDS:
                    os.unlink(entry.path)
                    removed += 1
    return removed


def release_freed_memory() -> None:
    """Return memory to the system that this process has freed, and that the C library keeps for reuse."""
    if hasattr(_libc, "malloc_trim"):  # glibc
        _libc.malloc_trim(0)
