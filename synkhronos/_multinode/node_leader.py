"""Main loop of a node leader: it passes the controller's orders to the ranks of its node, and is one of them."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
import traceback
from time import monotonic_ns
from typing import Any, Callable, NoReturn

from synkhronos import _backends
from synkhronos._memory import SegmentTable
from synkhronos._multinode.heartbeat import LEAVE
from synkhronos._multinode.leader_comm import ANSWER, LeaderComm
from synkhronos._multinode.node_messages import Answer, Ask, Bring, Do, Leave, Look, Lost, Start, Stop, Tell
from synkhronos._multinode.shipping import SegmentCache
from synkhronos._native import native
from synkhronos._processes import OUTSIDE, TRANSFERS, ProcessGroup, World
from synkhronos._rank import Decoder, Encoder, Envelope, Failure, Replica, set_apart, start_ranks, summarize
from synkhronos._utils.interrupts import collect_garbage, let_interrupts_pass
from synkhronos.errors import WorkerDied, WorkerTimeout

__all__ = ["lead"]


def lead(line: LeaderComm, find_devices: Callable[..., list[str]]) -> NoReturn:
    """Serve the controller until it ends; never return.

    Parameters
    ----------
    line : Line
    find_devices : callable
        Takes arguments of `fork`, and returns the device of each rank of this node.
    """
    # C's `exit` runs MPICH's exit handler; without it, as after `os._exit`, the launcher would end the whole job.
    # Python's exit would also run the exit handlers of the program.
    leave: Callable[[int], NoReturn] = ctypes.CDLL(None).exit
    try:
        _ignore_signals()
        native.exit_on_signal(LEAVE)
        _serve(line, find_devices)
        line.close()
    except BaseException:
        traceback.print_exc()
        line.break_off()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the program may have closed or replaced it
                stream.flush()
        leave(0)


def _ignore_signals() -> None:
    """Ignore the signals that end a program and those that the script handles.

    They are the controller's, as in a session on one node.
    """
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            ends = number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if ends or callable(signal.getsignal(number)):
                is_of_children = number == signal.SIGCHLD  # if it were ignored, exit codes of children would be lost
                signal.signal(number, signal.SIG_DFL if is_of_children else signal.SIG_IGN)


def _serve(line: LeaderComm, find_devices: Callable[..., list[str]]) -> None:
    crew: NodeRanks | None = None
    while True:
        line.wait(lambda: line.orders)
        order = line.orders.popleft()
        line.begin(order.number)
        answer: Any = Answer(order.number, None)
        if isinstance(order, Leave):
            return
        if isinstance(order, Ask):
            try:
                answer = Answer(order.number, find_devices(*order.arguments))
            except Exception as error:
                answer = Answer(order.number, error)
        elif isinstance(order, Start):
            if crew is not None:  # the controller was interrupted while it forked
                crew.end()
            line.set_heartbeat(order.heartbeat)
            crew = NodeRanks(line, order)
        elif isinstance(order, Stop) and crew is not None:
            crew.end()
            crew = None
            collect_garbage()
        elif isinstance(order, Tell):
            answer = Answer(order.number, (monotonic_ns(), [] if crew is None else crew.counts()))
        elif isinstance(order, Look) and crew is not None:
            answer = crew.look(order)
        elif isinstance(order, Bring) and crew is not None:
            answer = crew.bring(order)
        elif isinstance(order, Do) and crew is not None:
            answer = crew.do(order)
            if answer is None:
                crew = None
                collect_garbage()
                answer = Answer(order.number, [])
        line.send(0, ANSWER, answer)


class NodeRanks:
    """The ranks of this node.

    Parameters
    ----------
    line : Line
    start : Start
    """

    def __init__(self, line: LeaderComm, start: Start) -> None:
        self._line = line
        self._start = start
        self._lost: Lost | None = None
        self._segments = SegmentTable()
        self._stowage = SegmentCache(self._segments)
        self._decoder, self._encoder, self._own = Decoder(), Encoder(), Encoder()
        world = World(start.sizes, line.machine, start.master_rank, line, start.wire_dtype)
        self._team = ProcessGroup(start.devices, 0, start.timeout, world)
        self._answered = monotonic_ns()
        self._replica: Replica | None = None
        try:
            self._replica = start_ranks(
                self._team, self._segments, None, start.profile_workers, self._begin, start.seed
            )
            if start.seed is not None:
                set_apart(start.seed, world.first, 0)
        except Exception as error:
            self._lost = Lost(0, f"machine {line.machine} ({line.hosts[line.machine]}): {summarize(error)}")

    def look(self, order: Look) -> Answer | Lost:
        """Open those of the controller's files that this node has, too."""
        if self._lost is not None:
            return self._lost._replace(number=order.number)
        return Answer(order.number, [self._stowage.open(key, part) for key, part in order.parts.items()])

    def counts(self) -> list[tuple[int, int, int]]:
        """Return the counts of each rank's part of the shared heap; empty if there are no ranks."""
        return [] if self._replica is None else self._replica.regions.counts()

    def _begin(self) -> None:
        """In a worker that replaces a dead one: release what it inherited and only the leader needs."""
        self._stowage.abandon()

    def bring(self, order: Bring) -> Answer | Lost:
        """Take in a part of the data for a command."""
        if self._lost is not None:
            return self._lost._replace(number=order.number)
        try:
            self._stowage.take(order.cargo, ())
        except (MemoryError, OSError) as error:
            return Answer(order.number, error, lacks=True)
        return Answer(order.number, None)

    def do(self, order: Do) -> Answer | Lost | None:
        """Have all ranks execute a message of the controller; return ``None`` if it is a stop."""
        envelope: Envelope = self._decoder.loads(order.message)
        if self._lost is not None:
            return None if envelope.command is None else self._lost._replace(number=order.number)
        if envelope.command is None:
            self._team.send(order.message)
            self._close(grace=5.0)
            return None
        try:
            began = monotonic_ns()
            replies = self._execute(envelope, order)
            self._answered = monotonic_ns()
            return Answer(order.number, replies, self._answered - began, self._stowage.lacks)
        except (WorkerDied, WorkerTimeout) as error:
            self._line.abort()
            is_dead = isinstance(error, WorkerDied)
            exitcode = error.exitcode if isinstance(error, WorkerDied) else None
            lost = Lost(order.number, str(error), error.rank, error.pid, exitcode, is_dead)
            if is_dead and self._start.restart_workers:
                lost = lost._replace(replaced=self._replace_dead())
            if not lost.replaced:
                self._lost = lost
                self._close(grace=0.0)
            return lost

    def _replace_dead(self) -> tuple[int, ...]:
        """Fork new workers in place of dead ones, and return their ranks.

        Returns an empty tuple if the other ranks do not become idle in time.
        """
        assert self._replica is not None
        self._team.signals.abort()
        if not self._team.settle(self._start.timeout):
            return ()
        ranks = tuple(self._team.dead())
        inherited = self._segments.lent()  # this frame stays alive in the workers, and so do these arrays
        self._replica.regions.share(self._team.replace, ranks)
        del inherited
        self._team.timeline.end()
        return ranks

    def _execute(self, envelope: Envelope, order: Do) -> list[bytes]:
        timeline, before = self._team.timeline, self._team.signals.sent
        timeline.put_off(before, self._answered + order.waited)
        timeline.resume(before, OUTSIDE)
        timeline.begin()
        timeline.switch(TRANSFERS)
        try:
            if order.refusal is not None:
                raise order.refusal
            self._stowage.take(order.cargo, envelope.release.segments)
        except (MemoryError, OSError) as error:
            timeline.end()
            self._line.abort()
            return [self._own.dumps(Failure.of(error, unprepared=True))] * self._team.n_ranks
        message, new = order.message, self._stowage.new
        if envelope.attach or new:
            attach, again = tuple(segment.ref for segment in new), tuple(self._stowage.replaced)
            release = envelope.release._replace(segments=envelope.release.segments + again)
            message = self._encoder.dumps(envelope._replace(attach=attach, release=release))
        if self._team.signals.aborted:
            self._team.signals.reset()
        self._team.send(message, new)
        own = self._carry_out(envelope)
        timeline.end()
        replies = self._team.collect()
        timeline.rest(self._team.signals.sent)
        replies[self._team.master_rank] = own
        if new and not any(map(_is_unprepared, replies)):
            self._stowage.delivered()
        return replies  # type: ignore[return-value]

    def _carry_out(self, envelope: Envelope) -> bytes:
        """Execute the command on this rank itself, and return its reply."""
        assert self._replica is not None and envelope.command is not None
        try:
            self._replica.forget(*envelope.release)
            reply = self._replica.execute(envelope.command)
        except (WorkerDied, WorkerTimeout):
            raise
        except Exception as error:
            let_interrupts_pass(error)
            reply = Failure.of(error, completed=self._replica.completed)
            self._line.abort()
            self._team.signals.abort()
        return self._own.dumps(reply)

    def end(self) -> None:
        """End the ranks at once."""
        if self._replica is not None:
            self._close(grace=0.0)

    def _close(self, grace: float) -> None:
        assert self._replica is not None
        self._team.stop(grace)
        self._replica.thread_limits.restore()
        self._replica.regions.close()
        self._stowage.close()
        if self._replica.context is not None:  # it has a GPU
            _backends.unbind()
        self._replica = None


def _is_unprepared(reply: bytes | None) -> bool:
    said = None if reply is None else Decoder().loads(reply)
    return isinstance(said, Failure) and said.unprepared
