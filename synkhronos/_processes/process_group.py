"""Process group of one node: start, message, monitor and stop the worker processes.

The controller and its workers communicate through shared memory::

    controller ──post SENT──────> worker   reads the mailbox, executes the command, fills its answer mailbox
    controller <──post ANSWERED── worker   one counter per worker; the last worker wakes the controller
    all ranks wait for each other at `ProcessGroup.barrier`, in collectives

In a session on several nodes, each node leader has its own `ProcessGroup`, in which it acts as the controller. `World`
numbers the ranks of all nodes.

Invariants
----------
* At most one message is outstanding. Messages are numbered, and a worker posts the number of the message that it has
  answered.
* A waiting process checks at least every `POLL` seconds that the other processes are alive: the controller checks its
  workers, and a worker checks the controller. In addition, workers are killed when the controller ends.
* Only the controller handles signals. Workers ignore Ctrl-C, SIGTERM and similar signals.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, Optional, Protocol

import numpy as np

from synkhronos._memory import FdChannel, Mailbox, Segment
from synkhronos._native import native
from synkhronos._processes.rank_process import RankProcess, describe_exit, log
from synkhronos._processes.sync import ANSWERED, SENT, Barrier, Deadline, RankSync, StatusBoard
from synkhronos._processes.timeline import CONTROL, OUTSIDE, Timeline
from synkhronos._utils.display import counted
from synkhronos._utils.interrupts import deferred_interrupts, handle_second_signal
from synkhronos._utils.resources import count_cores
from synkhronos.errors import CLOSED_WITHIN, CollectiveAborted, SessionError, WorkerDied, WorkerTimeout


def kind_of(device: str) -> str:
    """Return the kind of a device from its name: ``"cpu"``, ``"cuda"`` or ``"opencl"``."""
    return device.rstrip("0123456789:")


#: Arrays that a leader sends to others, or receives from them, each with the number of the other node.
Arrays = list[tuple[int, np.ndarray]]

#: Completes an exchange of arrays on behalf of a leader that has failed.
Completion = Callable[[], None]

#: Place of a vote: the number of its command, and its own number within that command.
Place = tuple[int, int]

#: Words and small arrays of all leaders that have voted, in node order.
Ballots = list[tuple[Optional[int], list[np.ndarray]]]


def agree(ballots: Iterable[tuple[int | None, Any]]) -> bool:
    """Return whether an exchange of arrays takes place: the words of all leaders are equal and not ``None``."""
    words = {word for word, _ in ballots}
    return len(words) == 1 and None not in words


class LeaderTransport(Protocol):
    """Connection of a node leader to the other leaders, as collectives use it; `LeaderComm` implements it by MPI.

    Attributes
    ----------
    node : int
        Number of this node.
    hosts : list of str
        Host names of all nodes.
    exchange : Exchange
        Exchange of arrays with the other leaders.
    may_poll : bool
        Whether a thread may advance exchanges.
    """

    node: int
    hosts: list[str]
    exchange: native.Exchange
    may_poll: bool

    def is_ordered_to_stop(self) -> bool:
        """Return whether the controller has ordered this leader to end its ranks."""

    def note_steps(self, steps: int) -> None:
        """Report to the other nodes the number of steps that the ranks of this node have made in a training loop."""

    def makes_steps(self, node: int, seconds: float) -> bool:
        """Return whether the ranks of another node have made steps of a training loop in the last seconds."""

    def vote(
        self, word: int | None, arrays: Sequence[np.ndarray], check: Callable[[list[int]], None], fill_in: Completion
    ) -> Ballots:
        """Exchange a number and small arrays with all leaders; return those of each leader, in node order."""

    def cast(self, word: int | None, arrays: Sequence[np.ndarray], fill_in: Completion) -> Place:
        """Begin to exchange a number and small arrays with all leaders, as `vote`, without waiting for theirs."""

    def votes_at(self, place: Place) -> Ballots | None:
        """Return those of each leader; ``None`` if some have not arrived."""

    def await_votes(self, place: Place, check: Callable[[list[int]], None]) -> Ballots:
        """Wait for those of each leader."""

    def end_exchange(self, fill_in: Completion) -> None:
        """Note that an exchange after a vote is complete."""

    def check_aborted(self) -> None:
        """Raise `CollectiveAborted` if a leader has aborted the current command."""

    def leave(self) -> None:
        """Abort the current command, and take part in the rest of its exchanges."""

    def reserve_tags(self, n: int) -> int:
        """Return the number of the first of ``n`` pieces. All leaders reserve the same numbers in the same order."""

    def begin_piece(
        self,
        number: int,
        sends: tuple[Arrays, Arrays],
        receives: tuple[Arrays, Arrays],
        reduction: tuple[Any, ...] | None,
        narrowing: tuple[Any, ...] | None,
        has_failed: bool,
    ) -> native.Piece:
        """Begin to exchange a piece in two steps; see `native.Exchange.begin`."""

    def complete(self, is_done: Callable[[], bool], check: Callable[[], None], is_leaving: bool) -> None:
        """Wait until ``is_done()`` returns ``True``; ``check`` is called regularly, and may raise."""


class World(NamedTuple):
    """Numbering of the ranks of all nodes, node by node.

    Attributes
    ----------
    sizes : tuple of int
        Number of ranks on each node.
    node : int
        Number of this node.
    master_rank : int
        Global rank of the controller.
    comm : LeaderTransport or None
        Connection to the other node leaders; ``None`` in a session on one node.
    wire_dtype : str or None
        Wire dtype of float32 data between nodes; ``None``: float32.
    """

    sizes: tuple[int, ...]
    node: int
    master_rank: int
    comm: LeaderTransport | None = None
    wire_dtype: str | None = None

    @property
    def leaders(self) -> LeaderTransport:
        """Connection to the other node leaders; only in a session on several nodes."""
        assert self.comm is not None
        return self.comm

    @property
    def n_ranks(self) -> int:
        """Number of ranks on all nodes."""
        return sum(self.sizes)

    @property
    def first(self) -> int:
        """Global number of this node's first rank."""
        return sum(self.sizes[: self.node])

    def ranks_of(self, node: int) -> range:
        """Return the global ranks of a node."""
        first = sum(self.sizes[:node])
        return range(first, first + self.sizes[node])


