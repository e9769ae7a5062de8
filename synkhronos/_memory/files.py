"""`numpy.memmap`: recognising the part of a file that an array is, and opening that very file for the other ranks."""

from __future__ import annotations

import contextlib
import mmap
import os
from io import FileIO
from typing import Any

import numpy as np

from synkhronos._interrupts import deferred_interrupts
from synkhronos._memory.descriptors import clear_of_streams
from synkhronos._memory.segments import Segment, SegmentRef, new_key

__all__ = ["segment_of_file"]


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
            file = FileIO(clear_of_streams(os.open(path, flags)), "r+" if writable else "r")
        except OSError:
            return None
        if _mapped_inode(base) != os.fstat(file.fileno()).st_ino:  # another file has taken the name
            file.close()
            return None
    content = array.view(np.ndarray).reshape(-1).view(np.uint8)
    return Segment(SegmentRef(new_key(), array.nbytes, start + within, writable), content, file)


def _mapped_inode(address: int) -> int | None:
    """The inode of the file that is mapped at an address of this process."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            first, last = (int(bound, 16) for bound in fields[0].split("-"))
            if first <= address < last:
                return int(fields[4])
    return None
