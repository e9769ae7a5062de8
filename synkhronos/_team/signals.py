"""How the ranks of a session tell each other how far they are, and wait for each other.

What ranks wait for are words in shared memory, in *boards*: each word has one writer and only ever grows, so nothing
is lost, whatever a rank missed or however long it slept. A rank that waits looks at the words for a while, if every
rank can have a core of its own, and none that it waits for was last seen on this one's core. Then it parks on its own
semaphore, after it has said so in `_parked`.

Invariants
----------
* No wake-up is lost. Who posts writes its word, and then looks who is parked; who parks says so, and then looks at the
  words. A full memory barrier stands between the two on both sides, so at least one sees the other.
* Nothing is seen before what it announces. On processors that do not keep the order of writes, a memory barrier stands
  before each word is written and after it was read.
* No wait without a way out: a rank parks for `POLL` seconds at most, and calls ``check`` each time before it does. That
  raises if the peers that could end the wait are dead, or if the abort flag is up.
* To be woken in vain does no harm, and tokens left over in a semaphore are taken when its rank parks the next time.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Iterable
from typing import Callable

import numpy as np

from synkhronos._memory import Segment, aligned
from synkhronos._team.semaphore import SEMAPHORE_BYTES, Semaphore
from synkhronos._team.timeline import STRAGGLING, Timeline

__all__ = ["POLL", "Barrier", "Signals"]

#: Longest time between two looks at whether the peers are alive, in seconds.
POLL = 0.05

_LOOKS = 16  # at the words, for each at the clock
_IDLE_SPINS = 5  # how much longer a worker looks for the next message: its core has nothing else to do
_STEPS_BITS = 24  # of a word of `Signals.arrived`; the rest is the number of the message

#: Whether writes are seen in the order in which they are made, so that only a read after a write needs a barrier.
_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "i686", "i386")

_lock = threading.RLock()

current_core = ctypes.CDLL(None).sched_getcpu


def fence() -> None:
    """A full memory barrier.

    To acquire and to release a lock are atomic operations, and on x86 these are full barriers. On Arm nothing moves up
    across an acquire nor down across a release, and an acquire does not overtake the release before it.
    """
    with _lock:
        pass
    if not _IN_ORDER:
        with _lock:
            pass


class Signals:
    """The words and semaphores of one session; made by the master before it forks, and inherited by workers.

    Parameters
    ----------
    n_ranks : int
    rank : int
        Of the master.
    spin : float
        Seconds to look at the words before parking.

    Attributes
    ----------
    rank : int
        Of this process; a worker sets it.
    sent : memoryview of int64
        One word: the number of the master's last message.
    answered : memoryview of int64
        For each rank, the number of the last message that it has answered.
    arrived : memoryview of int64
        For each rank, the last step at which it arrived at a barrier.
    """

    def __init__(self, n_ranks: int, rank: int, spin: float) -> None:
        words = aligned(8 * n_ranks)
        segment = Segment.create(n_ranks * SEMAPHORE_BYTES + 6 * words)
        segment.close_fd()
        places = segment.array((n_ranks, SEMAPHORE_BYTES), np.uint8)
        boards = segment.array((6, words // 8), np.int64, places.nbytes)
        self.rank = rank
        self.n_ranks = n_ranks
        self.sent = boards[0, :1].data
        self.answered = boards[1, :n_ranks].data
        self.arrived = boards[2, :n_ranks].data
        self._parked = boards[3, :n_ranks].data
        self._aborted = boards[4, :1].data
        self._cores = boards[5, :n_ranks].data
        self._master = rank
        self._semaphores = [Semaphore(place) for place in places]
        self._spin = spin

    def post(self, board: memoryview, place: int, value: int, sleepers: Iterable[int]) -> None:
        """Write a word; if now all words of its board are as high, wake those of ``sleepers`` that are parked."""
        if self._spin > 0.0:
            self._cores[self.rank] = current_core()
        if not _IN_ORDER:
            fence()
        board[place] = value
        fence()
        if min(board) >= value:
            self._wake(sleepers)

    def _wake(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self._parked[rank]:
                self._semaphores[rank].release()

    def wait(self, board: memoryview, value: int, check: Callable[[], None]) -> None:
        """Return once all words of a board are at least ``value``; ``check`` is called before each sleep."""
        watch = self._spin > 0.0
        while not (self._watch(board, value) if watch else min(board) >= value):
            watch = self.sleep(board, value, check) and self._spin > 0.0
        if not _IN_ORDER:
            fence()

    def _watch(self, board: memoryview, value: int) -> bool:
        """Look at the words for a while; returns whether all are at least ``value``."""
        core = current_core()
        for place, word in enumerate(board):
            writer = self._master if board is self.sent else place
            if word < value and self._cores[writer] == core:
                return False  # it may have to wait until this rank leaves the core
        spin = self._spin * _IDLE_SPINS if board is self.sent else self._spin
        deadline = time.perf_counter() + spin
        while time.perf_counter() < deadline:
            for _ in range(_LOOKS):
                if min(board) >= value:
                    return True
        return False

    def sleep(self, board: memoryview, value: int, check: Callable[[], None]) -> bool:
        """Park until all words are at least ``value``, at most `POLL` seconds; returns whether anything has come."""
        semaphore = self._semaphores[self.rank]
        self._parked[self.rank] = 1
        try:
            semaphore.drain()
            fence()
            if min(board) >= value:
                return True
            check()
            return semaphore.acquire(POLL)
        finally:
            self._parked[self.rank] = 0

    def abort(self) -> None:
        """Have every rank that waits in a barrier give up."""
        self._aborted[0] = 1
        fence()
        self._wake(range(self.n_ranks))

    @property
    def aborted(self) -> bool:
        """Whether a rank has failed in the command that is being executed."""
        return bool(self._aborted[0])

    def reset(self) -> None:
        """After an aborted command, when all ranks are idle again: lower the flag."""
        self._aborted[0] = 0


class Barrier:
    """Where all ranks meet. To call it is to arrive and to wait; what lies between the two need not wait for others.

    Parameters
    ----------
    signals : Signals
    timeline : Timeline
        Of this rank.
    check : callable
        Raises if the ranks cannot meet any more.

    Attributes
    ----------
    root : int
        The process from which all that meet here descend.
    """

    def __init__(self, signals: Signals, timeline: Timeline, check: Callable[[], None]) -> None:
        self._signals = signals
        self._timeline = timeline
        self.check = check
        self._step = 0
        self.root = os.getpid()

    def restart(self, number: int) -> None:
        """Each rank calls this when it begins with a message, so that all agree on the steps that come."""
        self._step = number << _STEPS_BITS

    def arrive(self) -> int:
        """Tell the others that this rank has got here; returns what to `wait` for."""
        self._step += 1
        signals = self._signals
        signals.post(signals.arrived, signals.rank, self._step, range(signals.n_ranks))
        return self._step

    def wait(self, step: int) -> None:
        """Return once every rank has arrived there."""
        signals, timeline = self._signals, self._timeline
        if not timeline.on or min(signals.arrived) >= step:  # not worth a note
            signals.wait(signals.arrived, step, self.check)
            return
        before = timeline.switch(STRAGGLING)
        signals.wait(signals.arrived, step, self.check)
        timeline.switch(before)

    def __call__(self) -> None:
        self.wait(self.arrive())
