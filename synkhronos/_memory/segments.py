"""Segments: memory that the processes of a session share, and the arrays in it.

A segment is mapped with ``mmap(2)`` directly, because `mmap.mmap` would keep a duplicate of the descriptor open for as
long as the mapping exists. Only C code unmaps: Ctrl-C can interrupt a ``__del__`` in Python, and the memory would leak.

Invariants
----------
* A segment has no name, and mode 0600: no end of a process, at any moment, leaves anything behind. Other processes
  receive it through a `FdChannel`, or inherit it.
* Pages are reserved before they are used, mostly when the segment is made: lack of memory raises `MemoryError`, and
  never ends in a SIGBUS later.
* A mapping lives as long as any array that views it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import resource
import secrets
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._memory.descriptors import Descriptor
from synkhronos._memory.memfd import anonymous_file, check_room, reserve, sparse_file
from synkhronos._utils.interrupts import FinalizerQueue, let_interrupts_pass

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x8000 if platform.machine() in ("mips", "mips64") else 0x4000
_PROT_NONE = 0


class _Mapping:
    """One ``mmap(2)`` with ``MAP_SHARED``; the end of the last array that views it unmaps it.

    `mmap.mmap` reserves the addresses, without memory, and frees them; the file is mapped over them.
    """

    def __init__(self, fd: int, size: int, offset: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._addresses = mmap.mmap(-1, size, flags, _PROT_NONE)
        except (OSError, OverflowError) as error:
            let_interrupts_pass(error)
            raise _refusal(size, str(getattr(error, "strerror", error))) from None
        address = np.frombuffer(self._addresses, np.uint8).ctypes.data
        if _libc.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) == _FAILED:
            raise _refusal(size, os.strerror(ctypes.get_errno()))
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, not writable), "version": 3}


def _refusal(size: int, reason: str) -> MemoryError:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    hint = "" if limit == resource.RLIM_INFINITY else f" (this process may have {limit:,} bytes in all: ulimit -v)"
    return MemoryError(f"cannot map {size:,} bytes: {reason}{hint}")


def map_shared(fd: int, size: int, offset: int = 0, writable: bool = True) -> np.ndarray:
    """Map part of a file or shared memory object; the descriptor may be closed afterwards.

    Parameters
    ----------
    fd : int
    size, offset : int
        In bytes; ``size`` is at least 1, ``offset`` need not be aligned.
    writable : bool

    Returns
    -------
    uint8 array of shape (size,)
        The array, and every view of it, keeps the mapping alive.

    Raises
    ------
    MemoryError
        If the kernel refuses.
    """
    lead = offset % mmap.ALLOCATIONGRANULARITY
    return np.asarray(_Mapping(fd, lead + size, offset - lead, writable))[lead:]


#: Alignment of arrays in a segment, in bytes: a cache line, which also suffices for all vector instructions.
ALIGNMENT = 64

_MOST_BYTES = 2**63 - 1
_counter = itertools.count()


class SegmentRef(NamedTuple):
    """Name of a segment in a message: its unique key, and the bytes of its file that it covers."""

    key: str
    size: int
    offset: int = 0
    writable: bool = True


class ArrayRef(NamedTuple):
    """Location of an array: key of the segment, offset in bytes, shape, and dtype (as `numpy.dtype.str` or descr)."""

    key: str
    offset: int
    shape: tuple[int, ...]
    dtype: Any


def aligned(n_bytes: int) -> int:
    """Return ``n_bytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def new_key() -> str:
    """Return a key that no other segment of any process has."""
    return f"{os.getpid()}-{next(_counter)}-{secrets.token_hex(4)}"


