"""Communication between node leaders over MPI: messages, votes, exchanges of arrays, and aborts.

Leaders vote before each exchange of arrays. Each leader sends a number, called its word, which all others receive. They
start the exchange only if all words are equal. At their first connection, leaders also compare the versions of the
software that must be the same on all nodes.

Invariants
----------
* One thread at a time calls MPI: the main thread of a leader, or, on the controller, the holder of the session's lock,
  or, while a function computes, a thread that advances exchanges (see exchange.h). That thread pauses during `send` and
  `take_in`.
* A leader never blocks in an MPI call. It polls for messages, checks its own process group, and sleeps in between, for
  increasing times.
* Messages with large arrays use another communicator than those without, so that one may overtake the other. Orders are
  numbered. An order that arrives after a later one is dropped, because the controller no longer waits for it.
* Large replies follow their answer in parts, as pieces of the exchange. The controller begins to receive them as soon
  as it has the answer. A leader that receives an abort sends the rest empty.
* Commands are numbered, and a vote is identified by the number of its command and its own number. Votes and aborts of
  earlier commands are dropped.
* Either all leaders enter an exchange, or none: each enters only after it has the votes of all others. A leader may
  fail after it has voted, and then sends empty messages in place of those that it owes (see exchange.h). The exchange
  fails on each leader that receives one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import socket
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Callable

import numpy as np

from synkhronos import _backends
from synkhronos._multinode.heartbeat import Heartbeat, Reason
from synkhronos._multinode.node_messages import Answer, LargeReplies, Lost, Stop, Votes, without_large_replies
from synkhronos._native import native
from synkhronos._processes import Arrays, Ballots, Completion, Place, ProcessGroup, agree
from synkhronos._utils.interrupts import deferred_interrupts, handle_interrupts
from synkhronos._utils.rendezvous import RESTART, drain_output
from synkhronos.errors import CLOSED_WITHIN, CollectiveAborted, NodeLost, SessionError


def describe() -> dict[str, str]:
    """Return the software versions and the default floating-point dtype of this node, by name."""
    return {
        "Python": platform.python_version(),
        "Synkhronos": _version_of("synkhronos"),
        _backends.TITLE: _version_of(_backends.engine),
        "NumPy": np.__version__,
        "floatX": _backends.T.scalar().dtype,
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the package is not installed, but its folder is on the path
        return "of unknown version"


def describe_differences(nodes: Sequence[dict[str, str]], hosts: Sequence[str]) -> str:
    """Describe in one line how the versions of the nodes differ; return an empty string if they are equal.

    Parameters
    ----------
    nodes : list of dict
        Result of `describe` on each node.
    hosts : list of str
        Host name of each node.
    """
    differences = []
    for node, (found, host) in enumerate(zip(nodes, hosts)):
        for name in dict.fromkeys([*nodes[0], *found]):
            first, here = nodes[0].get(name, "missing"), found.get(name, "missing")
            if here != first:
                differences.append(f"{name} is {here} on node {node} ({host}) and {first} on node 0 ({hosts[0]})")
    return "; ".join(differences)


class MultiNodeSync:
    """The part of `RankSync` that the dispatcher uses, for all nodes."""

    def __init__(self, group: ProcessGroup, comm: LeaderComm) -> None:
        self._sync, self._comm = group.sync, comm
        self.reset = group.sync.reset

    @property
    def aborted(self) -> bool:
        return self._sync.aborted

    def abort(self) -> None:
        self._comm.leave()
        self._sync.abort()


def _make_exchange(mpi: Any, communicator: Any) -> native.Exchange:
    """Return an exchange of arrays that calls the functions of MPI which mpi4py has loaded."""
    library = ctypes.CDLL(mpi.__file__)  # unlike the process's own symbols, it has those of its libraries
    names = ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Get_count")
    functions = tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
    handles = mpi._handleof(communicator), mpi._handleof(mpi.BYTE)
    return native.Exchange(mpi._sizeof(mpi.Request), *handles, functions)


#: Tags of messages.
ORDER, ANSWER, VOTE, ABORT = 1, 2, 3, 4

_N_TAGS = 4096  # pieces in flight have different tags, and so have parts of replies; MPI guarantees 32,768 tags

_logger = logging.getLogger("synkhronos")
_SPIN_SECONDS = 2e-4  # duration of a wait until the process begins to yield its core
_YIELD_SECONDS = 2e-2  # duration of a wait until the process begins to sleep
_LONGEST_NAP = 4e-3  # longest sleep
_LONGEST_NAP_IN_EXCHANGE = 4e-4
_LOOK_SECONDS = 0.05  # time between two checks
_DEFERRED_SECONDS = 2.0  # longest time for which the end of an exchange delays Ctrl-C


class LeaderComm:
    """Communication of one node leader with the others; the controller is the leader of node 0.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, initialized.

    Attributes
    ----------
    node, n_nodes : int
        Number of this node, and number of nodes.
    others : list of int
        Numbers of the other nodes.
    hosts : list of str
        Host names of all nodes.
    exchange : Exchange
        Exchange of arrays with the other leaders.
    may_poll : bool
        Whether MPI allows calls from several threads, so that a thread may advance exchanges.
    differences : str
        Differences of versions between the nodes; see `describe_differences`.
    orders : deque
        Orders of the controller that this leader has not executed yet.
    large : LargeReplies
        Large replies of the current command, which follow the answers.
    answers : dict of int to object
        Last answer of each other leader, by node; only on the controller.
    number : int
        Number of the current command.
    is_lost : bool
        Whether another leader is lost, or has not answered an order in time. This program can then have no other
        session on several nodes.
    """

    def __init__(self, mpi: Any) -> None:
        from mpi4py.util import pkl5

        self._mpi = mpi
        self._messages, self._rows = mpi.COMM_WORLD.Dup(), pkl5.Intracomm(mpi.COMM_WORLD.Dup())
        self._arrays = mpi.COMM_WORLD.Dup()
        self.exchange = _make_exchange(mpi, self._arrays)
        self.may_poll = mpi.Query_thread() >= mpi.THREAD_SERIALIZED
        if not self.may_poll:
            _logger.info("MPI allows calls from one thread only: nodes exchange no gradients while others are computed")
        self._n_pieces = 0
        self.node, self.n_nodes = self._messages.Get_rank(), self._messages.Get_size()
        self.others = [node for node in range(self.n_nodes) if node != self.node]
        self._sending: list[Any] = []
        # kind of each message that this leader receives, where it comes from, and the request of MPI
        self._receiving: list[tuple[int, tuple[bool, int], Any]] = []
        self.large = LargeReplies(self.exchange, 4 * _N_TAGS, _N_TAGS, not self.node)
        self._heartbeat = Heartbeat(self.node)
        own = socket.gethostname(), describe(), self._heartbeat.door
        known = self._messages.allgather(own)  # before any object of this package is pickled
        self.hosts: list[str] = [host for host, _, _ in known]
        self.differences = describe_differences([versions for _, versions, _ in known], self.hosts)
        self.orders: deque[Any] = deque()
        self._ordered = 0  # number of the last order
        self.answers: dict[int, Any] = {}
        self.number = 0
        self.is_lost = False
        self._meeting = 0
        self._votes = Votes(self.node, self.n_nodes, lambda node, message: self.send(node, VOTE, message))
        self._aborted = -1
        # identifier of the vote that this leader waits for, and of one that it has left; each with its `fill_in`
        self._voting: tuple[tuple[int, int], Completion] | None = None
        self._owed: tuple[tuple[int, int], Completion] | None = None
        self._due: list[Completion] = []  # `fill_in` of each exchange that follows a successful vote, and is not over
        self._pid = os.getpid()
        self._looked_after = 0.0  # time of the last check of the heartbeat process
        self._heartbeat.start(self.hosts, [door for _, _, door in known])

    # -- messages

    def send(self, node: int, kind: int, message: Any, has_rows: bool = False) -> None:
        """Begin to send a message, unless the processes of its receiver have ended: MPICH would crash then.

        Parameters
        ----------
        node : int
            Receiver.
        kind : int
            Tag of the message.
        message : object
            Message to pickle. It must not change until it has arrived.
        has_rows : bool
            Whether the message contains large arrays, which are then sent without a copy.
        """
        self.exchange.pause()
        loss = self._heartbeat.loss()
        if loss is None or loss.reason != Reason.ENDED:
            self._sending = [request for request in self._sending if not request.test()[0]]
            way = self._rows if has_rows else self._messages
            self._sending.append(way.isend(message, node, kind))
        self.exchange.resume()

    def order(self, nodes: Sequence[int], make: Callable[[int], Any], has_rows: bool = False) -> None:
        """Send leaders an order with the next number, ``make(number)``: either all of them or none."""
        with deferred_interrupts():
            self.begin(self.number + 1)
            for node in nodes:
                self.send(node, ORDER, make(self.number), has_rows)

    def silent(self) -> list[int]:
        """Return the nodes that have not answered the last order."""
        answers = self.answers
        return [node for node in self.others if node not in answers or answers[node].number < self.number]

    def is_settled(self) -> bool:
        """Return whether all nodes have answered the last order, and the exchanges of its command are complete."""
        return not self.silent() and self.exchange.advance()

    def take_in(self) -> None:
        """Receive the messages that have arrived, and pass them to `take`; pass on votes."""
        self.exchange.pause()
        for way in (self._messages, self._rows):
            while way.iprobe():
                with deferred_interrupts():  # otherwise an interrupt could lose the message
                    self._begin_receive(way)
        if self._receiving:
            with deferred_interrupts():
                self._take_received()
        self.exchange.resume()
        if self._voting is not None:  # a vote in the background, in steps between which this leader does not wait
            self._votes.pass_on(self._voting[0])

    def _begin_receive(self, way: Any) -> None:
        """Begin to receive a message. Only its beginning may have arrived, and its sender may be stopped."""
        status = self._mpi.Status()
        found = way.improbe(status=status)
        if found is not None:
            source = way is self._rows, status.Get_source()
            self._receiving.append((status.Get_tag(), source, found.irecv()))

    def _take_received(self) -> None:
        """Pass complete messages to `take`, in the order in which each leader has sent them."""
        behind: set[tuple[bool, int]] = set()  # leaders whose next message is incomplete
        i = 0
        while i < len(self._receiving):
            kind, source, request = self._receiving.pop(i)  # also if it cannot be unpickled
            is_complete, message = (False, None) if source in behind else request.test()
            if is_complete:
                self.take(kind, source[1], message)
            else:
                behind.add(source)
                self._receiving.insert(i, (kind, source, request))
                i += 1

    def take(self, kind: int, node: int, message: Any) -> None:
        """Process a received message."""
        if kind == ORDER:
            if message.number > self._ordered:
                self._ordered = message.number
                self.orders.append(message)
        elif kind == ANSWER:
            if isinstance(message, Answer):
                self.large.receive(node, message.large)
            self.answers[node] = message
        elif kind == VOTE:
            self._votes.take(*message)
        else:  # the leader takes part in no further vote of that command
            self._aborted = max(self._aborted, message)
            if message >= self.number:
                self.large.cancel()

    # -- answers

    def answer(self, answer: Answer | Lost) -> None:
        """Send the controller an answer, and begin to send its large replies."""
        self.take_in()
        large: dict[int, np.ndarray] = {}
        if isinstance(answer, Answer):
            answer, large = without_large_replies(answer, is_aborted=self._aborted >= self.number)
        with deferred_interrupts():
            self.send(0, ANSWER, answer)
            self.large.send(large)

    def replies(self, node: int) -> list[bytes | None]:
        """Return the replies of a node's ranks; ``None`` for large ones of a command that was aborted."""
        return self.large.filled_in(node, self.answers[node].replies)

    def has_arrived(self) -> bool:
        """Return whether all messages have arrived, those that this leader has sent and those that it receives."""
        is_sent = all(request.test()[0] for request in self._sending)
        return is_sent and not self._receiving and self.exchange.advance()

    def wait(self, found: Callable[[], Any], check: Callable[[], None] | None = None) -> Any:
        """Wait until ``found()`` returns a true value, and return it.

        Parameters
        ----------
        found : callable
            Called after each receipt of messages.
        check : callable, optional
            Called every `_LOOK_SECONDS`; may raise.

        Raises
        ------
        NodeLost
            On the controller, when a node is lost.
        """
        start = looked = time.perf_counter()
        while True:
            self.take_in()
            is_idle = self.exchange.advance()
            self.complete_owed_exchange()
            result = found()
            if result:
                return result
            now = time.perf_counter()
            self._check_heartbeat(now)
            if check is not None and now - looked > _LOOK_SECONDS:
                looked = now
                check()
            waited = now - start
            if waited > _YIELD_SECONDS:
                time.sleep(min(waited / 50, _LONGEST_NAP if is_idle else _LONGEST_NAP_IN_EXCHANGE))
            elif waited > _SPIN_SECONDS:
                os.sched_yield()

    def wait_outside_calls(self, found: Callable[[], Any]) -> Any:
        """Wait as `wait`, outside of calls: in `fork` and `close`. Add to the message of a `NodeLost` what to do."""
        try:
            return self.wait(found)
        except NodeLost as error:
            error.args = (f"{error}; {RESTART}",)
            raise

    def _check_heartbeat(self, now: float) -> None:
        """Restart heartbeat processes that were killed; on the controller, raise `NodeLost` once if a node is lost."""
        if now - self._looked_after > _LOOK_SECONDS:
            self._looked_after = now
            self._heartbeat.look_after()
        loss = self._heartbeat.loss()
        if loss is not None and not self.node and not self.is_lost:
            self.is_lost = True
            raise NodeLost(self._heartbeat.describe(loss), machine=loss.node)

    def note_steps(self, steps: int) -> None:
        """Report to the other nodes the number of steps that the ranks of this node have made in a training loop."""
        self._heartbeat.note_steps(steps)

    def makes_steps(self, node: int, seconds: float) -> bool:
        """Return whether the ranks of another node have made steps of a training loop in the last seconds."""
        return time.monotonic() - self._heartbeat.moved(node) < seconds

    def set_heartbeat(self, seconds: float) -> None:
        """Set the seconds of silence after which a node is lost."""
        self._heartbeat.set_limit(seconds)

    def is_ordered_to_stop(self) -> bool:
        """Return whether there is an order of the controller to end the ranks that this leader has not executed yet."""
        self.take_in()
        return any(isinstance(order, Stop) for order in self.orders)

    # -- votes

    def begin(self, number: int) -> None:
        """Begin a command: drop the votes and exchanges of earlier ones, and end the thread of the latter."""
        self.exchange.rest()
        self.large.drop()
        self.number, self._meeting = number, 0
        self._due.clear()
        self._votes.drop_before(number, self._owed and self._owed[0])

    def abort(self) -> None:
        """Notify the other leaders that this leader takes part in no further vote of the current command."""
        if self._aborted < self.number:
            with deferred_interrupts():
                self._aborted = self.number
                for node in self.others:
                    self.send(node, ABORT, self.number)

    def vote(
        self, word: int | None, arrays: Sequence[np.ndarray], check: Callable[[list[int]], None], fill_in: Completion
    ) -> Ballots:
        """Vote on an exchange of arrays: send a word and small arrays to all leaders, and wait for theirs.

        Parameters
        ----------
        word : int or None
            The exchange takes place if the words of all leaders are equal and not ``None``.
        arrays : sequence of array
            Small arrays to send with the vote.
        check : callable
            Called regularly with the numbers of the nodes that have not voted; may raise.
        fill_in : callable
            Takes part in the exchange on behalf of this leader, if this leader fails. If it fails after the vote,
            `complete_exchanges` calls it. If this method raises, it is called later, provided that all words are equal.

        Returns
        -------
        list of tuple
            Word and arrays of each leader, in node order.

        Raises
        ------
        CollectiveAborted
            If a leader has failed in this command.
        """
        return self.await_votes(self.cast(word, arrays, fill_in), check)

    def cast(self, word: int | None, arrays: Sequence[np.ndarray], fill_in: Completion) -> Place:
        """Vote without waiting for the other leaders; see `vote`. Return the place of the vote, for `votes_at`."""
        self.check_aborted()  # otherwise other leaders might enter the exchange
        self._owed = None
        with deferred_interrupts():  # either all leaders receive the vote, or none
            place = self.number, self._meeting
            self._meeting += 1
            self._voting = place, fill_in
            self._votes.cast(place, (word, arrays))
        return place

    def votes_at(self, place: Place) -> Ballots | None:
        """Return the words and arrays of all leaders, in node order; ``None`` if not all leaders have voted.

        Raises
        ------
        CollectiveAborted
            If a leader has failed in this command before it has voted.
        """
        votes = self._votes.of(place)
        if len(votes) < self.n_nodes:
            self._raise_if_aborted()
        with deferred_interrupts():
            if self._voting is None or self._voting[0] != place:
                raise SessionError(CLOSED_WITHIN)
            if len(votes) < self.n_nodes:
                return None
            fill_in, self._voting = self._voting[1], None
            if agree(votes.values()):
                self._due.append(fill_in)
            self._votes.drop(place)
        return [votes[node] for node in range(self.n_nodes)]

    def await_votes(self, place: Place, check: Callable[[list[int]], None]) -> Ballots:
        """Wait for the votes of all leaders; ``check`` and the result are those of `vote`."""

        def look() -> None:
            self._votes.pass_on(place, is_late=True)  # so that the controller knows which leader is silent
            check([node for node in self.others if node not in self._votes.of(place)])

        try:
            ballots: Ballots = self.wait(lambda: self.votes_at(place), look)
            return ballots
        except BaseException:
            self._owed, self._voting = self._voting or self._owed, None
            raise

    def complete_owed_exchange(self) -> None:
        """Take part in an exchange that this leader has voted for and then left, if all others have voted for it."""
        if self._owed is None or self.is_lost:
            return
        place, fill_in = self._owed
        votes = self._votes.of(place)
        self._votes.pass_on(place)
        if len(votes) == self.n_nodes:
            with deferred_interrupts():
                self._owed = None
                self._votes.drop(place)
                if agree(votes.values()):
                    fill_in()

    def end_exchange(self, fill_in: Completion) -> None:
        """Note that an exchange after a vote is complete."""
        if fill_in in self._due:
            self._due.remove(fill_in)

    def complete_exchanges(self) -> None:
        """Take part in the rest of each exchange that all leaders have agreed on, after this leader has failed."""
        with deferred_interrupts():
            while self._due and not self.is_lost:
                fill_in = self._due[-1]
                fill_in()
                self.end_exchange(fill_in)

    def leave(self) -> None:
        """Abort the current command, and leave its vote or exchange, which a signal handler may have interrupted."""
        self.exchange.rest()
        with deferred_interrupts():
            self.abort()
            if self._voting is not None:
                self._owed, self._voting = self._voting, None
            self.complete_exchanges()
            self.complete_owed_exchange()

    def check_aborted(self) -> None:
        """Receive messages; raise `CollectiveAborted` if a leader has aborted the current command."""
        self.take_in()
        self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        if self._aborted >= self.number:
            raise CollectiveAborted("a rank of another node failed")

    # -- exchange of arrays

    def reserve_tags(self, n: int) -> int:
        """Return the number of the first of ``n`` pieces. All leaders reserve the same numbers in the same order."""
        first = self._n_pieces
        self._n_pieces += n
        return first

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
        tag = 4 * (number % _N_TAGS)
        return self.exchange.begin(tag, sends[0], receives[0], sends[1], receives[1], reduction, narrowing, has_failed)

    def complete(self, is_done: Callable[[], bool], check: Callable[[], None], is_leaving: bool) -> None:
        """Wait until pieces are complete.

        A signal handler may end the wait, and `complete_exchanges` then completes the pieces. If anything else ends it,
        this program can have no other session, because MPI may still write to the arrays.

        Parameters
        ----------
        is_done : callable
            Returns whether the pieces are complete.
        check : callable
            Called regularly; may raise.
        is_leaving : bool
            Whether this leader has failed, and sends empty messages. It then handles signals only after some time.
        """
        start = time.perf_counter()
        is_interrupted = False

        def look() -> None:
            nonlocal is_interrupted
            if not is_leaving or time.perf_counter() - start > _DEFERRED_SECONDS:
                is_interrupted = not is_leaving
                handle_interrupts()
                is_interrupted = False
            check()

        try:
            self.wait(is_done, look)
        except BaseException:
            if not is_interrupted:
                self.is_lost = True
            raise

    # -- shutdown

    def is_own_process(self) -> bool:
        """Return whether this process is the leader itself, not a process forked from it."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Finalize MPI when all messages have arrived. All leaders call this."""
        if self.is_own_process() and not self._mpi.Is_finalized():
            self.exchange.rest()
            self.wait(self.has_arrived)
            self._heartbeat.leave()
            self._mpi.Finalize()
            self._heartbeat.stop()

    def abort_job(self) -> None:
        """End all processes of the job, because one of them does not answer."""
        drain_output()
        self._mpi.COMM_WORLD.Abort(1)
