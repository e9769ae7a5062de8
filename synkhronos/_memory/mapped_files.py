"""Share `numpy.memmap` arrays: find the part of the file that an array maps, and map the same part in other ranks.

On another node, a file of the same name counts as the same file if its size, its modification time (in nanoseconds) and
a sample of its pages are equal.
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

_PAGE = 4096  # bytes
_N_PAGES = 64  # number of pages that are compared


def segment_of_file(array: Any) -> Segment | None:
    """Return the part of a file that ``array`` maps, as a segment whose bytes are the existing mapping.

    Return ``None`` if ``array`` is not a contiguous, aligned, shared mapping of a file that still exists. Mode ``"c"``
    does not count as shared: only the writing process sees its changes.
    """
    if not isinstance(array, np.memmap) or not array.size:
        return None
    if not (array.flags.c_contiguous and array.flags.aligned):
        return None
    mapping, path = getattr(array, "_mmap", None), getattr(array, "filename", None)
    if not isinstance(mapping, mmap.mmap) or path is None or array.mode == "c":
        return None
    # a slice of a memmap inherits the attribute `offset`, so its real start follows from the address
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    base = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    within = array.ctypes.data - base
    if not 0 <= within <= len(mapping) - array.nbytes:
        return None
    writable = array.mode in ("r+", "w+")
    with deferred_interrupts():  # handlers may raise exceptions of the types that are caught here
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
    """Part of a file, with the data that identifies the same file on another node."""

    path: str
    offset: int
    n_bytes: int
    state: tuple[int, int]  # the file's size in bytes, and its modification time in nanoseconds
    digest: bytes  # of a sample of the part's pages

    @property
    def is_as_it_was(self) -> bool:
        """Whether the file has not changed since."""
        with contextlib.suppress(OSError):
            return _state(os.stat(self.path)) == self.state
        return False


def find_part(path: str, offset: int, content: np.ndarray) -> FilePart | None:
    """Return the part of a file that is mapped as a uint8 array; ``None`` if the path now names another file."""
    with deferred_interrupts():
        try:
            found = os.stat(path)
        except OSError:
            return None
        if _mapped_inode(content.ctypes.data) != found.st_ino:
            return None
        return FilePart(path, offset, content.nbytes, _state(found), _digest(content))


def open_part(part: FilePart, key: str) -> Segment | None:
    """Map a part, found on another node, of the file of the same name here; ``None`` if the file differs."""
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
