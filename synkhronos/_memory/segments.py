"""POSIX shared memory: how bytes get from one process of a session to another.

Invariants
----------
* A segment has no name: it is made as an unnamed file in the memory file system of ``/dev/shm`` (``O_TMPFILE``), and
  other processes open it through the creator's file descriptor (``/proc/<pid>/fd/<fd>``). So whatever ends a process,
  at whatever moment, leaves nothing there. Where the kernel cannot do that, `posix_ipc` makes a named object, which
  the next system call unlinks; `remove_stale` sweeps what a kill between the two leaves.
* A segment's pages are all reserved when it is made: a full ``/dev/shm`` is a `MemoryError`, never a SIGBUS later.
* Mode 0600; a name, where there is one, has 128 random bits.
* A mapping lives as long as any array that views it.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import secrets
from typing import Any, NamedTuple

import numpy as np
import posix_ipc

from synkhronos._memory.descriptors import clear_of_streams
from synkhronos._memory.mapping import map_shared

__all__ = [
    "ALIGNMENT",
    "ArrayRef",
    "FileRef",
    "Segment",
    "SegmentRef",
    "SegmentTable",
    "aligned",
    "dtype_spec",
    "private_name",
    "remove_stale",
]

#: Arrays in a segment start at multiples of this many bytes: a cache line, and enough for every vector instruction.
ALIGNMENT = 64

_FOLDER = "/dev/shm"
_PREFIX = "synkhronos-"
_MOST_BYTES = 2**63 - 1
_counter = itertools.count()


class SegmentRef(NamedTuple):
    """How another process finds a segment: unique key, creator's pid, its file descriptor there, size in bytes."""

    key: str
    pid: int
    fd: int
    size: int


class FileRef(NamedTuple):
    """A range of an ordinary file, found in the same way; every process maps it for itself."""

    key: str
    pid: int
    fd: int
    offset: int
    size: int
    writable: bool


class ArrayRef(NamedTuple):
    """Where an array lies: key of the segment, offset in bytes, shape, and dtype (as `numpy.dtype.str` or descr)."""

    key: str
    offset: int
    shape: tuple[int, ...]
    dtype: Any


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def private_name() -> str:
    """A name for a POSIX shared memory object: unguessable, and telling `remove_stale` whose it was."""
    return f"/{_PREFIX}{os.getpid()}-{secrets.token_hex(16)}"


def new_key() -> str:
    """A key that no other segment of any process has."""
    return f"{os.getpid()}-{next(_counter)}-{secrets.token_hex(4)}"


class Segment:
    """One allocation of shared memory, mapped into this process.

    Attributes
    ----------
    bytes : uint8 array of shape (size,)
        All of it; it and every view of it keep the mapping alive.
    ref : SegmentRef
        What another process needs to `attach` it, as long as the creator has not called `close_fd`.
    """

    def __init__(self, ref: SegmentRef, content: np.ndarray) -> None:
        self.ref = ref
        self.bytes = content

    @classmethod
    def create(cls, size: int) -> Segment:
        """Reserve ``size`` bytes (at least one page), filled with zeros.

        Raises
        ------
        MemoryError
            If shared memory has no room; the message gives bytes wanted and free.
        """
        size = max(int(size), mmap.PAGESIZE)
        if size > _MOST_BYTES:
            raise MemoryError(f"{size:,} bytes are more than there can be")
        fd = clear_of_streams(_unnamed())
        try:
            _reserve(fd, size)
            return cls(SegmentRef(new_key(), os.getpid(), fd, size), map_shared(fd, size))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, ref: SegmentRef) -> Segment:
        """Map a segment that another process of the session made."""
        fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(ref, map_shared(fd, ref.size))
        finally:
            os.close(fd)

    def close_fd(self) -> None:
        """Give the descriptor back, in the creator, once everybody who needs the segment has attached it."""
        if self.ref.fd >= 0 and self.ref.pid == os.getpid():
            os.close(self.ref.fd)
        self.ref = self.ref._replace(fd=-1)

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
        """A view of the bytes from ``offset`` on as an array; it keeps the mapping alive."""
        return np.ndarray(shape, dtype, self.bytes, offset)


def _unnamed() -> int:
    """A descriptor of a new, empty shared memory object of mode 0600 that has no name (any more)."""
    try:
        return os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EACCES, errno.EPERM):
            raise MemoryError(f"cannot create shared memory in {_FOLDER}: {error}") from error
    try:
        memory = posix_ipc.SharedMemory(private_name(), posix_ipc.O_CREX, mode=0o600, size=0)
        memory.unlink()
    except OSError as error:
        raise MemoryError(f"cannot create shared memory: {error}") from error
    return memory.fd


def _reserve(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise
        room = os.statvfs(f"/proc/self/fd/{fd}")
        free = room.f_bavail * room.f_frsize
        raise MemoryError(
            f"shared memory is too small: {size:,} bytes wanted, {free:,} bytes free in /dev/shm. "
            "Free some Data (Data.free_memory), enlarge /dev/shm (mount -o remount,size=…; docker run --shm-size=…), "
            "or share the data as a numpy.memmap of a file, which needs no /dev/shm."
        ) from None


def map_file(ref: FileRef) -> np.ndarray:
    """Map the bytes of a file that another process has open, as a uint8 array of shape ``(size,)``."""
    fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", (os.O_RDWR if ref.writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return map_shared(fd, ref.size, ref.offset, ref.writable)
    finally:
        os.close(fd)


class SegmentTable:
    """The segments that this process has mapped, by key; one table for each process, inherited by forked workers."""

    def __init__(self) -> None:
        self._bytes: dict[str, np.ndarray] = {}

    def add(self, key: str, content: np.ndarray) -> None:
        """Take in memory that this process has mapped, as a uint8 array."""
        self._bytes[key] = content

    def attach(self, ref: SegmentRef | FileRef) -> None:
        """Map what `ref` names, unless this process has it already (its creator, or a child forked later)."""
        if ref.key in self._bytes:
            return
        if isinstance(ref, FileRef):
            self._bytes[ref.key] = map_file(ref)
        else:
            self._bytes[ref.key] = Segment.attach(ref).bytes

    def release(self, key: str) -> int:
        """Forget a segment; its memory is unmapped with the last array that views it. Returns its size in bytes."""
        forgotten = self._bytes.pop(key, None)
        return 0 if forgotten is None else forgotten.nbytes

    def view(self, ref: ArrayRef) -> np.ndarray:
        """The array that `ref` names, without a copy."""
        key, offset, shape, dtype = ref
        return np.ndarray(shape, dtype, self._bytes[key], offset)

    def __contains__(self, key: str) -> bool:
        return key in self._bytes

    def __len__(self) -> int:
        return len(self._bytes)


def dtype_spec(dtype: np.dtype) -> Any:
    """A description of ``dtype`` that pickles small and quickly and that `numpy.dtype` reads back."""
    return dtype.str if dtype.names is None and dtype.subdtype is None else dtype


def remove_stale(folder: str = _FOLDER) -> int | None:
    """Unlink what this user's killed processes made and had no time to unlink; return how many names."""
    removed = 0
    try:
        names = [name for name in os.listdir(folder) if name.startswith(_PREFIX)]
    except OSError:
        return None
    for name in names:
        pid = name.split("-")[1]
        path = os.path.join(folder, name)
        try:
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and os.stat(path).st_uid == os.getuid():
                os.unlink(path)
                removed += 1
        except OSError:
            continue
    return removed
