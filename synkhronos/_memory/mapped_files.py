"""Share `numpy.memmap` arrays: find the file range that an array maps, and map the same range in other ranks.

A file on another node counts as the same file if its path, its size, its modification time (in nanoseconds) and a
sample of its pages are equal.
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
