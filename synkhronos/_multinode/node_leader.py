"""Main loop of a node leader: execute the controller's orders with the ranks of the node; the leader is one of them."""

from __future__ import annotations

import ctypes
import signal
import threading
import traceback
from time import monotonic_ns
from typing import Any, Callable, NoReturn

from synkhronos import _backends
from synkhronos._memory import SegmentTable
from synkhronos._multinode.heartbeat import LEAVE
from synkhronos._multinode.leader_comm import LeaderComm
from synkhronos._multinode.node_messages import Answer, Ask, Bring, Do, Leave, Look, Lost, Report, Start, Stop
from synkhronos._multinode.shipping import SegmentCache
from synkhronos._native import native
from synkhronos._processes import OUTSIDE, TRANSFERS, ProcessGroup, World
from synkhronos._rank import Decoder, Encoder, Envelope, Failure, Replica, seed_rank, start_ranks, summarize
from synkhronos._utils.interrupts import collect_garbage, let_interrupts_pass
from synkhronos._utils.rendezvous import flush_output
from synkhronos.errors import WorkerDied, WorkerTimeout


def lead(comm: LeaderComm, find_devices: Callable[..., list[str]]) -> NoReturn:
    """Serve the controller until it ends, then exit; never return.

    Parameters
    ----------
    comm : LeaderComm
    find_devices : callable
        Takes arguments of `fork`, and returns the device of each rank of this node.
    """
    # C's `exit` runs MPICH's exit handler. Without that, as with `os._exit`, the launcher would end the whole job.
    # Python's exit is unsuitable, because it would also run the exit handlers of the program.
    leave: Callable[[int], NoReturn] = ctypes.CDLL(None).exit
    try:
        _ignore_signals()
        native.exit_on_signal(LEAVE)
        _serve(comm, find_devices)
        comm.close()
    except BaseException:
        traceback.print_exc()
        comm.abort_job()
    finally:
        flush_output()
        leave(0)


def _ignore_signals() -> None:
    """Ignore signals that end a program and those that the script handles.

    As in a session on one node, only the controller handles them.
    """
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            ends = number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if ends or callable(signal.getsignal(number)):
                is_of_children = number == signal.SIGCHLD  # ignoring it would lose the exit codes of children
                signal.signal(number, signal.SIG_DFL if is_of_children else signal.SIG_IGN)


def _serve(comm: LeaderComm, find_devices: Callable[..., list[str]]) -> None:
    """Execute orders, and answer them, until the controller orders this leader to leave."""
    ranks: NodeRanks | None = None
    while True:
        comm.wait(lambda: comm.orders)
        order = comm.orders.popleft()
        comm.begin(order.number)
        answer: Any = Answer(order.number, None)
        if isinstance(order, Leave):
            return
        if isinstance(order, Ask):
            try:
                answer = Answer(order.number, find_devices(*order.arguments))
            except Exception as error:
                answer = Answer(order.number, error)
        elif isinstance(order, Start):
            if ranks is not None:  # the controller was interrupted while it forked
                ranks.end()
            comm.set_heartbeat(order.options.heartbeat)
            ranks = NodeRanks(comm, order)
        elif isinstance(order, Stop) and ranks is not None:
            ranks.end()
            ranks = None
            collect_garbage()
        elif isinstance(order, Report):
            answer = Answer(order.number, (monotonic_ns(), [] if ranks is None else ranks.counts()))
        elif isinstance(order, Look) and ranks is not None:
            answer = ranks.look(order)
        elif isinstance(order, Bring) and ranks is not None:
            answer = ranks.bring(order)
        elif isinstance(order, Do) and ranks is not None:
            answer = ranks.do(order)
            if answer is None:
                ranks = None
                collect_garbage()
                answer = Answer(order.number, [])
        comm.answer(answer)


