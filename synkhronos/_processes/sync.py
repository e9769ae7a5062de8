"""Synchronization of the ranks of one node: counters, barrier, the controller's deadline, and a session's status.

Each rank raises its own counters in shared memory, and waits until those of other ranks reach a value. The compiled
core implements this: see ``_native/sync.h``.

``python -m synkhronos top`` shows the status: the processes of the ranks, and their progress by the counters. The
controller keeps a file descriptor of the shared memory open, so that ``top`` finds it in ``/proc``. That program maps
the memory read-only. It sends the session no requests and does not slow it down.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Callable

import numpy as np

from synkhronos._memory import Descriptor, Segment
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


# -- status of a session, for `top`

_MAGIC = int.from_bytes(b"synkran2", "little")
_HEAD = 5  # number of int64 before the pids: magic, n_ranks, master_rank, first, n_all
_SEAT = 64  # bytes of each rank's slot in _native/sync.h; common data of the same size precedes the slots
_OF_LOOP = 4  # number of int64 of each rank's training loop; see `StatusBoard.loops`
_PARKED = 7  # index of `parked` in a slot, in units of int32


def _words_at(n_ranks: int) -> int:
    """Return the offset in bytes of the counters, aligned to 64."""
    return -(-8 * (_HEAD + (1 + _OF_LOOP) * n_ranks) // 64) * 64


class StatusBoard:
    """Writable status of the ranks of one node; its node leader creates it before it forks workers.

    Parameters
    ----------
    n_ranks : int
        Number of ranks on this node.
    master_rank : int
        Rank of this process on this node.
    first, n_all : int
        Global number of this node's first rank, and number of ranks on all nodes.

    Attributes
    ----------
    words : uint8 array
        Memory for the counters of `RankSync`.
    pids : int64 array of shape (n_ranks,)
        Process id of each rank.
    loops : int64 array of shape (n_ranks, 4)
        For each rank in a training loop: the time of its last step, by `time.monotonic_ns`, its number of steps and of
        exchanges, and the bits of its last loss. All but the first are 0 outside of loops.
    close : callable
        Close the descriptor, so that other processes no longer find the session. It is also closed when the board is
        deleted.
    """

    def __init__(self, n_ranks: int, master_rank: int, first: int, n_all: int) -> None:
        segment = Segment.create(_words_at(n_ranks) + native.Sync.bytes_for(n_ranks))
        self.close = Descriptor(os.dup(segment.fileno())).close
        numbers = segment.array((_HEAD + (1 + _OF_LOOP) * n_ranks,), np.int64)
        self.pids = numbers[_HEAD : _HEAD + n_ranks]
        self.loops = numbers[_HEAD + n_ranks :].reshape(n_ranks, _OF_LOOP)
        self.pids[master_rank] = os.getpid()
        numbers[1:_HEAD] = n_ranks, master_rank, first, n_all
        numbers[0] = _MAGIC
        self.words = segment.bytes[_words_at(n_ranks) :]


class SessionStatus:
    """Read-only view of the `StatusBoard` of another process.

    Parameters
    ----------
    path : str
        Path of a file descriptor in ``/proc``.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If the file is not a `StatusBoard`.

    Attributes
    ----------
    n_ranks, master_rank, first, n_all : int
        As in `StatusBoard`.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        numbers = np.frombuffer(memory, np.int64, _HEAD)
        if numbers[0] != _MAGIC:
            raise ValueError(f"{path} is not a status file of a session")
        self.n_ranks, self.master_rank, self.first, self.n_all = map(int, numbers[1:_HEAD])
        seats_at = _words_at(self.n_ranks) + _SEAT
        self._pids = np.frombuffer(memory, np.int64, self.n_ranks, 8 * _HEAD)
        loops = np.frombuffer(memory, np.int64, _OF_LOOP * self.n_ranks, 8 * (_HEAD + self.n_ranks))
        self._loops = loops.reshape(-1, _OF_LOOP)
        seats = np.frombuffer(memory, np.uint8, _SEAT * self.n_ranks, seats_at).reshape(-1, _SEAT)
        self._words, self._small = seats.view(np.int64), seats.view(np.int32)

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [int(pid) for pid in self._pids]

    def look(self) -> list[str]:
        """Return the current activity of each rank, as text; it starts with "waits" if the rank does not compute.

        In a training loop, the numbers of the rank's steps and exchanges follow.
        """
        sent = self._words[self.master_rank, 0]
        answered, parked = self._words[:, 1], self._small[:, _PARKED] != 0
        idle = answered == sent
        idle[self.master_rank] = True
        found, at_rest = [], "waits for a command" if self.first else "Python"
        for rank in range(self.n_ranks):
            if rank == self.master_rank:
                found.append("waits for ranks" if parked[rank] else at_rest if idle.all() else "computes")
            else:
                waits = "waits for a command" if idle[rank] else "waits for ranks" if parked[rank] else ""
                found.append(waits or "computes")
        return [what + _progress(*loop[1:3]) for what, loop in zip(found, self._loops.tolist())]


def _progress(steps: int, exchanges: int) -> str:
    return f", step {steps}, {exchanges} exchanges" if steps else ""
