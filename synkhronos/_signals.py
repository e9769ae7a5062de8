"""How the ranks of a session wake each other: semaphores, a barrier, and an abort flag in shared memory.

Invariants
----------
* No wait without a way out: a parked wait wakes every `POLL` seconds and calls ``check``, which raises if the peers
  that could end the wait are dead, or if the abort flag is up.
* A wait spins briefly first, but only if every rank has a core to itself: spinning must not steal a computing core.
* Semaphores lie in a segment that workers inherit through the fork.
"""

from __future__ import annotations

import time
from typing import Callable

import numpy as np

from synkhronos._segments import Segment
from synkhronos._semaphore import SEMAPHORE_BYTES, Semaphore
from synkhronos.errors import CollectiveAborted

__all__ = ["POLL", "Signals", "wait"]

#: Longest time between two looks at whether the peers are alive, in seconds.
POLL = 0.05


def wait(semaphore: Semaphore, spin: float, check: Callable[[], None]) -> None:
    """Take one token: spin for ``spin`` seconds, then park; ``check`` is called at every wake-up without a token."""
    if spin > 0.0:
        deadline = time.perf_counter() + spin
        while time.perf_counter() < deadline:
            if semaphore.try_acquire():
                return
    while not semaphore.acquire(POLL):
        check()


class Signals:
    """The semaphores of one session; made by the master before it forks.

    Parameters
    ----------
    n_ranks : int
    spin : float
        Seconds to spin before parking.
    """

    def __init__(self, n_ranks: int, spin: float) -> None:
        n_semaphores = 3 * n_ranks + 1
        segment = Segment.create((1 + n_semaphores) * SEMAPHORE_BYTES)
        segment.close_fd()
        places = iter(segment.array((1 + n_semaphores, SEMAPHORE_BYTES), np.uint8))
        self._flags = next(places).view(np.int64)
        self.spin = spin
        self.start = [Semaphore(next(places)) for _ in range(n_ranks)]
        self.done = Semaphore(next(places))
        self._arrived = [[Semaphore(next(places)) for _ in range(n_ranks)] for _ in range(2)]
        self._n_ranks = n_ranks
        self._parity = 0

    def abort(self) -> None:
        """Release every rank that waits in a barrier; it raises `CollectiveAborted` there."""
        self._flags[0] = 1

    @property
    def aborted(self) -> bool:
        """Whether a rank has failed in the command that is being executed."""
        return bool(self._flags[0])

    def reset(self) -> None:
        """After an aborted command, when all ranks are idle again: lower the flag and forget half-done barriers."""
        for semaphores in self._arrived:
            for semaphore in semaphores:
                semaphore.drain()
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
