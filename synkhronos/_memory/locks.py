"""Locks in shared memory that a process cannot keep by dying: robust mutexes of POSIX threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np

from synkhronos._utils.interrupts import deferred_interrupts

_libc = ctypes.CDLL(None)
_SHARED = 1  # PTHREAD_PROCESS_SHARED
_ROBUST = 1  # PTHREAD_MUTEX_ROBUST
_ATTRIBUTE_BYTES = 16  # more than a pthread_mutexattr_t has
_POLL = 0.05  # seconds between two checks that the wait still makes sense
#: Clock of the function that waits for a lock. Old C libraries have only that for the clock that can be set.
_CLOCK = time.CLOCK_MONOTONIC if hasattr(_libc, "pthread_mutex_clocklock") else time.CLOCK_REALTIME

#: Bytes for one lock: a cache line, which is more than a pthread_mutex_t has.
LOCK_BYTES = 64


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class SharedLocks:
    """Locks of several processes, in memory that they share.

    If the owner of a lock dies, the kernel releases it, and the next process that acquires it becomes the owner. What
    the lock protects may then be half changed.

    Parameters
    ----------
    memory : uint8 array of shape (n, LOCK_BYTES)
        Shared memory, aligned to a cache line.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._first = memory.__array_interface__["data"][0]

    @classmethod
    def create(cls, memory: np.ndarray) -> SharedLocks:
        """Make free locks, in memory that no process uses yet."""
        locks = cls(memory)
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        for index in range(len(memory)):
            _check(_libc.pthread_mutex_init(locks._address(index), attributes))
        _check(_libc.pthread_mutexattr_destroy(attributes))
        return locks

    def _address(self, index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._first + index * LOCK_BYTES)

    @contextlib.contextmanager
    def hold(self, index: int, check: Callable[[], None]) -> Iterator[None]:
        """Acquire a lock, and release it at the end of the block. Signal handlers are deferred until then.

        Parameters
        ----------
        index : int
        check : callable
            Called while this process waits; it raises if the wait must end.
        """
        lock = self._address(index)
        with deferred_interrupts():
            code = _libc.pthread_mutex_trylock(lock)
            while code in (errno.EBUSY, errno.ETIMEDOUT):
                check()
                seconds, rest = divmod(time.clock_gettime(_CLOCK) + _POLL, 1)
                code = _wait_for(lock, ctypes.byref(_Timespec(int(seconds), int(rest * 1e9))))
            if code == errno.EOWNERDEAD:
                code = _libc.pthread_mutex_consistent(lock)
            _check(code)
            try:
                yield
            finally:
                _check(_libc.pthread_mutex_unlock(lock))


def _wait_for(lock: ctypes.c_void_p, until: Any) -> int:
    """Wait for a lock until a time of `_CLOCK`, and return the code."""
    if _CLOCK == time.CLOCK_MONOTONIC:
        return int(_libc.pthread_mutex_clocklock(lock, _CLOCK, until))
    return int(_libc.pthread_mutex_timedlock(lock, until))


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
