"""Memory mappings without a file descriptor each: `mmap.mmap` keeps a duplicate open for as long as it lives."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

__all__ = ["map_shared"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """One ``mmap(2)`` with ``MAP_SHARED``, unmapped with the last array that views it."""

    def __init__(self, fd: int, size: int, offset: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, offset)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise MemoryError(f"cannot map {size:,} bytes: {os.strerror(number)}")
        self._address, self._size = address, size
        self._munmap = _libc.munmap  # still there when the interpreter shuts down
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, not writable), "version": 3}

    def __del__(self) -> None:
        if hasattr(self, "_munmap"):
            self._munmap(self._address, self._size)


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
