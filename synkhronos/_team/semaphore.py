"""POSIX semaphores in memory that processes share: without a name, so that nothing can be left behind by a kill."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np

__all__ = ["SEMAPHORE_BYTES", "Semaphore"]

#: Room for a ``sem_t``, in a cache line of its own.
SEMAPHORE_BYTES = 64

_libc = ctypes.CDLL(None, use_errno=True)
_BETWEEN_PROCESSES = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _function(name: str, *types: type) -> Any:
    function = getattr(_libc, name)
    function.argtypes = types
    return function


_init = _function("sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_post = _function("sem_post", ctypes.c_void_p)
_trywait = _function("sem_trywait", ctypes.c_void_p)
_HAS_CLOCKWAIT = hasattr(_libc, "sem_clockwait")  # glibc 2.30: by a clock that nobody sets
_CLOCK = time.CLOCK_MONOTONIC if _HAS_CLOCKWAIT else time.CLOCK_REALTIME
if _HAS_CLOCKWAIT:
    _wait_until = _function("sem_clockwait", ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))
else:
    _wait_until = _function("sem_timedwait", ctypes.c_void_p, ctypes.POINTER(_Timespec))


class Semaphore:
    """A counting semaphore, initially 0.

    Parameters
    ----------
    place : uint8 array of shape (SEMAPHORE_BYTES,)
        In shared memory, mapped before the processes that will use it are forked.
    """

    def __init__(self, place: np.ndarray) -> None:
        self._place = place  # keeps the memory mapped
        self._address = place.ctypes.data
        if _init(self._address, _BETWEEN_PROCESSES, 0):
            raise OSError(ctypes.get_errno(), f"sem_init: {os.strerror(ctypes.get_errno())}")

    def release(self) -> None:
        """Add a token, and wake one process that waits for it."""
        _post(self._address)

    def try_acquire(self) -> bool:
        """Take a token if there is one."""
        return _trywait(self._address) == 0

    def acquire(self, seconds: float) -> bool:
        """Take a token if one comes within ``seconds``; a signal ends the wait early."""
        nanoseconds = time.clock_gettime_ns(_CLOCK) + int(seconds * 1e9)
        deadline = _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        clock = (_CLOCK,) if _HAS_CLOCKWAIT else ()
        return _wait_until(self._address, *clock, ctypes.byref(deadline)) == 0

    def drain(self) -> None:
        """Take all tokens that are there."""
        while self.try_acquire():
            pass
