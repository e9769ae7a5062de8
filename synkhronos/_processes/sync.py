"""How long the master waits for its workers.

How the ranks of a session tell each other how far they are, and wait for each other: see ``_native/sync.h``.
"""

from __future__ import annotations

import time
from typing import Any, Callable

from synkhronos._native import native
from synkhronos._processes.timeline import STRAGGLING, Timeline

__all__ = ["ANSWERED", "POLL", "SENT", "Barrier", "Patience", "Signals"]


#: Seconds without a look at the clock that are no waiting.
_PAUSE = 1.0


class Patience:
    """The time that the master has waited for the answers to one message.

    It looks at the clock at least twenty times a second while it waits. So no second counts in which it did not: it
    computed itself, or the whole job was stopped, as batch systems do.

    Parameters
    ----------
    seconds : float or None
        That it waits at most; ``None``: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        """A message is sent."""
        self._waited, self._looked = 0.0, time.monotonic()

    def is_over(self, margin: float = 0.0) -> bool:
        """Look at the clock; returns whether it has waited for longer than it may, and a margin."""
        now = time.monotonic()
        if now - self._looked < _PAUSE:
            self._waited += now - self._looked
        self._looked = now
        return self.seconds is not None and self._waited > self.seconds + margin


#: Longest time between two looks at whether the peers are alive, in seconds.
POLL = native.POLL

#: Boards of words: the number of the master's last message; for each worker, that of the last one that it has answered.
SENT, ANSWERED = native.SENT, native.ANSWERED


class Signals(native.Sync):
    """The words of one session; made by the master before it forks, and inherited by workers.

    Its methods let no handler of a signal wait: ``wait(board, value, check)`` and ``meet(check)`` run them, and call
    ``check``, before each sleep, which takes `POLL` seconds at most. What these raise ends the wait.

    Parameters
    ----------
    words : uint8 array
        The memory, of zeros.
    n_ranks : int
    rank : int
        Of the master.
    spin : float
        Seconds to look at the words before parking.

    Attributes
    ----------
    rank : int
        Of this process; a worker sets it.
    sent : int
        The number of the master's last message.
    answered : list of int
        For each rank, the number of the last message that it has answered; the master's means nothing.
    arrived : list of int
        For each rank, the last step at which it arrived at a barrier.
    aborted : bool
        Whether a rank has failed in the command that is being executed. `abort` raises this flag, and has every rank
        that waits at the barrier give up; `reset` lowers it when all ranks are idle again.
    """

    def __new__(cls, words: Any, n_ranks: int, rank: int, spin: float) -> Signals:
        """Take memory of zeros for the words."""
        return super().__new__(cls, words, n_ranks, rank, spin)


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
    restart : callable
        ``restart(number)``: each rank calls this when it begins with a message, so that all agree on the steps to come.
    arrive : callable
        Tell the others that this rank has got here; returns what to `wait` for.
    """

    def __init__(self, signals: Signals, timeline: Timeline, check: Callable[[], None]) -> None:
        self._signals = signals
        self._timeline = timeline
        self.check = check
        self.restart = signals.restart
        self.arrive = signals.arrive

    def wait(self, step: int) -> None:
        """Return once every rank has arrived there."""
        signals, timeline = self._signals, self._timeline
        if not timeline.on or min(signals.arrived) >= step:  # not worth a note
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
