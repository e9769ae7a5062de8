"""Synchronization of the ranks of one node: progress words, the barrier, and the controller's deadline.

Each rank writes numbers ("words") to shared memory and waits until others reach a value; the compiled core implements
the words, see ``_native/sync.h``.
"""

from __future__ import annotations

import time
from typing import Any, Callable

from synkhronos._native import native
from synkhronos._processes.timeline import STRAGGLING, Timeline

#: Time between two looks at the clock, in seconds, from which on it does not count as waiting.
_PAUSE = 1.0


class Deadline:
    """Deadline for the answers to one message, which counts only the time that the controller really waits.

    While it waits, the controller looks at the clock at least twenty times a second. A gap of a second or more does not
    count: the controller computed, or the batch system had stopped the job.

    Parameters
    ----------
    seconds : float or None
        Longest wait; ``None``: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        """Restart the count, when a message is sent."""
        self._waited, self._looked = 0.0, time.monotonic()

    def is_over(self, margin: float = 0.0) -> bool:
        """Look at the clock; return whether the wait has exceeded the limit by more than ``margin`` seconds."""
        now = time.monotonic()
        if now - self._looked < _PAUSE:
            self._waited += now - self._looked
        self._looked = now
        return self.seconds is not None and self._waited > self.seconds + margin


#: Longest time between two checks whether the peers are alive, in seconds.
POLL = native.POLL

#: Words: number of the controller's last message; for each worker, number of the last message that it has answered.
SENT, ANSWERED = native.SENT, native.ANSWERED


class Signals(native.Sync):
    """Words of one session; the controller makes them before it forks, and workers inherit them.

    ``wait(board, value, check)`` and ``meet(check)`` never delay handlers of signals: they run them, and call
    ``check``, before each sleep, and a sleep takes at most `POLL` seconds. An exception of these ends the wait.

    Parameters
    ----------
    words : uint8 array
        Memory, filled with zeros.
    n_ranks : int
    rank : int
        Rank of the controller.
    spin : float
        Seconds to poll the words before parking.

    Attributes
    ----------
    rank : int
        Rank of this process; a worker sets it.
    sent : int
        Number of the controller's last message.
    answered : list of int
        For each rank, number of the last message that it has answered; the controller's entry has no meaning.
    arrived : list of int
        For each rank, the last step at which it arrived at a barrier.
    aborted : bool
        Whether a rank has failed in the current command. `abort` sets this flag, so that every rank that waits at the
        barrier gives up; `reset` clears it when all ranks are idle again.
    """

    def __new__(cls, words: Any, n_ranks: int, rank: int, spin: float) -> Signals:
        """Place the words in memory that is filled with zeros."""
        return super().__new__(cls, words, n_ranks, rank, spin)


class Barrier:
    """Barrier of the ranks of one node. A call arrives and waits; `arrive` and `wait` do the two steps one by one.

    Parameters
    ----------
    signals : Signals
    timeline : Timeline
        Timeline of this rank.
    check : callable
        Raises if a rank can no longer arrive.

    Attributes
    ----------
    restart : callable
        ``restart(number)``: each rank calls it when it begins with a message, so that all agree on the next steps.
    arrive : callable
        Report that this rank has arrived; returns the step to `wait` for. Code between the two calls need not wait.
    """

    def __init__(self, signals: Signals, timeline: Timeline, check: Callable[[], None]) -> None:
        self._signals = signals
        self._timeline = timeline
        self.check = check
        self.restart = signals.restart
        self.arrive = signals.arrive

    def wait(self, step: int) -> None:
        """Return once every rank has arrived at a step."""
        signals, timeline = self._signals, self._timeline
        if not timeline.on or min(signals.arrived) >= step:  # no wait that would be worth recording
            signals.wait(native.ARRIVED, step, self.check)
            return
        before = timeline.switch(STRAGGLING)
        signals.wait(native.ARRIVED, step, self.check)
        timeline.switch(before)

    def __call__(self) -> None:
        if self._timeline.on:
            self.wait(self.arrive())
        else:
            self._signals.meet(self.check)
