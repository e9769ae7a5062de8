"""Anonymous files in memory, whose pages are reserved before use. They exist as long as a descriptor or a mapping does.

`memfd_create(2)` makes them. Where the kernel does not offer it, or a sandbox refuses it, `posix_ipc` makes an object
in ``/dev/shm``, which the next system call unlinks; `remove_stale` removes objects of processes that were killed
between the two calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import secrets
import time

import posix_ipc

from synkhronos._memory.descriptors import Descriptor, clear_of_streams
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.resources import free_memory

_FOLDER = "/dev/shm"
_OURS = re.compile(r"synkhronos-\d+-[0-9a-f]{32}")
_STALE_SECONDS = 60
_CLOEXEC, _NOEXEC_SEAL = 1, 8
_PIECE = 8 * 1024 * 1024  # bytes of one call: after a signal, the kernel starts the call again
_SMALL = 1024 * 1024  # smaller requests are not checked, like other allocations of a program
_BLOCK = 1024 * 1024
_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)

_libc = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "memfd_create"):  # `os.memfd_create` is not in every build of Python
    _libc.memfd_create.argtypes = (ctypes.c_char_p, ctypes.c_uint)


def anonymous_file(size: int) -> Descriptor:
    """Make an unnamed file in memory, of mode 0600, with ``size`` zeros; its pages are reserved.

    Raises
    ------
    MemoryError
        If there is no room, or a limit of this process forbids it.
    """
    check_room(size)
    with deferred_interrupts():
        file = Descriptor(new_descriptor())
    try:
        reserve(file.fileno(), 0, size, size)
    except BaseException:
        file.close()
        raise
    return file


def sparse_file(size: int) -> Descriptor:
    """Make such a file without reserving pages: `reserve` them before they are read or written.

    Raises
    ------
    MemoryError
        If a limit of this process forbids files of that size.
    """
    with deferred_interrupts():
        file = Descriptor(new_descriptor())
    try:
        os.ftruncate(file.fileno(), size)
    except BaseException as error:
        file.close()
        if isinstance(error, OSError):
            raise _refusal(error, size, "") from None
        raise
    return file


def reserve(fd: int, start: int, stop: int, size: int) -> None:
    """Reserve the pages of the bytes ``start`` to ``stop`` (exclusive) of a file of ``size`` bytes.

    Raises
    ------
    MemoryError
        If there is no room, or a limit of this process forbids it.
    """
    for begin in range(start, stop, _PIECE):
        _reserve(fd, begin, min(_PIECE, stop - begin), size)


def check_room(size: int) -> None:
    """Raise `MemoryError` if ``size`` bytes exceed the free memory of this node, or of this process's cgroup."""
    if size < _SMALL:
        return
    with deferred_interrupts():  # handlers may raise exceptions of the types that `free_memory` catches
        limits = list(free_memory())
    for free, where in limits:
        if size > free:
            raise MemoryError(
                f"cannot allocate {size:,} bytes of shared memory: {free:,} bytes are free {where}. Free some Data "
                "(Data.free_memory), or share the data as a numpy.memmap of a file, which is read as it is needed."
            )


def new_descriptor() -> int:
    """Return a descriptor of a new, empty, unnamed file in memory, of mode 0600; the caller must close it.

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
        for flags in (_CLOEXEC | _NOEXEC_SEAL, _CLOEXEC):  # older kernels do not know the seal
            fd: int = _libc.memfd_create(b"synkhronos", flags)
            if fd >= 0:
                return fd
        number = ctypes.get_errno()
        if number not in _REFUSED:
            raise MemoryError(f"cannot create shared memory: {os.strerror(number)}")
    try:
        memory = posix_ipc.SharedMemory(_private_name(), posix_ipc.O_CREX, mode=0o600, size=0)
        memory.unlink()
    except (OSError, posix_ipc.Error) as error:
        raise MemoryError(f"cannot create shared memory in {_FOLDER}: {error}") from error
    return int(memory.fd)


def _reserve(fd: int, start: int, n_bytes: int, size: int) -> None:
    """Reserve the pages of ``n_bytes`` bytes, from byte ``start`` on, of a file of ``size`` bytes."""
    try:
        try:
            os.posix_fallocate(fd, start, n_bytes)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            zeros, done = bytes(min(n_bytes, _BLOCK)), 0
            while done < n_bytes:  # a sandbox that forbids `fallocate` allows writing
                done += os.pwrite(fd, zeros[: n_bytes - done], start + done)
    except OSError as error:
        if error.errno not in (*_FULL, errno.EFBIG):
            raise
        room = os.fstatvfs(fd)
        where = f", {room.f_bavail * room.f_frsize:,} bytes free in {_FOLDER}" if room.f_blocks else ""
        raise _refusal(error, size, where) from None


def _refusal(error: OSError, size: int, where: str) -> MemoryError:
    """Return the error for a file that the kernel has no room for; ``where`` says how much room there is."""
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


def _private_name() -> str:
    """Return an unguessable name for a POSIX shared memory object, of the form that `remove_stale` recognizes."""
    return f"/synkhronos-{os.getpid()}-{secrets.token_hex(16)}"


def remove_stale(folder: str = _FOLDER) -> int:
    """Unlink objects that killed processes of this user could not unlink; return their number."""
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
