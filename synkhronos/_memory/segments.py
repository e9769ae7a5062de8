"""Memory mappings without a file descriptor each: `mmap.mmap` keeps a duplicate open for as long as it lives.

They are unmapped by C code alone. A ``__del__`` in Python can be torn apart by Ctrl-C, and its memory would be lost.

Memory that the processes of a session share.

Invariants
----------
* A segment has no name, and mode 0600: whatever ends a process, at whatever moment, leaves nothing. Others get it by a
  `Passage`, or inherit it.
* Pages are reserved before they are used, mostly when the segment is made: too little memory is a `MemoryError`, never
  a SIGBUS later.
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
from synkhronos._utils.interrupts import Endings, let_interrupts_pass

__all__ = ["ALIGNMENT", "ArrayRef", "Segment", "SegmentRef", "SegmentTable", "aligned", "dtype_spec", "map_shared"]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x8000 if platform.machine() in ("mips", "mips64") else 0x4000
_PROT_NONE = 0


class _Mapping:
    """One ``mmap(2)`` with ``MAP_SHARED``, unmapped with the last array that views it.

    `mmap.mmap` reserves the addresses, with nothing behind them, and gives them back; the file is mapped over them.
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
    """Map part of a file or shared memory object; the descriptor may be closed at once.

    Parameters
    ----------
    fd : int
    size, offset : int
        In bytes; ``size`` at least 1, ``offset`` anything.
    writable : bool

    Returns
    -------
    uint8 array of shape (size,)
        It, and every view of it, keeps the mapping alive.

    Raises
    ------
    MemoryError
        If the kernel refuses.
    """
    lead = offset % mmap.ALLOCATIONGRANULARITY
    return np.asarray(_Mapping(fd, lead + size, offset - lead, writable))[lead:]


#: Arrays in a segment start at multiples of this many bytes: a cache line, and enough for every vector instruction.
ALIGNMENT = 64

_MOST_BYTES = 2**63 - 1
_counter = itertools.count()


class SegmentRef(NamedTuple):
    """What names a segment in a message: a key that no other has, and which bytes of its file it is."""

    key: str
    size: int
    offset: int = 0
    writable: bool = True


class ArrayRef(NamedTuple):
    """Where an array lies: key of the segment, offset in bytes, shape, and dtype (as `numpy.dtype.str` or descr)."""

    key: str
    offset: int
    shape: tuple[int, ...]
    dtype: Any


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def new_key() -> str:
    """A key that no other segment of any process has."""
    return f"{os.getpid()}-{next(_counter)}-{secrets.token_hex(4)}"


class Segment:
    """Memory mapped into this process, which others may map, too: made for that, or part of a file of the user's.

    Attributes
    ----------
    bytes : uint8 array of shape (size,)
        All of it; it and every view of it keep the mapping alive.
    ref : SegmentRef
        What names it to other processes.
    given_to : set
        The `Passage` objects to which it was given.
    path : str or None
        Of the user's file, if it can be read alone.
    """

    def __init__(self, ref: SegmentRef, content: np.ndarray, file: Descriptor, path: str | None = None) -> None:
        self.ref = ref
        self.path = path
        self.bytes = content
        self.given_to: set[object] = set()
        self._file = file

    @classmethod
    def create(cls, size: int, key: str | None = None, reserved: bool = True) -> Segment:
        """Make ``size`` bytes (at least one page), filled with zeros; without a key it gets a new one.

        Its pages are all reserved, unless ``reserved`` is false: then `reserve` is for those that are used.

        Raises
        ------
        MemoryError
            If shared memory has no room; the message gives bytes wanted and free.
        """
        size = max(int(size), mmap.PAGESIZE)
        if size > _MOST_BYTES:
            raise MemoryError(f"{size:,} bytes are more than there can be")
        file = anonymous_file(size) if reserved else sparse_file(size)
        try:
            return cls(SegmentRef(key or new_key(), size), map_shared(file.fileno(), size), file)
        except BaseException:
            file.close()
            raise

    def reserve(self, parts: Sequence[tuple[int, int]]) -> None:
        """Reserve the pages of parts, each from a byte to before another; it has its descriptor still.

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
        """Its descriptor, as long as `close_fd` has not been called."""
        return self._file.fileno()

    def close_fd(self) -> None:
        """Give the descriptor back, once everybody who needs the segment has it, or has been given it."""
        self._file.close()

    def abandon(self) -> None:
        """In a process that inherited it: let go of it, but for the mapping that its table has."""
        self._file.close()
        self.bytes = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
        """A view of the bytes from ``offset`` on as an array; it keeps the mapping alive."""
        return np.ndarray(shape, dtype, self.bytes, offset)


class SegmentTable:
    """The segments that this process has mapped, by key; one table for each process, inherited by forked workers.

    Attributes
    ----------
    ended : Endings
        Key and size in bytes of the memory that was lent and is no more.
    files : dict
        By key, of lent memory that is part of a file and can be read alone: path, and first byte.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, np.ndarray] = {}
        self._lent: dict[str, weakref.ref[np.ndarray]] = {}  # those that have ended stay until they are released
        self.ended: Endings[tuple[str, int]] = Endings()
        self.files: dict[str, tuple[str, int]] = {}

    def add(self, key: str, content: np.ndarray) -> None:
        """Take in memory that this process has mapped, as a uint8 array."""
        self._bytes[key] = content

    def lend(self, key: str, content: np.ndarray) -> None:
        """Take in memory that lives as long as somebody else keeps this very array."""
        self.ended.watch(content, (key, content.nbytes))
        self._lent[key] = weakref.ref(content)

    def lent(self) -> list[np.ndarray | None]:
        """What is lent now; as long as a list of it is kept, none of it ends."""
        return [one() for one in list(self._lent.values())]

    def release(self, key: str) -> None:
        """Forget a segment; its memory is unmapped with the last array that views it."""
        self._bytes.pop(key, None)
        self._lent.pop(key, None)
        self.files.pop(key, None)

    def view(self, ref: ArrayRef) -> np.ndarray:
        """The array that `ref` names, without a copy."""
        key, offset, shape, dtype = ref
        return np.ndarray(shape, dtype, self._content(key), offset)

    def _content(self, key: str) -> np.ndarray:
        content = self._bytes.get(key)
        if content is None:
            content = self._lent[key]()
        if content is None:
            raise KeyError(f"the memory {key} is no more")
        return content

    def n_bytes(self, key: str) -> int:
        """The size of a segment."""
        return self._content(key).nbytes

    def __contains__(self, key: str) -> bool:
        return key in self._bytes or (key in self._lent and self._lent[key]() is not None)

    def __len__(self) -> int:
        return len(self._bytes) + sum(content is not None for content in self.lent())


def dtype_spec(dtype: np.dtype) -> Any:
    """A description of ``dtype`` that pickles small and quickly and that `numpy.dtype` reads back."""
    return dtype.str if dtype.names is None and dtype.subdtype is None else dtype