#: Seconds after the timeout until a node leader counts as silent. Until then it can report a silent rank of its node.
_MARGIN = 1.0


def check_order(group: ProcessGroup) -> None:
    """On a node other than the controller's: raise `WorkerTimeout` if the controller has ordered this node to stop.

    Also report the progress of this node to the controller.
    """
    world = group.world
    if world.node and not group.stopped:
        world.leaders.note_steps(int(group.loops[:, 1].sum()))
    if world.node and not group.stopped and world.leaders.is_ordered_to_stop():
        raise WorkerTimeout("node 0 has ordered the ranks to end", group.rank, 0)


def check_nodes(group: ProcessGroup, silent: Sequence[int]) -> None:
    """Raise if a node leader must no longer wait for other nodes.

    That is the case if a rank of its own node is dead, if the session was closed, or, in the controller, if another
    node does not answer in time.

    Parameters
    ----------
    group : ProcessGroup
        Process group of this node, whose own ranks have arrived or answered.
    silent : sequence of int
        Numbers of the nodes that have not answered.

    Raises
    ------
    WorkerDied, WorkerTimeout, SessionError
    """
    deadline, world = group.deadline, group.world
    check_order(group)
    is_over = deadline.is_over(_MARGIN)
    if group.dead() or group.stopped:
        group.check_workers()  # raises
    elif is_over and not world.node:
        assert deadline.seconds is not None
        silent = [node for node in silent if not world.leaders.makes_steps(node, deadline.seconds)]
        if not silent:
            return
        rank = world.ranks_of(silent[0])[0]
        name = f"rank {rank}, which leads node {silent[0]} ({world.leaders.hosts[silent[0]]})"
        raise WorkerTimeout(f"{name}, did not answer within {deadline.seconds} seconds", rank, 0)


