"""Memory mappings without a file descriptor each: `mmap.mmap` keeps a duplicate open for as long as it lives.

They are unmapped by C code alone. A ``__del__`` in Python can be torn apart by Ctrl-C, and its memory would be lost.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource

import numpy as np

from synkhronos._utils.interrupts import let_interrupts_pass

__all__ = ["map_shared"]

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
