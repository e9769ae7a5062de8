"""Synchronization of the ranks of one node: progress counters, the barrier, and the controller's deadline.

Each rank raises its own counters in shared memory, and waits until those of other ranks reach a value. The compiled
core implements this: see ``_native/sync.h``.
"""

from __future__ import annotations

import time
from typing import Callable

from synkhronos._native import native
from synkhronos._processes.timeline import STRAGGLING, Timeline

#: A gap of this many seconds or more between two readings of the clock does not count as waiting.
_PAUSE = 1.0


class Deadline:
    """Deadline that counts only the time during which this process really waits.

    A waiting process reads the clock at least twenty times a second. A gap of a second or more therefore does not
    count: the process computed meanwhile, or the batch system had stopped the job.

    Parameters
    ----------
    seconds : float or None
        Longest wait; ``None``: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        """Start to count again from 0, for example when a message is sent."""
        self._waited, self._looked = 0.0, time.monotonic()

    def is_over(self, margin: float = 0.0) -> bool:
        """Read the clock, and return whether the wait exceeds the limit by more than ``margin`` seconds."""
        now = time.monotonic()
        if now - self._looked < _PAUSE:
            self._waited += now - self._looked
        self._looked = now
        return self.seconds is not None and self._waited > self.seconds + margin


#: Longest time between two checks that the other processes are alive, in seconds.
POLL = native.POLL_NS / 1e9

#: Counters: the number of the controller's last message, and of the last message that each worker has answered.
SENT, ANSWERED = native.SENT, native.ANSWERED


class RankSync(native.Sync):
    """Progress counters of the ranks of one node, created before the fork and inherited by the workers.

    ``wait(counter, value, check)`` waits until the counters of all ranks have reached a value, and ``barrier(check)``
    waits at the barrier. Both run pending signal handlers, and call ``check``, before each sleep of at most `POLL`
    seconds. An exception from either ends the wait.

    Parameters
    ----------
    words : uint8 array
        Shared memory, filled with zeros.
    n_ranks : int
        Number of ranks on this node.
    rank : int
        Rank of this process, which is the controller or node leader.
    spin : float
        Seconds to poll the counters before the process sleeps.

    Attributes
    ----------
    rank : int
        Rank of this process; a worker sets it after the fork.
    sent : int
        Number of the controller's last message.
    answered : list of int
        Number of the last message that each rank has answered; the controller's entry has no meaning.
    arrived : list of int
        Last barrier step at which each rank has arrived.
    aborted : bool
        Whether a rank has failed in the current command. `abort` sets this flag, so that ranks that wait at the barrier
        raise an exception. `reset` clears it when all ranks are idle again.
    """


class Barrier:
    """Barrier of the ranks of one node.

    To wait for all ranks, call the barrier. To do other work between arrival and wait, call `arrive` and then `wait`.

    Parameters
    ----------
    sync : RankSync
    timeline : Timeline
        Timeline of this rank.
    check : callable
        Raises if a rank can no longer arrive.

    Attributes
    ----------
    restart : callable
        ``restart(number)`` numbers the next steps after a message. Each rank calls it when it begins with that message.
    arrive : callable
        Report that this rank has arrived, without waiting, and return the step to `wait` for.
    """

    def __init__(self, sync: RankSync, timeline: Timeline, check: Callable[[], None]) -> None:
        self._sync = sync
        self._timeline = timeline
        self.check = check
        self.restart = sync.restart
        self.arrive = sync.arrive

    def wait(self, step: int) -> None:
        """Wait until every rank has arrived at a step."""
        sync, timeline = self._sync, self._timeline
        if not timeline.on or min(sync.arrived) >= step:  # nothing to record
            sync.wait(native.ARRIVED, step, self.check)
            return
        before = timeline.switch(STRAGGLING)
        sync.wait(native.ARRIVED, step, self.check)
        timeline.switch(before)

    def __call__(self) -> None:
        if self._timeline.on:
            self.wait(self.arrive())
        else:
            self._sync.barrier(self.check)