class NodeRanks:
    """Ranks of this node, in one session.

    Parameters
    ----------
    comm : LeaderComm
    start : Start
        Order that starts the ranks.
    """

    def __init__(self, comm: LeaderComm, start: Start) -> None:
        self._comm = comm
        self._options = options = start.options
        self._lost: Lost | None = None
        self._segments = SegmentTable()
        self._cache = SegmentCache(self._segments)
        self._decoder, self._encoder, self._own = Decoder(), Encoder(), Encoder()
        world = World(start.sizes, comm.node, start.master_rank, comm, options.wire_dtype)
        self._group = ProcessGroup(start.devices, 0, options.timeout, world)
        self._answered = monotonic_ns()
        self._replica: Replica | None = None
        try:
            self._replica = start_ranks(
                self._group, self._segments, None, options.profile_workers, self._cache.abandon, options.seed
            )
            if options.seed is not None:
                seed_rank(options.seed, world.first, 0)
        except Exception as error:
            self._lost = Lost(0, f"node {comm.node} ({comm.hosts[comm.node]}): {summarize(error)}")

    def look(self, order: Look) -> Answer | Lost:
        """Open the files of the controller that this node has, too; answer which ones these are."""
        if self._lost is not None:
            return self._lost._replace(number=order.number)
        return Answer(order.number, [self._cache.open(key, part) for key, part in order.parts.items()])

    def counts(self) -> list[tuple[int, int, int]]:
        """Return the counts of each rank's part of the shared heap; empty if there are no ranks."""
        return [] if self._replica is None else self._replica.heap.counts()

    def bring(self, order: Bring) -> Answer | Lost:
        """Store a part of the data for a command."""
        if self._lost is not None:
            return self._lost._replace(number=order.number)
        try:
            self._cache.take(order.shipment, ())
        except (MemoryError, OSError) as error:
            return Answer(order.number, error, lacks=True)
        return Answer(order.number, None)

    def do(self, order: Do) -> Answer | Lost | None:
        """Execute a message of the controller on all ranks.

        Returns
        -------
        Answer, Lost or None
            Replies of the ranks; ``Lost`` if a rank is dead or silent; ``None`` if the message was to stop.
        """
        envelope: Envelope = self._decoder.loads(order.message)
        if self._lost is not None:
            return None if envelope.command is None else self._lost._replace(number=order.number)
        if envelope.command is None:
            self._group.send(order.message)
            self._close(grace=5.0)
            return None
        try:
            began = monotonic_ns()
            replies = self._execute(envelope, order)
            self._answered = monotonic_ns()
            return Answer(order.number, replies, self._answered - began, self._cache.lacks)
        except (WorkerDied, WorkerTimeout) as error:
            self._comm.leave()
            is_dead = isinstance(error, WorkerDied)
            exitcode = error.exitcode if isinstance(error, WorkerDied) else None
            lost = Lost(order.number, str(error), error.rank, error.pid, exitcode, is_dead)
            if is_dead and self._options.restart_workers:
                lost = lost._replace(replaced=self._replace_dead())
            if not lost.replaced:
                self._lost = lost
                self._close(grace=0.0)
            return lost

    def _replace_dead(self) -> tuple[int, ...]:
        """Fork new workers for dead ones.

        Returns
        -------
        tuple of int
            Ranks of the new workers; empty if the other ranks do not become idle in time.
        """
        assert self._replica is not None
        self._group.sync.abort()
        if not self._group.settle(self._options.timeout):
            return ()
        ranks = tuple(self._group.dead())
        inherited = self._segments.lent()  # the fork copies this frame, which keeps these arrays alive in the workers
        self._replica.heap.share(self._group.replace, ranks)
        del inherited
        self._group.timeline.end()
        return ranks

    def _execute(self, envelope: Envelope, order: Do) -> list[bytes]:
        """Store the data of an order, execute its message on all ranks, and return their replies."""
        timeline, before = self._group.timeline, self._group.sync.sent
        timeline.put_off(before, self._answered + order.waited)
        timeline.resume(before, OUTSIDE)
        timeline.begin()
        timeline.switch(TRANSFERS)
        try:
            if order.refusal is not None:
                raise order.refusal
            self._cache.take(order.shipment, envelope.release.segments)
        except (MemoryError, OSError) as error:
            timeline.end()
            self._comm.abort()
            return [self._own.dumps(Failure.of(error, unprepared=True))] * self._group.n_ranks
        message, new = order.message, self._cache.new
        if envelope.attach or new:
            attach, again = tuple(segment.ref for segment in new), tuple(self._cache.replaced)
            release = envelope.release._replace(segments=envelope.release.segments + again)
            message = self._encoder.dumps(envelope._replace(attach=attach, release=release))
        if self._group.sync.aborted:
            self._group.sync.reset()
        self._group.send(message, new)
        own = self._carry_out(envelope)
        timeline.end()
        replies = self._group.collect()
        timeline.rest(self._group.sync.sent)
        replies[self._group.master_rank] = own
        if new and not any(map(_is_unprepared, replies)):
            self._cache.delivered()
        return replies  # type: ignore[return-value]

    def _carry_out(self, envelope: Envelope) -> bytes:
        """Execute a command on this rank, the leader, and return its reply."""
        assert self._replica is not None and envelope.command is not None
        try:
            self._replica.forget(*envelope.release)
            self._replica.heed(envelope.n_failures)
            reply = self._replica.execute(envelope.command)
        except (WorkerDied, WorkerTimeout):
            raise
        except Exception as error:
            let_interrupts_pass(error)
            reply = Failure.of(error, completed=self._replica.completed)
            self._comm.leave()
            self._group.sync.abort()
        return self._own.dumps(reply)

    def end(self) -> None:
        """End the ranks at once."""
        if self._replica is not None:
            self._close(grace=0.0)

    def _close(self, grace: float) -> None:
        """End the ranks, and release the memory and the device of the session."""
        assert self._replica is not None
        self._group.stop(grace)
        self._replica.thread_limits.restore()
        self._replica.heap.close()
        self._cache.close()
        if self._replica.context is not None:  # it has a GPU
            _backends.unbind()
        self._replica = None


def _is_unprepared(reply: bytes | None) -> bool:
    """Return whether a rank could not map the memory that came with a message, and did not begin to execute it."""
    said = None if reply is None else Decoder().loads(reply)
    return isinstance(said, Failure) and said.unprepared
