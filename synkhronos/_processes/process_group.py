"""The ranks of a session, on one machine or on several.

Whom a leader names when other machines keep it waiting.

The processes of a session: starting, signalling, watching and stopping them. Knows nothing of Theano or of commands.

                     mailbox (one, shared memory)
      master ────post `sent`─────> worker  : read the mailbox, work, fill the own answer box
      master <──post `answered`─── worker  : a word for each worker; the last one wakes the master
      master and workers meet at `Team.barrier` inside collectives

Invariants
----------
* One message is outstanding at a time; messages are numbered, and a worker's answer carries its number.
* In every wait a process looks every `POLL` seconds, at the latest, whether its peers live: the master whether a worker
  has died, a worker whether the master has. A worker is also killed by the kernel when the master ends.
* Signals are the master's to handle: workers ignore Ctrl-C, SIGTERM and their like.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._memory import Box, Passage, Segment
from synkhronos._processes.monitor import Board
from synkhronos._processes.rank_process import Member, describe_exit, log
from synkhronos._processes.sync import ANSWERED, SENT, Barrier, Patience, Signals
from synkhronos._processes.timeline import CONTROL, OUTSIDE, Timeline
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.progress import counted
from synkhronos._utils.resources import count_cores
from synkhronos.errors import CLOSED_WITHIN, CollectiveAborted, SessionError, WorkerDied, WorkerTimeout

__all__ = ["MasterDied", "Team", "World", "check_exchange", "check_machines", "check_order", "kind_of"]


def kind_of(device: str) -> str:
    """``"cpu"``, ``"cuda"`` or ``"opencl"``: what a device is, by its name."""
    return device.rstrip("0123456789:")


class World(NamedTuple):
    """How the ranks are numbered: machine by machine.

    Attributes
    ----------
    sizes : tuple of int
        The number of ranks on each machine.
    machine : int
        The number of this one.
    master_rank : int
        Among all ranks.
    line : Line, or None
        In the leader of a machine: the way to the other leaders.
    exchange : str, or None
        The type that float32 numbers have between machines; ``None``: their own.
    """

    sizes: tuple[int, ...]
    machine: int
    master_rank: int
    line: Any = None
    exchange: str | None = None

    @property
    def n_ranks(self) -> int:
        """The number of all ranks."""
        return sum(self.sizes)

    @property
    def first(self) -> int:
        """The number, among all ranks, of the first one of this machine."""
        return sum(self.sizes[: self.machine])

    def ranks_of(self, machine: int) -> range:
        """The ranks of a machine."""
        first = sum(self.sizes[:machine])
        return range(first, first + self.sizes[machine])


#: Each leader names a rank of its own machine first; after so many seconds more it is the leader itself that is silent.
_MARGIN = 1.0


def check_order(team: Team) -> None:
    """Raise, in the leader of another machine, if the master has said meanwhile that the ranks are to end."""
    world = team.world
    if world.machine and not team.stopped and world.line.is_told_to_stop():
        raise WorkerTimeout("the first machine has said that the ranks are to end", team.rank, 0)


def check_machines(team: Team, silent: Sequence[int]) -> None:
    """Raise if the ranks of this machine cannot go on, or, in the master, if another one does not answer in time.

    Parameters
    ----------
    team : Team
        Of this machine, whose ranks keep nobody waiting.
    silent : sequence of int
        The machines that are waited for.
    """
    patience, world = team.patience, team.world
    check_order(team)
    is_over = patience.is_over(_MARGIN)
    if team.dead() or team.stopped:
        team.check_workers()  # which raises
    elif silent and is_over and not world.machine:
        rank = world.ranks_of(silent[0])[0]
        name = f"rank {rank}, which leads machine {silent[0]} ({world.line.hosts[silent[0]]})"
        raise WorkerTimeout(f"{name}, did not answer within {patience.seconds} seconds", rank, 0)


def check_exchange(team: Team) -> None:
    """Raise, in the master, if other leaders do not go on with an exchange of arrays in time."""
    patience, world = team.patience, team.world
    if world.machine or not patience.is_over(_MARGIN):
        return
    others = range(1, len(world.sizes))
    names = ", ".join(f"machine {machine} ({world.line.hosts[machine]})" for machine in others)
    who = f"the leader of {names}" if len(others) == 1 else f"a leader of {names}"
    text = f"{who}, did not go on with an exchange of arrays within {patience.seconds} seconds"
    raise WorkerTimeout(text, world.ranks_of(1)[0], 0)


_SPIN_SECONDS = 1e-3  # how long a wait looks at the words before it parks


class MasterDied(BaseException):
    """Raised in a worker whose master is gone."""


class Team:
    """The workers of one session, one for each rank but the master's.

    Parameters
    ----------
    devices : list of str
    master_rank : int
    timeout : float or None
        Seconds that the master waits for the answers to a message; see `Patience`.
    world : World, optional
        Where these ranks are among all of the session; default: they are all.

    Attributes
    ----------
    barrier : Barrier
        Where all ranks meet; it raises if that cannot happen any more.
    patience : Patience
    passage : Passage
        In a worker: the way for memory to and from the master.
    """

    def __init__(self, devices: list[str], master_rank: int, timeout: float | None, world: World | None = None) -> None:
        self.world = world or World((len(devices),), 0, master_rank)
        self.devices = devices
        self.n_ranks = len(devices)
        self.master_rank = master_rank
        self.workers = [rank for rank in range(self.n_ranks) if rank != master_rank]
        self._master_pid = os.getpid()
        self._board = Board(self.n_ranks, master_rank, self.world.first, self.world.n_ranks)
        spin = _SPIN_SECONDS if self.n_ranks <= count_cores() else 0.0
        self.signals = Signals(self._board.words, self.n_ranks, master_rank, spin)
        finished = Segment.create(16 * self.n_ranks)
        finished.close_fd()
        self.timeline = Timeline(finished.array((2, self.n_ranks), np.int64), master_rank)
        self.barrier = Barrier(self.signals, self.timeline, self.check)
        self._number = 0  # of the last message
        self._collected = 0  # and of the last one whose answers the master has
        self.stopped = False
        self.patience = Patience(timeout)
        self._work: Callable[[int], None]
        self._mailbox = Box()
        self._answers = [Box() for _ in range(self.n_ranks)]
        self._members: dict[int, Member] = {}
        self.passage: Passage

    # -- the master's side

    def start(self, work: Callable[[int], None]) -> None:
        """Fork the workers; worker ``rank`` runs ``work(rank)`` and exits when that returns."""
        self._work = work
        with counted("starting workers", self.workers) as ranks:
            for rank in ranks:
                self._fork(rank)

    def _fork(self, rank: int) -> None:
        with deferred_interrupts():
            if rank in self._members:
                self._members[rank].let_go()
            member = Member(lambda passage: self._run(rank, passage), self._members.values())
            self._members[rank], self._board.pids[rank] = member, member.process.pid

    def _give(self, segment: Segment) -> None:
        for member in list(self._members.values()):
            member.passage.give(segment)

    def send(self, message: bytes, memory: Sequence[Segment] = ()) -> None:
        """Hand every worker the same message, and memory that it names: sent once the word is written."""
        for segment in memory:
            self._give(segment)
        self._mailbox.put(message, self._give)
        self._number = number = self.signals.sent + 1
        self.barrier.restart(number)
        self.patience.begin()
        self.signals.post(SENT, number)

    @property
    def outstanding(self) -> bool:
        """Whether a message has been sent whose answers were not collected."""
        return self.signals.sent != self._collected

    def collect(self) -> list[bytes | None]:
        """Wait for the answers of all workers, by rank; ``None`` at the master's. May be called again if interrupted.

        Raises
        ------
        WorkerDied
            If a worker is dead.
        WorkerTimeout
            If workers take longer than the timeout.
        """
        self.timeline.rest(self._number)
        self.signals.wait(ANSWERED, self._number, self.check_workers)
        self.timeline.resume(self._number, CONTROL)
        answers: list[bytes | None] = [None] * self.n_ranks
        for rank, member in list(self._members.items()):
            box = self._answers[rank]
            answers[rank] = box.get(member.passage)
            if box.is_long:
                member.passage.clear()  # of answers that nobody has read
        if self.stopped:
            raise SessionError(CLOSED_WITHIN)
        self._collected = self._number
        return answers

    def unanswered(self) -> list[int]:
        """The workers that have not answered the last message."""
        answered = self.signals.answered
        return [rank for rank in self.workers if answered[rank] != self._number]

    def check_workers(self) -> None:
        """Raise `WorkerDied` if any worker is dead, `WorkerTimeout` if the time is up."""
        if self.stopped:
            raise SessionError(CLOSED_WITHIN)
        check_order(self)
        for rank in self.dead():
            process = self._members[rank].process
            end = describe_exit(process.exitcode)
            text = f"the worker of rank {rank} ({self.devices[rank]}, pid {process.pid}) {end}"
            raise WorkerDied(text, rank=rank, pid=process.pid, exitcode=process.exitcode)
        if self.patience.is_over():
            silent = self.unanswered()
            steps = self.signals.arrived
            rank = min(silent, key=lambda rank: steps[rank], default=self.master_rank)
            pid = self._members[rank].process.pid if rank in self.workers else os.getpid()
            name = f"rank {rank} ({self.devices[rank]}, pid {pid})"
            raise WorkerTimeout(f"{name} did not answer within {self.patience.seconds} seconds", rank, pid)

    def dead(self) -> list[int]:
        """The workers whose processes have ended; none before they are started, and when they were stopped."""
        return [rank for rank, member in list(self._members.items()) if member.process.exitcode is not None]

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until each worker has answered or is dead, at most ``seconds``; returns whether that came about."""
        patience = Patience(seconds)
        while set(self.unanswered()) - set(self.dead()):
            if patience.is_over():
                return False
            self.signals.park(ANSWERED, self._number)
        return True

    def replace(self, ranks: Sequence[int]) -> None:
        """Fork new workers in place of dead ones, while all others are idle."""
        self.signals.reset()
        for rank in ranks:
            self.signals.set_answered(rank, self._number)
            self._fork(rank)
        self._collected = self._number

    def stop(self, grace: float = 5.0) -> None:
        """Wait for the workers, which were told to stop; kill those that have not ended after ``grace`` seconds."""
        if self.stopped:
            return
        self.stopped = True
        self._board.close()
        patience = Patience(grace)
        for rank, member in self._members.items():
            process = member.process
            if not process.join(patience):
                if grace > 0:
                    log(logging.WARNING, "the worker of rank %d (pid %d) did not stop and is killed", rank, process.pid)
                process.kill()
        for member in self._members.values():
            member.let_go()
        self._members.clear()

    # -- a worker's side

    def _run(self, rank: int, passage: Passage) -> None:
        self._board.close()
        self.signals.rank = rank
        self.passage = passage
        with contextlib.suppress(MasterDied):
            self.check_master()
            self._work(rank)

    def check_master(self) -> None:
        """Raise `MasterDied` if this process has lost its master."""
        if os.getppid() != self._master_pid:
            raise MasterDied

    def receive(self) -> bytes:
        """Wait for the master's next message."""
        self.signals.wait(SENT, self._number + 1, self.check_master)
        self.timeline.resume(self._number, OUTSIDE)
        self.timeline.begin()
        self._number += 1
        self.barrier.restart(self._number)
        return self._mailbox.get(self.passage)

    def answer(self, message: bytes) -> None:
        """Answer the message."""
        self._answers[self.signals.rank].put(message, self.passage.give)
        self.timeline.end()
        self.timeline.rest(self._number)
        self.signals.post(ANSWERED, self._number)

    # -- both

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.signals.rank

    def check(self) -> None:
        """Raise if the ranks cannot meet any more: one has failed or is dead, or the time is up."""
        if self.signals.aborted:
            raise CollectiveAborted("another rank failed")
        if self.signals.rank == self.master_rank:
            self.check_workers()
        else:
            self.check_master()