def check_exchange(group: ProcessGroup) -> None:
    """Raise `WorkerTimeout` in the controller if other node leaders do not continue an exchange of arrays in time."""
    deadline, world = group.deadline, group.world
    if world.node or not deadline.is_over(_MARGIN):
        return
    others = range(1, len(world.sizes))
    assert deadline.seconds is not None
    if any(world.leaders.makes_steps(node, deadline.seconds) for node in others):
        return
    names = ", ".join(f"node {node} ({world.leaders.hosts[node]})" for node in others)
    who = f"the leader of {names}" if len(others) == 1 else f"a leader of {names}"
    text = f"{who} did not continue an exchange within {deadline.seconds} seconds"
    raise WorkerTimeout(text, world.ranks_of(1)[0], 0)


_SPIN_SECONDS = 1e-3  # a wait polls the counters this long before it sleeps; 5 times as long for the next message


class ControllerDied(BaseException):
    """Exception in a worker whose controller has ended."""


class ProcessGroup:
    """Process group of one node: the process that creates it, and one forked worker for each other rank.

    The creating process is the controller or, on other nodes, the node leader. Below, "controller" means either.

    Parameters
    ----------
    devices : list of str
        Device of each rank.
    master_rank : int
        Rank of this process on this node.
    timeout : float or None
        Seconds that the controller waits for the answers to a message; see `Deadline`.
    world : World, optional
        Numbering of the ranks of all nodes. Default: this node has all ranks.

    Attributes
    ----------
    barrier : Barrier
        Barrier of all ranks of this node. It raises if a rank can no longer arrive.
    deadline : Deadline
        Deadline for the answers to the last message.
    number : int
        Number of the last message that this process has sent or received. In a new worker, it is the number of the last
        message before its fork.
    loops : int64 array of shape (n_ranks, 4)
        See `StatusBoard`. A rank that makes steps of a loop does not count as silent.
    channel : FdChannel
        Channel that passes memory to and from the controller; only in a worker.
    ahead, is_lost, n_shipped
        Constants, for the interface that this class shares with `MultiNodeGroup`.
    """

    is_lost = False
    n_shipped = 0

    def __init__(self, devices: list[str], master_rank: int, timeout: float | None, world: World | None = None) -> None:
        self.world = world or World((len(devices),), 0, master_rank)
        self.devices = devices
        self.n_ranks = len(devices)
        self.master_rank = master_rank
        self.ahead = [0] * self.n_ranks
        self.workers = [rank for rank in range(self.n_ranks) if rank != master_rank]
        self._controller_pid = os.getpid()
        self._board = StatusBoard(self.n_ranks, master_rank, self.world.first, self.world.n_ranks)
        spin = _SPIN_SECONDS if self.n_ranks <= count_cores() else 0.0
        self.sync = RankSync(self._board.words, self.n_ranks, master_rank, spin)
        shared = Segment.create(16 * self.n_ranks)
        shared.close_fd()
        self.timeline = Timeline(shared.array((2, self.n_ranks), np.int64), master_rank)
        self.loops = self._board.loops
        self.barrier = Barrier(self.sync, self.timeline, self.check)
        self.number = 0
        self._collected = 0  # number of the last message whose answers were collected
        self.stopped = False
        self.deadline = Deadline(timeout)
        self._work: Callable[[int], None]
        self._mailbox = Mailbox()
        self._answers = [Mailbox() for _ in range(self.n_ranks)]
        self._members: dict[int, RankProcess] = {}
        self.channel: FdChannel

    # -- controller

    def start(self, work: Callable[[int], None]) -> None:
        """Fork the workers; worker ``rank`` runs ``work(rank)`` and exits when that returns."""
        self._work = work
        with counted("starting workers", self.workers) as ranks:
            for rank in ranks:
                self._fork(rank)

    def _fork(self, rank: int) -> None:
        """Fork the worker of a rank, or a new one in place of a dead one."""
        with deferred_interrupts():
            if rank in self._members:
                self._members[rank].channel.close()
            member = RankProcess(lambda channel: self._run(rank, channel), self._members.values())
            self._members[rank], self._board.pids[rank] = member, member.process.pid

    def _give(self, segment: Segment) -> None:
        """Pass a segment to all workers."""
        for member in list(self._members.values()):
            member.channel.give(segment)

    def send(self, message: bytes, memory: Sequence[Segment] = ()) -> None:
        """Send all workers a message.

        The message counts as sent from the moment when the counter ``SENT`` is posted.

        Parameters
        ----------
        message : bytes
        memory : sequence of Segment
            Segments that the message names; workers receive their file descriptors.
        """
        for segment in memory:
            self._give(segment)
        self._mailbox.put(message, self._give)
        self.number = number = self.sync.sent + 1
        self.barrier.restart(number)
        self.deadline.begin()
        self.sync.post(SENT, number)

    @property
    def outstanding(self) -> bool:
        """Whether a message has been sent whose answers were not collected."""
        return self.sync.sent != self._collected

    def collect(self) -> list[bytes | None]:
        """Wait for the answers of all workers.

        After an interrupt, it may be called again.

        Returns
        -------
        list of (bytes or None)
            Answer of each rank; ``None`` for the controller.

        Raises
        ------
        WorkerDied
            If a worker is dead.
        WorkerTimeout
            If workers take longer than the timeout.
        SessionError
            If the session was closed while this call waited.
        """
        timeline = self.timeline
        if timeline.on:
            timeline.rest(self.number)
        self.sync.wait(ANSWERED, self.number, self._check_answers)
        if timeline.on:
            timeline.resume(self.number, CONTROL)
        answers: list[bytes | None] = [None] * self.n_ranks
        for rank, member in list(self._members.items()):
            box = self._answers[rank]
            answers[rank] = box.get(member.channel)
            if box.is_long:
                member.channel.clear()  # drop segments of earlier answers that nobody has read
        if self.stopped:
            raise SessionError(CLOSED_WITHIN)
        self._collected = self.number
        return answers

    def unanswered(self) -> list[int]:
        """Return the workers that have not answered the last message."""
        answered = self.sync.answered
        return [rank for rank in self.workers if answered[rank] != self.number]

    def _check_answers(self) -> None:
        """Check as `check_workers`; on another node than the controller's, pass an abort on to the workers."""
        self.check_workers()
        if self.world.node:
            try:
                self.world.leaders.check_aborted()
            except CollectiveAborted:
                self.sync.abort()

    def check_workers(self) -> None:
        """Raise if the controller must no longer wait for its workers.

        Raises
        ------
        WorkerDied
            If a worker is dead.
        WorkerTimeout
            If the deadline is over. It names the rank that has passed the fewest barriers, because the others wait for
            it.
        SessionError
            If the session was closed.
        """
        if self.stopped:
            raise SessionError(CLOSED_WITHIN)
        handle_second_signal()
        check_order(self)
        for rank in self.dead():
            process = self._members[rank].process
            end = describe_exit(process.exitcode)
            text = f"the worker of rank {rank} ({self.devices[rank]}, pid {process.pid}) {end}"
            raise WorkerDied(text, rank=rank, pid=process.pid, exitcode=process.exitcode)
        if self.deadline.is_over():
            silent = self.unanswered()
            last = max([int(self.loops[rank, 0]) for rank in silent], default=0)
            if self.deadline.seconds is not None and time.monotonic_ns() - last < self.deadline.seconds * 1e9:
                return
            steps = self.sync.arrived
            rank = min(silent, key=lambda rank: steps[rank], default=self.master_rank)
            pid = self._members[rank].process.pid if rank in self.workers else os.getpid()
            name = f"rank {rank} ({self.devices[rank]}, pid {pid})"
            raise WorkerTimeout(f"{name} did not answer within {self.deadline.seconds} seconds", rank, pid)

    def dead(self) -> list[int]:
        """Return the ranks of workers whose processes have ended; empty before `start` and after `stop`."""
        return [rank for rank, member in list(self._members.items()) if member.process.exitcode is not None]

    def report(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return the offsets of the ranks' clocks and counts of other nodes' shared heaps, as `MultiNodeGroup.report`.

        On one node, all are zeros.
        """
        return self.ahead, [(0, 0, 0)] * self.n_ranks

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until each worker has answered or is dead.

        Parameters
        ----------
        seconds : float, optional
            Longest wait; default: no limit.

        Returns
        -------
        bool
            ``False`` if the wait exceeded the limit.
        """
        deadline = Deadline(seconds)
        while set(self.unanswered()) - set(self.dead()):
            if deadline.is_over():
                return False
            self.sync.park(ANSWERED, self.number)
        return True

    def replace(self, ranks: Sequence[int]) -> None:
        """Fork new workers for the ranks of dead ones. All other workers must be idle."""
        self.sync.reset()
        for rank in ranks:
            self.sync.set_answered(rank, self.number)
            self._fork(rank)
        self._collected = self.number

    def stop(self, grace: float = 5.0) -> None:
        """Wait until the workers have ended, and kill those that still run after ``grace`` seconds.

        Unless ``grace`` is 0, the workers must have received the message to stop.
        """
        if self.stopped:
            return
        self.stopped = True
        self._board.close()
        deadline = Deadline(grace)
        for rank, member in self._members.items():
            process = member.process
            if not process.join(deadline):
                if grace > 0:
                    log(logging.WARNING, "the worker of rank %d (pid %d) did not stop and is killed", rank, process.pid)
                process.kill()
        for member in self._members.values():
            member.channel.close()
        self._members.clear()

    def await_end(self) -> None:
        """Do nothing, because `stop` has waited for all ranks of this node."""

    # -- worker

    def _run(self, rank: int, channel: FdChannel) -> None:
        """Run in a new worker until its work or its controller ends."""
        self._board.close()
        self.sync.rank = rank
        self.channel = channel
        with contextlib.suppress(ControllerDied):
            self.check_controller()
            self._work(rank)

    def check_controller(self) -> None:
        """Raise `ControllerDied` if the controller of this worker has ended."""
        if os.getppid() != self._controller_pid:
            raise ControllerDied

    def receive(self) -> bytes:
        """Wait for the controller's next message, and return it."""
        self.sync.wait(SENT, self.number + 1, self.check_controller)
        if self.timeline.on:
            self.timeline.resume(self.number, OUTSIDE)
            self.timeline.begin()
        self.number += 1
        self.barrier.restart(self.number)
        return self._mailbox.get(self.channel)

    def answer(self, message: bytes) -> None:
        """Send the controller the answer to the last message."""
        self._answers[self.sync.rank].put(message, self.channel.give)
        if self.timeline.on:
            self.timeline.end()
            self.timeline.rest(self.number)
        self.sync.post(ANSWERED, self.number)

    # -- controller and worker

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.sync.rank

    def check(self) -> None:
        """Raise if a rank can no longer arrive at the barrier: it has failed or is dead, or the time is up."""
        if self.sync.aborted:
            raise CollectiveAborted("another rank failed")
        if self.sync.rank == self.master_rank:
            self.check_workers()
            if self.world.comm is not None:
                self.world.leaders.check_aborted()
        else:
            self.check_controller()
