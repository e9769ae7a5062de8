"""Process group of all nodes, for the dispatcher: the methods of a `ProcessGroup`, with global rank numbers.

The controller's own process group receives each message as in a session on one node. The leaders of the other nodes
receive the same message with the data that their nodes need for it, and return the answers of their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from synkhronos._memory import Segment, SegmentTable
from synkhronos._multinode.leader_comm import ORDER, LeaderComm, MultiNodeSignals
from synkhronos._multinode.node_messages import Answer, Bring, Do, Look, Lost, Stop, Tell
from synkhronos._multinode.shipping import Shipment, Shipping
from synkhronos._processes import STRAGGLING, Deadline, ProcessGroup, check_machines
from synkhronos._rank import Decoder, Envelope
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos.errors import CLOSED_WITHIN, SessionError, WorkerDied, WorkerTimeout

__all__ = ["MultiNodeGroup"]

_QUESTIONS = 8
_STOP_SECONDS = 5.0  # that a leader may take to stop its ranks, and then to answer


class MultiNodeGroup:
    """All ranks of all nodes.

    Parameters
    ----------
    team : ProcessGroup
        Process group of the controller's node.
    devices : list of str
        Devices of all ranks.
    segments : SegmentTable
        The controller's.

    Attributes
    ----------
    signals : MultiNodeSignals
        Signals that reach all nodes.
    ahead : list of int
        How far each rank's clock was ahead of the controller's when this object was made, in nanoseconds.
    """

    def __init__(self, team: ProcessGroup, devices: list[str], segments: SegmentTable) -> None:
        world = team.world
        self.devices, self.n_ranks, self.master_rank = devices, world.n_ranks, world.master_rank
        self.workers = [rank for rank in range(self.n_ranks) if rank != self.master_rank]
        self.timeline, self.start = team.timeline, team.start
        self.signals = MultiNodeSignals(team, world.line)
        self._team, self._world = team, world
        self._line: LeaderComm = world.line
        self._shipping = Shipping(segments, world)
        self._decoder = Decoder()
        self._own: list[bytes | None] | None = None  # answers of the controller's node
        self._waiting = False  # for other nodes
        self._sent = 0  # time of the last message
        self._told: dict[int, int] = {}  # number of the last order to each node
        self._waited: dict[int, int] = {}  # nanoseconds that each node waited for others after its last answer
        self.ahead = self.tell()[0]

    def send(self, message: bytes, memory: Sequence[Segment] = ()) -> None:
        """Send a message, as `ProcessGroup.send`."""
        envelope: Envelope = self._decoder.loads(message)
        self._doubt()
        self._told.clear()
        self._look_for_files(envelope)
        self._shipping.forget(envelope.release.segments)
        loads = [self._bring(envelope, machine) for machine in self._line.others]
        with deferred_interrupts():  # all nodes receive it, or none
            self._own, self._waiting, self._sent = None, True, monotonic_ns()
            self._line.begin(self._line.number + 1)
            for machine, (cargo, refusal) in zip(self._line.others, loads):
                order = Do(self._line.number, message, cargo, refusal, self._waited.get(machine, 0))
                self._line.send(machine, ORDER, order, has_rows=bool(cargo.fill))
            self._told = dict.fromkeys(self._line.others, self._line.number)
            self._team.send(message, memory)

    def _doubt(self) -> None:
        """Assume nothing about the memory of nodes that have not confirmed the data of the last command."""
        for machine in self._line.others:
            answer = self._line.answers.get(machine)
            if not isinstance(answer, Answer) or answer.number != self._told.get(machine) or answer.lacks:
                self._shipping.doubt(machine)

    def _bring(self, envelope: Envelope, machine: int) -> tuple[Shipment, Exception | None]:
        """Send a node the data for a command, except for the last piece.

        Returns
        -------
        last : Shipment
            The last piece, empty if the node refused an earlier one.
        refusal : Exception or None
            Why the node could not take in the data.
        """
        pieces = self._shipping.load(envelope.command, machine)
        last = next(pieces)
        for piece in pieces:
            with deferred_interrupts():
                self._line.begin(self._line.number + 1)
                self._line.send(machine, ORDER, Bring(self._line.number, last), has_rows=True)
            self._wait_for([machine])
            if self._line.answers[machine].lacks:
                return Shipment([], [], []), self._line.answers[machine].replies
            last = piece
        return last, None

    def _wait_for(self, machines: list[int]) -> None:
        """Wait until nodes have answered the last order."""

        def silent() -> list[int]:
            return [machine for machine in self._silent() if machine in machines]

        def check() -> None:
            self._raise_losses()
            check_machines(self._team, silent())

        self._team.patience.begin()
        self._line.wait(lambda: not silent(), check)
        self._raise_losses()

    def _look_for_files(self, envelope: Envelope) -> None:
        """Order other nodes to look for files that a command needs and that they have not looked for."""
        wanted = self._shipping.files(envelope.command)
        if not wanted:
            return
        with deferred_interrupts():
            self._line.begin(self._line.number + 1)
            for machine in self._line.others:
                self._line.send(machine, ORDER, Look(self._line.number, wanted))
        self._wait_for(self._line.others)
        for machine in self._line.others:
            self._shipping.found(machine, wanted, self._line.answers[machine].replies)

    def tell(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Compare the clocks of all ranks with the controller's, and count what the other nodes' shared heaps hold.

        The clocks of two nodes are compared by the quickest of several questions, to within half of its round trip.
        Leaders answer, so that their ranks are not disturbed.

        Returns
        -------
        ahead : list of int
            Nanoseconds by which each rank's clock is ahead of the controller's.
        counts : list of tuple of int
            Counts of each rank's part of the shared heap; zeros for the ranks of this node.
        """
        self._doubt()
        ahead, counts = [0] * self.n_ranks, [(0, 0, 0)] * self.n_ranks
        for machine in self._line.others:
            answers = [self._ask(machine) for _ in range(_QUESTIONS)]
            ranks, held = self._world.ranks_of(machine), answers[-1][2]
            for rank, one in zip(ranks, held or [(0, 0, 0)] * len(ranks)):
                ahead[rank], counts[rank] = min(answers)[1], one
        return ahead, counts

    def _ask(self, machine: int) -> tuple[int, int, list[tuple[int, int, int]]]:
        line, asked = self._line, monotonic_ns()
        with deferred_interrupts():
            line.begin(line.number + 1)
            line.send(machine, ORDER, Tell(line.number))
        self._wait_for([machine])
        answered, self._told[machine] = monotonic_ns(), line.number
        then, held = line.answers[machine].replies
        return answered - asked, then - (asked + answered) // 2, held

    @property
    def n_shipped(self) -> int:
        """Bytes of the controller's memory that have been sent to other nodes."""
        return self._shipping.n_bytes

    @property
    def is_lost(self) -> bool:
        """Whether a node does not answer, so that this program can have no other session."""
        return self._line.is_lost

    @property
    def outstanding(self) -> bool:
        """Whether a message has been sent whose answers were not collected."""
        return self._waiting or self._team.outstanding

    def collect(self) -> list[bytes | None]:
        """Collect answers, as `ProcessGroup.collect`; a lost rank of another node raises what its leader has found."""
        if self._own is None:
            self._own = self._team.collect()
        before = self.timeline.switch(STRAGGLING)
        self._line.wait(lambda: not self._silent(), self._check)
        self.timeline.switch(before)
        if self._team.stopped:
            raise SessionError(CLOSED_WITHIN)
        self._raise_losses()
        now = monotonic_ns()
        self.timeline.put_off(self._team.signals.sent, now)
        self._waited = {
            machine: max(0, now - self._sent - self._line.answers[machine].took) for machine in self._line.others
        }
        answers: list[bytes | None] = []
        for machine in range(len(self._world.sizes)):
            answers += self._own if machine == self._world.machine else self._line.answers[machine].replies
        self._waiting = False
        return answers

    def _silent(self) -> list[int]:
        """Return the nodes that have not answered the last order."""
        return list(filter(self._is_silent, self._line.others))

    def _is_silent(self, machine: int) -> bool:
        answers = self._line.answers
        return machine not in answers or answers[machine].number < self._line.number

    def _raise_losses(self) -> None:
        for machine, loss in self._losses().items():
            if loss.rank is None:
                raise SessionError(loss.text)
            rank = self._world.ranks_of(machine)[loss.rank]
            text = f"on machine {machine} ({self._line.hosts[machine]}), as rank {rank} of all: {loss.text}"
            if loss.is_dead:
                raise WorkerDied(text, rank=rank, pid=loss.pid, exitcode=loss.exitcode)
            raise WorkerTimeout(text, rank, loss.pid)

    def _check(self) -> None:
        self._raise_losses()
        check_machines(self._team, self._silent())

    def check_workers(self) -> None:
        """Raise if a worker of this node is dead, or a rank of another node lost."""
        self._team.check_workers()
        self._raise_losses()

    def dead(self) -> list[int]:
        """Return the workers that have ended, even if they were replaced.

        For a node that has no ranks left, all of its ranks.
        """
        ranks = [self._world.first + rank for rank in self._team.dead()]
        for machine, loss in self._losses().items():
            there = self._world.ranks_of(machine)
            ranks += [there[rank] for rank in loss.replaced] or there
        return sorted(ranks)

    def _losses(self) -> dict[int, Lost]:
        return {machine: one for machine, one in self._line.answers.items() if isinstance(one, Lost)}

    def settle(self, seconds: float | None = None) -> bool:
        """Wait as `ProcessGroup.settle` does; return ``False`` if a node has no ranks left."""
        patience = Deadline(seconds)
        if not self._team.settle(seconds):
            return False
        self._line.wait(lambda: not self._silent() or patience.is_over())
        return not self._silent() and all(loss.replaced for loss in self._losses().values())

    def replace(self, ranks: Sequence[int]) -> None:
        """Fork new workers in place of dead ones of this node; other nodes have already replaced theirs."""
        for machine in self._losses():
            del self._line.answers[machine]
        self._waiting = False
        own = self._world.ranks_of(self._world.machine)
        self._team.replace([own.index(rank) for rank in ranks if rank in own])

    def stop(self, grace: float = _STOP_SECONDS) -> None:
        """Wait for the ranks, which have received the message to stop; without grace, order all nodes to end theirs."""
        if not grace:
            self._line.leave()
            self._line.begin(self._line.number + 1)
            for machine in self._line.others:
                self._line.send(machine, ORDER, Stop(self._line.number))
        patience = Deadline(0.0 if self._line.is_lost else grace + _STOP_SECONDS)
        try:
            self._line.wait_outside_calls(lambda: not self._silent() or patience.is_over())
        finally:
            self._line.is_lost = self._line.is_lost or bool(self._silent())
            self._waiting = False
            self._team.stop(grace)
