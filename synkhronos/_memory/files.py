"""`numpy.memmap`: recognising the part of a file that an array is, and opening that very file for the other ranks."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from synkhronos._memory.descriptors import clear_of_streams
from synkhronos._memory.segments import FileRef, new_key

__all__ = ["OpenFile"]


class OpenFile:
    """The part of a file that an array maps, open for other processes to map too.

    Attributes
    ----------
    ref : FileRef
        What another process needs, as long as `close_fd` has not been called.
    bytes : uint8 array of shape (n_bytes,)
        The mapping that there is.
    """

    def __init__(self, array: np.ndarray, fd: int, offset: int, writable: bool) -> None:
        self.ref = FileRef(new_key(), os.getpid(), fd, offset, array.nbytes, writable)
        self.bytes = array.view(np.ndarray).reshape(-1).view(np.uint8)

    @classmethod
    def of(cls, array: Any) -> OpenFile | None:
        """Open what ``array`` maps; ``None`` if it is no contiguous, aligned, shared mapping of a file still there.

        A mapping of mode ``"c"`` is none: what is written to it is seen by its own process alone.
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
        try:
            fd = clear_of_streams(os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC))
        except OSError:
            return None
        if _mapped_inode(base) != os.fstat(fd).st_ino:  # another file has taken the name
            os.close(fd)
            return None
        return cls(array, fd, start + within, writable)

    def close_fd(self) -> None:
        """Give the descriptor back, once everybody who needs the file has mapped it."""
        if self.ref.fd >= 0 and self.ref.pid == os.getpid():
            os.close(self.ref.fd)
        self.ref = self.ref._replace(fd=-1)


def _mapped_inode(address: int) -> int | None:
    """The inode of the file that is mapped at an address of this process."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            first, last = (int(bound, 16) for bound in fields[0].split("-"))
            if first <= address < last:
                return int(fields[4])
    return None
