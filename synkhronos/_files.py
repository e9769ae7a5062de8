"""`numpy.memmap`: recognising the part of a file that an array is."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from synkhronos._segments import FileRef, new_key

__all__ = ["file_of"]


def file_of(array: Any) -> FileRef | None:
    """The part of a file that ``array`` maps, or ``None`` if it is no contiguous, shared mapping of a named file.

    A mapping of mode ``"c"`` is none: what is written to it is seen by its own process alone.
    """
    if not isinstance(array, np.memmap) or not array.flags.c_contiguous or not array.size:
        return None
    mapping, path = getattr(array, "_mmap", None), getattr(array, "filename", None)
    if not isinstance(mapping, mmap.mmap) or path is None or array.mode == "c":
        return None
    # a slice of a memmap inherits its offset attribute, so the address tells where it really begins
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    within = array.ctypes.data - np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    if not 0 <= within <= len(mapping) - array.nbytes:
        return None
    return FileRef(new_key(), str(path), start + within, array.nbytes, array.mode in ("r+", "w+"))
