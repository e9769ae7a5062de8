"""Shared memory segments, references to the arrays in them, and segments that are ranges of the user's files.

A segment is mapped by ``mmap(2)`` directly, because `mmap.mmap` keeps a duplicate of the descriptor open for as long as
the mapping exists. It is unmapped by C code only: Ctrl-C can interrupt a ``__del__`` in Python, and the memory would
leak.

The range of a file that a `numpy.memmap` array maps is a segment, too; other ranks map the same range. A file on
another node counts as the same file if its path, its size, its modification time (in nanoseconds) and a sample of its
pages are equal.

Invariants
----------
* A segment in memory has no name, and its mode is 0600. So nothing is left behind, whenever a process ends. Other
  processes receive a segment through a `FdChannel`, or inherit it by a fork.
* Pages are reserved before they are used, usually when the segment is created. So lack of memory raises `MemoryError`,
  and never causes a SIGBUS later.
* A mapping exists as long as any array that views it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
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

from synkhronos._memory.descriptors import Descriptor, anonymous_file, check_room, reserve
from synkhronos._utils.interrupts import FinalizerQueue, deferred_interrupts, let_interrupts_pass

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x8000 if platform.machine() in ("mips", "mips64") else 0x4000
_PROT_NONE = 0


class _Mapping:
    """Shared mapping of a file, which exists as long as any array that views it.

    A private `mmap.mmap` object reserves the addresses, without memory; the file is mapped over them. When this object
    is deleted, it unmaps the addresses, and with them the file.
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
    """Map a range of a file or shared memory object; the descriptor may be closed afterwards.

    Parameters
    ----------
    fd : int
    size, offset : int
        In bytes. ``size`` is at least 1; ``offset`` need not be a multiple of the page size.
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


#: Alignment of arrays in a segment, in bytes: one cache line, which is enough for all vector instructions, too.
ALIGNMENT = 64

_MOST_BYTES = 2**63 - 1
_counter = itertools.count()


class SegmentRef(NamedTuple):
    """Reference to a segment in a message: its unique key, and the size and offset (in bytes) of its file range."""

    key: str
    size: int
    offset: int = 0
    writable: bool = True


class ArrayRef(NamedTuple):
    """Reference to an array: the segment's key, the offset in bytes, the shape, and the dtype (see `dtype_spec`)."""

    key: str
    offset: int
    shape: tuple[int, ...]
    dtype: Any


def aligned(n_bytes: int) -> int:
    """Return ``n_bytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def new_key() -> str:
    """Return a key that is unique among the segments of all processes."""
    return f"{os.getpid()}-{next(_counter)}-{secrets.token_hex(4)}"


class Segment:
    """Memory that several processes can map: an anonymous file, or a range of one of the user's files.

    Attributes
    ----------
    bytes : uint8 array of shape (size,)
        The memory; this array and every view of it keep the mapping alive.
    ref : SegmentRef
        Reference to the segment for other processes.
    given_to : set
        The `FdChannel` objects through which it was sent.
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
        """Create a segment of ``size`` bytes (at least one page), filled with zeros.

        Parameters
        ----------
        size : int
        key : str, optional
            Default: a new key.
        reserved : bool
            Whether to reserve all pages now. If false, call `reserve` for each part before it is used.

        Raises
        ------
        MemoryError
            If too little memory is free; the message says how many bytes were requested and are free.
        """
        size = max(int(size), mmap.PAGESIZE)
        if size > _MOST_BYTES:
            raise MemoryError(f"cannot allocate {size:,} bytes: more than the address space has")
        file = anonymous_file(size, reserved)
        try:
            return cls(SegmentRef(key or new_key(), size), map_shared(file.fileno(), size), file)
        except BaseException:
            file.close()
            raise

    def reserve(self, parts: Sequence[tuple[int, int]]) -> None:
        """Reserve the pages of several parts, each given as ``(start, stop)`` in bytes; not after `close_fd`.

        Raises
        ------
        MemoryError
            If too little memory is free. Some of the parts may be reserved by then.
        """
        wanted = sum(stop - start for start, stop in parts)
        check_room(wanted)
        for start, stop in parts:
            reserve(self.fileno(), start, stop, wanted)

    def fileno(self) -> int:
        """Return the descriptor; raises `ValueError` after `close_fd`."""
        return self._file.fileno()

    def close_fd(self) -> None:
        """Close the descriptor; call this once every process that needs the segment has received it."""
        self._file.close()

    def abandon(self) -> None:
        """Drop a segment that this process inherited by a fork; its `SegmentTable` keeps the mapping."""
        self._file.close()
        self.bytes = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
        """Return a view, as an array, of the bytes from ``offset`` on; it keeps the mapping alive."""
        return np.ndarray(shape, dtype, self.bytes, offset)


