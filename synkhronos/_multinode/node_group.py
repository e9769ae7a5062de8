"""The controller's side of a session on several nodes: connect and start the nodes, and their common process group.

`find_nodes` connects the nodes of the job. `Nodes` orders their leaders to start ranks.

`MultiNodeGroup` is the process group of all nodes, for the dispatcher. It has the methods of `ProcessGroup`, with
global rank numbers. The process group of the controller's node receives each message as in a session on one node. The
leaders of the other nodes receive the same message with the data that their nodes need for it. They return the answers
of their ranks.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, Callable

from synkhronos._graph import Definitions
from synkhronos._memory import Segment, SegmentTable
from synkhronos._multinode.launch import StartLimit, find_comm
from synkhronos._multinode.leader_comm import ORDER, LeaderComm, MultiNodeSync
from synkhronos._multinode.node_leader import lead
from synkhronos._multinode.node_messages import Answer, Ask, Bring, Do, Leave, Look, Lost, Options, Report, Start, Stop
from synkhronos._multinode.shipping import Shipment, Shipping
from synkhronos._processes import STRAGGLING, Deadline, ProcessGroup, World, check_exchange, check_nodes, kind_of
from synkhronos._rank import Decoder, Envelope
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rendezvous import RESTART, rendezvous
from synkhronos.errors import CLOSED_WITHIN, DeviceError, NodeLost, SessionError, WorkerDied, WorkerTimeout

_QUESTIONS = 8  # number of clock readings to request from each node
_STOP_SECONDS = 5.0  # time that a leader may take to stop its ranks, and the same again to answer


class MultiNodeGroup:
    """Process group of all ranks of all nodes.

    Parameters
    ----------
    group : ProcessGroup
        Process group of the controller's node.
    devices : list of str
        Devices of all ranks.
    segments : SegmentTable
        Shared memory of the controller.

    Attributes
    ----------
    sync : MultiNodeSync
        Abort flag of all nodes.
    ahead : list of int
        Nanoseconds by which each rank's clock was ahead of the controller's when this object was created.
    """

    def __init__(self, group: ProcessGroup, devices: list[str], segments: SegmentTable) -> None:
        world = group.world
        self.devices, self.n_ranks, self.master_rank = devices, world.n_ranks, world.master_rank
        self.timeline = group.timeline
        assert isinstance(world.comm, LeaderComm)
        self.sync = MultiNodeSync(group, world.comm)
        self._group, self._world = group, world
        self._comm = world.comm
        self._shipping = Shipping(segments, world)
        self._decoder = Decoder()
        self._own: list[bytes | None] | None = None  # answers of the controller's node
        self._waiting = False  # whether answers of other nodes are outstanding
        self._delay = 0.0  # seconds that `await_end` waits
        self._sent = 0  # time of the last message
        self._n_missing = 0  # number of parts of large replies that had not arrived at the last check
        self._last_order: dict[int, int] = {}  # number of the last order to each node
        self._waited: dict[int, int] = {}  # nanoseconds that each node waited for others after its last answer
        self.ahead = self.report()[0]

    def send(self, message: bytes, memory: Sequence[Segment] = ()) -> None:
        """Send a message to all ranks, as `ProcessGroup.send`."""
        envelope: Envelope = self._decoder.loads(message)
        self._assume_missing()
        self._last_order.clear()
        self._look_for_files(envelope)
        self._shipping.forget(envelope.release.segments)
        loads = [self._bring(envelope, node) for node in self._comm.others]
        with deferred_interrupts():  # either all nodes receive the message, or none
            self._own, self._waiting, self._sent, self._n_missing = None, True, monotonic_ns(), 0
            self._comm.begin(self._comm.number + 1)
            for node, (shipment, refusal) in zip(self._comm.others, loads):
                order = Do(self._comm.number, message, shipment, refusal, self._waited.get(node, 0))
                self._comm.send(node, ORDER, order, has_rows=bool(shipment.fill))
            self._last_order = dict.fromkeys(self._comm.others, self._comm.number)
            self._group.send(message, memory)

    def _assume_missing(self) -> None:
        """Assume that nodes which have not confirmed the data of the last command have no data at all."""
        for node in self._comm.others:
            answer = self._comm.answers.get(node)
            if not isinstance(answer, Answer) or answer.number != self._last_order.get(node) or answer.lacks:
                self._shipping.assume_missing(node)

    def _bring(self, envelope: Envelope, node: int) -> tuple[Shipment, Exception | None]:
        """Send a node the data for a command, except for the last piece, which is to be sent with the command.

        Returns
        -------
        last : Shipment
            Last piece; empty if the node could not store an earlier one.
        refusal : Exception or None
            Exception with which the node could not store an earlier piece.
        """
        pieces = self._shipping.load(envelope.command, node)
        last = next(pieces)
        for piece in pieces:
            self._comm.order([node], functools.partial(Bring, shipment=last), has_rows=True)
            self._wait_for([node])
            if self._comm.answers[node].lacks:
                return Shipment([], [], []), self._comm.answers[node].replies
            last = piece
        return last, None

    def _wait_for(self, nodes: list[int]) -> None:
        """Wait until some nodes have answered the last order; raise if a node has failed."""

        def silent() -> list[int]:
            return [node for node in self._comm.silent() if node in nodes]

        def check() -> None:
            self._raise_losses()
            check_nodes(self._group, silent())

        self._group.deadline.begin()
        self._comm.wait(lambda: not silent(), check)
        self._raise_losses()

    def _look_for_files(self, envelope: Envelope) -> None:
        """Order the other nodes to look for the files that a command needs, unless they have done so before."""
        wanted = self._shipping.files(envelope.command)
        if not wanted:
            return
        self._comm.order(self._comm.others, functools.partial(Look, parts=wanted))
        self._wait_for(self._comm.others)
        for node in self._comm.others:
            self._shipping.found(node, wanted, self._comm.answers[node].replies)

    def report(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Measure the offsets of the nodes' clocks, and get counts of the other nodes' shared heaps.

        Of several requests to a node, the one with the shortest round trip gives the offset, to within half of that
        round trip. Node leaders answer, so that workers are not disturbed.

        Returns
        -------
        ahead : list of int
            Nanoseconds by which each rank's clock is ahead of the controller's.
        counts : list of tuple of int
            Counts of each rank's part of the shared heap; zeros for the ranks of this node.
        """
        self._assume_missing()
        ahead, counts = [0] * self.n_ranks, [(0, 0, 0)] * self.n_ranks
        for node in self._comm.others:
            answers = [self._ask(node) for _ in range(_QUESTIONS)]
            ranks, held = self._world.ranks_of(node), answers[-1][2]
            for rank, one in zip(ranks, held or [(0, 0, 0)] * len(ranks)):
                ahead[rank], counts[rank] = min(answers)[1], one
        return ahead, counts

    def _ask(self, node: int) -> tuple[int, int, list[tuple[int, int, int]]]:
        """Request a report of a node; return the round trip and the clock's offset, in nanoseconds, and the counts."""
        comm, asked = self._comm, monotonic_ns()
        comm.order([node], Report)
        self._wait_for([node])
        answered, self._last_order[node] = monotonic_ns(), comm.number
        then, held = comm.answers[node].replies
        return answered - asked, then - (asked + answered) // 2, held

    @property
    def n_shipped(self) -> int:
        """Number of bytes of the controller's memory that have been sent to other nodes."""
        return self._shipping.n_bytes

    @property
    def is_lost(self) -> bool:
        """Whether a node is lost or silent, so that this program can have no other session."""
        return self._comm.is_lost

    @property
    def outstanding(self) -> bool:
        """Whether a message has been sent whose answers were not collected."""
        return self._waiting or self._group.outstanding

    def collect(self) -> list[bytes | None]:
        """Collect the answers of all ranks, as `ProcessGroup.collect`.

        If a rank of another node is dead or silent, raise the error that its leader has reported.
        """
        if self._own is None:
            self._own = self._group.collect()
        before = self.timeline.switch(STRAGGLING)
        self._comm.wait(self._comm.is_settled, self._check)
        self.timeline.switch(before)
        if self._group.stopped:
            raise SessionError(CLOSED_WITHIN)
        self._raise_losses()
        now = monotonic_ns()
        self.timeline.put_off(self._group.sync.sent, now)
        self._waited = {node: max(0, now - self._sent - self._comm.answers[node].took) for node in self._comm.others}
        self._waiting = False  # also if there is no memory for the replies
        answers: list[bytes | None] = []
        for node in range(len(self._world.sizes)):
            answers += self._own if node == self._world.node else self._comm.replies(node)
        self._comm.large.drop()
        return answers

    def _raise_losses(self) -> None:
        """Raise the error that another leader has reported about its ranks, if there is one."""
        for node, loss in self._losses().items():
            if loss.rank is None:
                raise SessionError(loss.text)
            rank = self._world.ranks_of(node)[loss.rank]
            text = f"on node {node} ({self._comm.hosts[node]}), as rank {rank} of all: {loss.text}"
            if loss.is_dead:
                raise WorkerDied(text, rank=rank, pid=loss.pid, exitcode=loss.exitcode)
            raise WorkerTimeout(text, rank, loss.pid)

    def _check(self) -> None:
        """Raise if a rank or a node has failed, while `collect` waits."""
        self._raise_losses()
        silent = self._comm.silent()
        check_nodes(self._group, silent)
        if not silent:
            n_missing = self._comm.large.n_missing()
            if n_missing != self._n_missing:  # a part has arrived, or the last answer before them
                self._n_missing = n_missing
                self._group.deadline.begin()
            check_exchange(self._group)

    def dead(self) -> list[int]:
        """Return the workers that have ended, even if they were replaced.

        If all ranks of a node were ended, this includes all of them.
        """
        ranks = [self._world.first + rank for rank in self._group.dead()]
        for node, loss in self._losses().items():
            there = self._world.ranks_of(node)
            ranks += [there[rank] for rank in loss.replaced] or there
        return sorted(ranks)

    def _losses(self) -> dict[int, Lost]:
        return {node: one for node, one in self._comm.answers.items() if isinstance(one, Lost)}

    def settle(self, seconds: float | None = None) -> bool:
        """Wait as `ProcessGroup.settle`; also return ``False`` if all ranks of a node were ended."""
        deadline = Deadline(seconds)
        if not self._group.settle(seconds):
            return False
        self._comm.wait(lambda: self._comm.is_settled() or deadline.is_over())
        return self._comm.is_settled() and all(loss.replaced for loss in self._losses().values())

    def replace(self, ranks: Sequence[int]) -> None:
        """Fork new workers for dead ones of this node; other nodes have already replaced theirs."""
        for node in self._losses():
            del self._comm.answers[node]
        self._waiting = False
        own = self._world.ranks_of(self._world.node)
        self._group.replace([own.index(rank) for rank in ranks if rank in own])

    def stop(self, grace: float = _STOP_SECONDS) -> None:
        """Stop the ranks of all nodes, without waiting for other nodes; `await_end` does that.

        Parameters
        ----------
        grace : float
            Seconds that ranks may take to end, after they have received the message to stop. With 0, the leaders are
            ordered to end their ranks at once.
        """
        if not grace:
            self._comm.leave()
            self._comm.order(self._comm.others, Stop)
        self._waiting = False
        self._delay = grace + _STOP_SECONDS
        self._group.stop(grace)

    def await_end(self) -> None:
        """Wait until the ranks of other nodes have ended. A node that does not answer in time is lost."""
        deadline = Deadline(0.0 if self._comm.is_lost else self._delay)
        try:
            self._comm.wait_outside_calls(lambda: self._comm.is_settled() or deadline.is_over())
        finally:
            self._comm.is_lost = self._comm.is_lost or not self._comm.is_settled()


