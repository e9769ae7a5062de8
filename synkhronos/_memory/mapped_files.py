"""`numpy.memmap`: recognising the part of a file that an array is, and opening that very file for the other ranks.

On another machine a file of the same name is taken for the same if its size, the time when it was changed (to the
nanosecond), and some of its pages are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from typing import Any, NamedTuple

import numpy as np

from synkhronos._memory.descriptors import Descriptor
from synkhronos._memory.segments import Segment, SegmentRef, map_shared, new_key
from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["FilePart", "find_part", "open_part", "segment_of_file"]

_PAGE = 4096  # bytes
_N_PAGES = 64  # that are compared


def segment_of_file(array: Any) -> Segment | None:
    """What ``array`` maps of a file, its bytes being the mapping that there is.

    ``None`` if it is no contiguous, aligned, shared mapping of a file still there. A mapping of mode ``"c"`` is none:
    what is written to it is seen by its own process alone.
    """
    if not isinstance(array, np.memmap) or not array.size:
        return None
    if not (array.flags.c_contiguous and array.flags.aligned):
        return None
    mapping, path = getattr(array, "_mmap", None), getattr(array, "filename", None)
    if not isinstance(mapping, mmap.mmap) or path is None or array.mode == "c":
        return None
    # a slice of a memmap inherits its offset attribute, so the address tells where it really begins
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    base = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    within = array.ctypes.data - base
    if not 0 <= within <= len(mapping) - array.nbytes:
        return None
    writable = array.mode in ("r+", "w+")
    with deferred_interrupts():  # handlers may raise errors like those that are caught here
        try:
            flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
            file = Descriptor(os.open(path, flags))
        except OSError:
            return None
        if _mapped_inode(base) != os.fstat(file.fileno()).st_ino:  # another file has taken the name
            file.close()
            return None
    content = array.view(np.ndarray).reshape(-1).view(np.uint8)
    ref = SegmentRef(new_key(), array.nbytes, start + within, writable)
    return Segment(ref, content, file, None if writable else os.path.abspath(path))


class FilePart(NamedTuple):
    """Part of a file, and what is compared of files of that name."""

    path: str
    offset: int
    n_bytes: int
    state: tuple[int, int]  # of the file: its size, and when it was changed
    digest: bytes  # of some pages of the part

    @property
    def is_as_it_was(self) -> bool:
        """Whether the file was not changed since."""
        with contextlib.suppress(OSError):
            return _state(os.stat(self.path)) == self.state
        return False


def find_part(path: str, offset: int, content: np.ndarray) -> FilePart | None:
    """The part of a file that is mapped as a uint8 array; ``None`` if another file has taken the name."""
    with deferred_interrupts():
        try:
            found = os.stat(path)
        except OSError:
            return None
        if _mapped_inode(content.ctypes.data) != found.st_ino:
            return None
        return FilePart(path, offset, content.nbytes, _state(found), _digest(content))


def open_part(part: FilePart, key: str) -> Segment | None:
    """Map a part, which was found on another machine, of the file of that name here; ``None`` if it is another file."""
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
    """Of the first page, the last one, and some at equal distances in between."""
    last = max(0, content.nbytes - _PAGE)
    digest = hashlib.blake2b(digest_size=32)
    for start in sorted({last * i // (_N_PAGES - 1) for i in range(_N_PAGES)}):
        digest.update(content[start : start + _PAGE].data)
    return digest.digest()


def _mapped_inode(address: int) -> int | None:
    """The inode of the file that is mapped at an address of this process."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            first, last = (int(bound, 16) for bound in fields[0].split("-"))
            if first <= address < last:
                return int(fields[4])
    return None