class SegmentTable:
    """Table of the segments that this process has mapped, by key.

    Each process has one table; forked workers inherit it. The table owns the memory that `add` registers. It holds only
    weak references to the memory that `lend` registers.

    Attributes
    ----------
    ended : FinalizerQueue
        ``(key, size in bytes)`` of lent memory that has been freed.
    files : dict
        For lent memory that is a read-only range of a file: ``(path, offset in bytes)`` by key.
    own : dict of ArrayRef to ndarray
        Arrays that this process reads in place of staged ones, of which only the other ranks' rows were copied.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, np.ndarray] = {}
        self._lent: dict[str, weakref.ref[np.ndarray]] = {}  # freed memory keeps its entry until `release`
        self.ended: FinalizerQueue[tuple[str, int]] = FinalizerQueue()
        self.files: dict[str, tuple[str, int]] = {}
        self.own: dict[ArrayRef, np.ndarray] = {}

    def add(self, key: str, content: np.ndarray) -> None:
        """Register memory that this process has mapped, as a uint8 array, and keep it until `release`."""
        self._bytes[key] = content

    def lend(self, key: str, content: np.ndarray) -> None:
        """Register memory without keeping it alive: it is freed when no other code refers to the array ``content``."""
        self.ended.watch(content, (key, content.nbytes))
        self._lent[key] = weakref.ref(content)

    def lent(self) -> list[np.ndarray | None]:
        """Return the arrays that are lent (``None`` for freed ones); the list keeps their memory alive."""
        return [one() for one in list(self._lent.values())]

    def release(self, key: str) -> None:
        """Remove a segment; its memory is unmapped when the last array that views it is deleted."""
        self._bytes.pop(key, None)
        self._lent.pop(key, None)
        self.files.pop(key, None)

    def view(self, ref: ArrayRef) -> np.ndarray:
        """Return the array that ``ref`` refers to, as a view."""
        if self.own and ref in self.own:
            return self.own[ref]
        return self.shared(ref)

    def shared(self, ref: ArrayRef) -> np.ndarray:
        """Return the memory that ``ref`` refers to, which all ranks share."""
        key, offset, shape, dtype = ref
        content = self._bytes.get(key)
        return np.ndarray(shape, dtype, self._content(key) if content is None else content, offset)

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
    """Return ``dtype.str``, which is small and fast to pickle, or ``dtype`` itself if it has fields or a subarray."""
    return dtype.str if dtype.names is None and dtype.subdtype is None else dtype


# -- ranges of the user's files

_PAGE = 4096  # bytes
_N_PAGES = 64  # number of pages in the sample


def segment_of_file(array: Any) -> Segment | None:
    """Return the file range that ``array`` maps as a segment, which uses the existing mapping.

    Return ``None`` unless ``array`` is a C-contiguous, aligned and shared mapping of a file that still has its name.
    A copy-on-write mapping (mode ``"c"``) is not shared: only the process that writes to it sees the changes.
    """
    if not isinstance(array, np.memmap) or not array.size:
        return None
    if not (array.flags.c_contiguous and array.flags.aligned):
        return None
    mapping, path = getattr(array, "_mmap", None), getattr(array, "filename", None)
    if not isinstance(mapping, mmap.mmap) or path is None or array.mode == "c":
        return None
    # a slice of a memmap inherits `offset` from its base, so compute its start from the address instead
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    base = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    within = array.ctypes.data - base
    if not 0 <= within <= len(mapping) - array.nbytes:
        return None
    writable = array.mode in ("r+", "w+")
    with deferred_interrupts():  # a signal handler may raise an exception of a type that is caught here
        try:
            flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
            file = Descriptor(os.open(path, flags))
        except OSError:
            return None
        if _mapped_inode(base) != os.fstat(file.fileno()).st_ino:  # the path names another file now
            file.close()
            return None
    content = array.view(np.ndarray).reshape(-1).view(np.uint8)
    ref = SegmentRef(new_key(), array.nbytes, start + within, writable)
    return Segment(ref, content, file, None if writable else os.path.abspath(path))


class FilePart(NamedTuple):
    """Range of a file, with a fingerprint that identifies the same file on another node."""

    path: str
    offset: int
    n_bytes: int
    state: tuple[int, int]  # the file's size in bytes, and its modification time in nanoseconds
    digest: bytes  # hash of a sample of the range's pages

    @property
    def is_as_it_was(self) -> bool:
        """Whether the file still has the recorded size and modification time."""
        with contextlib.suppress(OSError):
            return _state(os.stat(self.path)) == self.state
        return False


def find_part(path: str, offset: int, content: np.ndarray) -> FilePart | None:
    """Describe the file range that is mapped as the uint8 array ``content``.

    Return ``None`` if ``path`` now names another file.
    """
    with deferred_interrupts():
        try:
            found = os.stat(path)
        except OSError:
            return None
        if _mapped_inode(content.ctypes.data) != found.st_ino:
            return None
        return FilePart(path, offset, content.nbytes, _state(found), _digest(content))


def open_part(part: FilePart, key: str) -> Segment | None:
    """Map, read-only, the same range of the file with the same path on this node.

    Return ``None`` if this node does not have the file, or if its fingerprint differs.
    """
    with deferred_interrupts():
        try:
            file = Descriptor(os.open(part.path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None
        with contextlib.suppress(OSError, MemoryError):
            if _state(os.fstat(file.fileno())) == part.state:
                content = map_shared(file.fileno(), part.n_bytes, part.offset, writable=False)
                if _digest(content) == part.digest:
                    return Segment(SegmentRef(key, part.n_bytes, part.offset, writable=False), content, file)
        file.close()
        return None


def _state(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def _digest(content: np.ndarray) -> bytes:
    """Hash the first page, the last page, and pages at equal distances in between."""
    last = max(0, content.nbytes - _PAGE)
    digest = hashlib.blake2b(digest_size=32)
    for start in sorted({last * i // (_N_PAGES - 1) for i in range(_N_PAGES)}):
        digest.update(content[start : start + _PAGE].data)
    return digest.digest()


def _mapped_inode(address: int) -> int | None:
    """Return the inode of the file that is mapped at an address of this process."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            first, last = (int(bound, 16) for bound in fields[0].split("-"))
            if first <= address < last:
                return int(fields[4])
    return None