# -- start of the nodes


class Nodes:
    """All nodes of the job; the controller is on node 0.

    Parameters
    ----------
    comm : LeaderComm

    Attributes
    ----------
    comm : LeaderComm
    names : list of str
        Device name of each rank.
    devices : list of str
        The same names, each with the node and host of the rank.
    world : World
        Numbering of the ranks.
    definitions : Definitions
        Definitions of the program that the processes of other nodes have. All sessions share them, because leaders
        never return from their first `fork`.
    """

    def __init__(self, comm: LeaderComm) -> None:
        self.comm = comm
        self.definitions = _definitions()
        self.names: list[str] = []
        self.devices: list[str] = []
        self.world: World

    def start(
        self, own: list[str], master_rank: int, asked: tuple[Any, ...], options: Options, limit: StartLimit
    ) -> None:
        """Order all leaders to find their devices, and to start a rank on each.

        Parameters
        ----------
        own : list of str
            Devices of this node.
        master_rank : int
            Rank of the controller.
        asked : tuple
            Arguments of `fork` that select devices.
        options : Options
        limit : StartLimit

        Raises
        ------
        DeviceError
            If the nodes have different versions or different kinds of devices.
        NodeLost
            If another node does not answer in time.
        SessionError
            If a node was lost in an earlier session.
        """
        if self.comm.is_lost:
            raise SessionError(f"a node is lost, or did not answer when the last session was closed; {RESTART}")
        if self.comm.differences:
            raise DeviceError(f"{self.comm.differences}; install the same on all nodes")
        self.comm.set_heartbeat(options.heartbeat)
        number = self.comm.number + 1
        limit.arm("ranks have not started on all nodes")
        self._ask([Ask(number, asked)] * self.comm.n_nodes, limit)
        names = [own, *(self.comm.answers[node].replies for node in self.comm.others)]
        for node, found in enumerate(names):
            if isinstance(found, Exception):
                found.args = (f"node {node} ({self.comm.hosts[node]}): {found}",)
                raise found
        for node, found in enumerate(names):
            if kind_of(found[0]) != kind_of(own[0]):
                raise DeviceError(
                    f"node {node} ({self.comm.hosts[node]}) has {found[0]}, and node 0 "
                    f"({self.comm.hosts[0]}) {own[0]}; expected one kind of device, for which functions are compiled. "
                    "Pass devices=, or use_gpu=False for CPU cores"
                )
        sizes = tuple(map(len, names))
        self._ask([Start(number + 1, found, sizes, master_rank, options) for found in names], limit)
        self.world = World(sizes, 0, master_rank, self.comm, options.wire_dtype)
        self.names = [device for found in names for device in found]
        self.devices = [
            f"node {node} ({self.comm.hosts[node]}): {device}" for node, found in enumerate(names) for device in found
        ]

    def _ask(self, orders: list[Any], limit: StartLimit) -> None:
        """Send each leader its order, and wait until all have answered; raise `NodeLost` at the limit."""
        silent = self._send_orders(orders, limit.remaining())
        if silent:
            self.comm.is_lost = True
            names = " and ".join(f"node {node} ({self.comm.hosts[node]})" for node in silent)
            raise NodeLost(
                f"{names} did not start ranks within start_timeout={limit.seconds:g} seconds; {RESTART}",
                machine=silent[0],
            )

    def _send_orders(self, orders: list[Any], seconds: float | None) -> list[int]:
        """Send each leader its order, and wait for the answers; return the nodes that are silent after ``seconds``."""
        number, deadline = orders[0].number, Deadline(seconds)
        with deferred_interrupts():  # either all leaders receive their orders, or none
            self.comm.begin(number)
            for node in self.comm.others:
                self.comm.send(node, ORDER, orders[node])
        self.comm.wait_outside_calls(lambda: not self.comm.silent() or deadline.is_over())
        return self.comm.silent()

    def stop(self) -> None:
        """Order all leaders to end any ranks that they have started, after the start of the session has failed."""
        if not self.comm.is_lost:
            self._send_orders([Stop(self.comm.number + 1)] * self.comm.n_nodes, _STOP_SECONDS)


@functools.cache
def _definitions() -> Definitions:
    return Definitions(lasting=True)


def find_nodes(find_devices: Callable[..., list[str]], limit: StartLimit) -> Nodes | None:
    """Connect the nodes of this job, and return them; ``None`` if it is a single process.

    On nodes other than the controller's, serve the controller until it ends, then exit; never return.

    Parameters
    ----------
    find_devices : callable
        Takes arguments of `fork`, and returns the device of each rank of this node.
    limit : StartLimit
    """
    comm = find_comm(limit)
    if comm is None or not comm.is_own_process():  # a process that the program has forked is not part of the job
        return None
    if comm.node:
        lead(comm, find_devices)
    atexit.unregister(_leave)
    atexit.register(_leave, comm)
    return Nodes(comm)


def _leave(comm: LeaderComm) -> None:
    """Order all leaders to end; called when the controller exits."""
    if not comm.is_own_process():
        return
    rendezvous.farewell()
    if comm.is_lost:
        comm.abort_job()
    for node in comm.others:
        comm.send(node, ORDER, Leave(comm.number + 1))
    comm.close()