class Segment:
    """Memory that this process maps and other processes can map: memory made for that, or part of a file of the user's.

    Attributes
    ----------
    bytes : uint8 array of shape (size,)
        The memory; this array and every view of it keep the mapping alive.
    ref : SegmentRef
        Name of the segment for other processes.
    given_to : set
        The `FdChannel` objects to which it was given.
    path : str or None
        Path of the user's file, if it is mapped read-only.
    """

    def __init__(self, ref: SegmentRef, content: np.ndarray, file: Descriptor, path: str | None = None) -> None:
        self.ref = ref
        self.path = path
        self.bytes = content
        self.given_to: set[object] = set()
        self._file = file

    @classmethod
    def create(cls, size: int, key: str | None = None, reserved: bool = True) -> Segment:
        """Make ``size`` bytes (at least one page), filled with zeros; without a key the segment gets a new one.

        All pages are reserved, unless ``reserved`` is false: then call `reserve` for parts before they are used.

        Raises
        ------
        MemoryError
            If shared memory has no room; the message gives bytes wanted and free.
        """
        size = max(int(size), mmap.PAGESIZE)
        if size > _MOST_BYTES:
            raise MemoryError(f"cannot allocate {size:,} bytes: more than the address space has")
        file = anonymous_file(size) if reserved else sparse_file(size)
        try:
            return cls(SegmentRef(key or new_key(), size), map_shared(file.fileno(), size), file)
        except BaseException:
            file.close()
            raise

    def reserve(self, parts: Sequence[tuple[int, int]]) -> None:
        """Reserve the pages of parts, each a pair of first byte and end; needs the descriptor.

        Raises
        ------
        MemoryError
            If there is no room; some of the parts may be reserved then.
        """
        wanted = sum(stop - start for start, stop in parts)
        check_room(wanted)
        for start, stop in parts:
            reserve(self.fileno(), start, stop, wanted)

    def fileno(self) -> int:
        """Return the descriptor; not after `close_fd`."""
        return self._file.fileno()

    def close_fd(self) -> None:
        """Close the descriptor, once every process that needs the segment has received it."""
        self._file.close()

    def abandon(self) -> None:
        """Drop a segment that this process has inherited by a fork; its table keeps the mapping."""
        self._file.close()
        self.bytes = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
        """Return a view of the bytes from ``offset`` on as an array; it keeps the mapping alive."""
        return np.ndarray(shape, dtype, self.bytes, offset)


class SegmentTable:
    """The segments that this process has mapped, by key; one table in each process, inherited by forked workers.

    Attributes
    ----------
    ended : FinalizerQueue
        Key and size in bytes of lent memory that has been freed.
    files : dict
        For lent memory that is a read-only part of a file: the path and the first byte, by key.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, np.ndarray] = {}
        self._lent: dict[str, weakref.ref[np.ndarray]] = {}  # entries of freed memory stay until they are released
        self.ended: FinalizerQueue[tuple[str, int]] = FinalizerQueue()
        self.files: dict[str, tuple[str, int]] = {}

    def add(self, key: str, content: np.ndarray) -> None:
        """Add memory that this process has mapped, as a uint8 array."""
        self._bytes[key] = content

    def lend(self, key: str, content: np.ndarray) -> None:
        """Add memory that lives as long as other code keeps this very array."""
        self.ended.watch(content, (key, content.nbytes))
        self._lent[key] = weakref.ref(content)

    def lent(self) -> list[np.ndarray | None]:
        """Return the arrays that are lent now; the list keeps their memory alive."""
        return [one() for one in list(self._lent.values())]

    def release(self, key: str) -> None:
        """Remove a segment; its memory is unmapped with the last array that views it."""
        self._bytes.pop(key, None)
        self._lent.pop(key, None)
        self.files.pop(key, None)

    def view(self, ref: ArrayRef) -> np.ndarray:
        """Return the array that `ref` names, without a copy."""
        key, offset, shape, dtype = ref
        return np.ndarray(shape, dtype, self._content(key), offset)

    def _content(self, key: str) -> np.ndarray:
        content = self._bytes.get(key)
        if content is None:
            content = self._lent[key]()
        if content is None:
            raise KeyError(f"the memory {key} was freed")
        return content

    def n_bytes(self, key: str) -> int:
        """Return the size of a segment, in bytes."""
        return self._content(key).nbytes

    def __contains__(self, key: str) -> bool:
        return key in self._bytes or (key in self._lent and self._lent[key]() is not None)

    def __len__(self) -> int:
        return len(self._bytes) + sum(content is not None for content in self.lent())


def dtype_spec(dtype: np.dtype) -> Any:
    """Return a description of ``dtype`` that is small and fast to pickle, and that `numpy.dtype` accepts."""
    return dtype.str if dtype.names is None and dtype.subdtype is None else dtype
