"""How the ranks of a session wake each other: semaphores, a barrier, and an abort flag in shared memory.

Invariants
----------
* No wait without a way out: a parked wait wakes every `POLL` seconds and calls ``check``, which raises if the peers
  that could end the wait are dead, or if the abort flag is up.
* A wait spins briefly first, but only if every rank has a core to itself: spinning must not steal a computing core.
* Semaphores are unlinked as soon as they exist; workers inherit them through the fork.
"""

from __future__ import annotations

import contextlib
import time
from typing import Callable

import numpy as np
import posix_ipc

from synkhronos._segments import private_name
from synkhronos.errors import CollectiveAborted

__all__ = ["POLL", "Signals", "wait"]

#: Longest time between two looks at whether the peers are alive, in seconds.
POLL = 0.05

_acquire_errors = (posix_ipc.BusyError, posix_ipc.SignalError)


def _semaphore() -> posix_ipc.Semaphore:
    semaphore = posix_ipc.Semaphore(private_name(), posix_ipc.O_CREX, mode=0o600, initial_value=0)
    semaphore.unlink()
    return semaphore


def wait(semaphore: posix_ipc.Semaphore, spin: float, check: Callable[[], None]) -> None:
    """Take one token: spin for ``spin`` seconds, then park; ``check`` is called at every wake-up without a token."""
    if spin > 0.0:
        deadline = time.perf_counter() + spin
        while semaphore.value == 0 and time.perf_counter() < deadline:
            pass
    while True:
        try:
            semaphore.acquire(POLL)
            return
        except _acquire_errors:
            check()


def pause(semaphore: posix_ipc.Semaphore, seconds: float) -> None:
    """Take one token if one comes within ``seconds``."""
    with contextlib.suppress(*_acquire_errors):
        semaphore.acquire(seconds)


def drain(semaphore: posix_ipc.Semaphore) -> None:
    """Take all tokens that are there."""
    with contextlib.suppress(*_acquire_errors):
        while True:
            semaphore.acquire(0)


class Signals:
    """The semaphores of one session; made by the master before it forks.

    Parameters
    ----------
    n_ranks : int
    spin : float
        Seconds to spin before parking.
    flags : numpy.ndarray
        One int64 in shared memory, shape ``(1,)``: the abort flag.
    """

    def __init__(self, n_ranks: int, spin: float, flags: np.ndarray) -> None:
        self.spin = spin
        self.start = [_semaphore() for _ in range(n_ranks)]
        self.done = _semaphore()
        self._arrived = [[_semaphore() for _ in range(n_ranks)] for _ in range(2)]
        self._n_ranks = n_ranks
        self._flags = flags
        self._parity = 0

    def abort(self) -> None:
        """Release every rank that waits in a barrier; it raises `CollectiveAborted` there."""
        self._flags[0] = 1

    def reset(self) -> None:
        """After an aborted command, when all ranks are idle again: lower the flag and forget half-done barriers."""
        for semaphores in self._arrived:
            for semaphore in semaphores:
                drain(semaphore)
        self._flags[0] = 0

    def restart(self) -> None:
        """Each rank calls this at the start of a command, so that all agree on which barrier comes next."""
        self._parity = 0

    def barrier(self, rank: int, check: Callable[[], None]) -> None:
        """Wait until every rank has called this.

        Each rank leaves a token for every other one and takes as many as it has peers. Two sets of semaphores take
        turns: a fast rank cannot reach the barrier after next before everybody has left this one.
        """
        arrived = self._arrived[self._parity]
        self._parity ^= 1
        for peer in range(self._n_ranks):
            if peer != rank:
                arrived[peer].release()

        def check_all() -> None:
            if self._flags[0]:
                raise CollectiveAborted("another rank failed")
            check()

        for _ in range(self._n_ranks - 1):
            wait(arrived[rank], self.spin, check_all)

    def close(self) -> None:
        """Unmap the semaphores in this process."""
        for semaphore in [*self.start, self.done, *self._arrived[0], *self._arrived[1]]:
            semaphore.close()
