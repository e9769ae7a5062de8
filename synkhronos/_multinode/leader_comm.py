"""Communication between node leaders by MPI: messages, votes, exchanges of arrays, and aborts.

Leaders vote before each exchange of arrays: each sends all others a word, and all enter the exchange or none does.
Before a session, they also compare the versions of what must be the same on all nodes.

Invariants
----------
* Only the leader's main thread, or on the controller the holder of the session's lock, calls MPI.
* A leader never blocks in a call of MPI. It polls for messages and checks its own process group, with naps in between
  that grow.
* Messages with large arrays and those without use separate communicators, and may overtake each other. Orders are
  numbered: one that arrives after a later one is dropped, because the controller has given it up.
* Commands are numbered, and votes are identified by command and vote. Messages about earlier commands are dropped. *
All leaders enter a collective of MPI, or none: each enters only after the votes of all others. A leader that has voted
  and fails before it has all votes takes part later, with arbitrary data, which nobody uses.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos import _backends
from synkhronos._multinode.heartbeat import Heartbeat, Reason
from synkhronos._multinode.node_messages import Stop
from synkhronos._processes import ProcessGroup
from synkhronos._utils.interrupts import deferred_interrupts, handle_interrupts
from synkhronos._utils.rendezvous import RESTART, drain_output
from synkhronos.errors import CLOSED_WITHIN, CollectiveAborted, NodeLost, SessionError


class Transfer(NamedTuple):
    """A non-blocking collective of MPI in flight: one step of an exchange.

    Attributes
    ----------
    request : mpi4py.MPI.Request
    arrays : tuple of array
        Memory that it reads and writes.
    """

    request: Any
    arrays: tuple[np.ndarray, ...]

    def is_complete(self) -> bool:
        """Return whether the transfer has completed."""
        return bool(self.request.Test())


class Wire:
    """One leader's MPI communicators; the controller is leader of node 0. Subclasses override `take`.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, initialized.

    Attributes
    ----------
    node, n_nodes : int
        Number of this node, and number of nodes.
    others : list of int
        The other nodes.
    """

    def __init__(self, mpi: Any) -> None:
        from mpi4py.util import pkl5

        self._mpi = mpi
        self._messages, self._rows = mpi.COMM_WORLD.Dup(), pkl5.Intracomm(mpi.COMM_WORLD.Dup())
        self._parts, self._wholes = mpi.COMM_WORLD.Dup(), mpi.COMM_WORLD.Dup()
        self.node, self.n_nodes = self._messages.Get_rank(), self._messages.Get_size()
        self.others = [node for node in range(self.n_nodes) if node != self.node]
        self._sending: list[Any] = []

    def send(self, node: int, kind: int, message: Any, has_rows: bool = False) -> None:
        """Send a message, which nobody changes until it has arrived; ``has_rows``: it contains large arrays."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        way = self._rows if has_rows else self._messages
        self._sending.append(way.isend(message, node, kind))

    def take_in(self) -> None:
        """Receive the messages that have arrived, and pass them to `take`."""
        for way in (self._messages, self._rows):
            while way.iprobe():
                with deferred_interrupts():  # a half received message would be lost
                    self._receive(way)

    def _receive(self, way: Any) -> None:
        status = self._mpi.Status()
        found = way.improbe(status=status)
        if found is not None:
            self.take(status.Get_tag(), status.Get_source(), found.recv())

    def take(self, kind: int, node: int, message: Any) -> None:
        """Process a message of some kind from a node."""
        raise NotImplementedError

    def has_arrived(self) -> bool:
        """Return whether all sent messages have arrived."""
        return all(request.test()[0] for request in self._sending)

    def all_to_all(
        self,
        given: np.ndarray,
        lengths: Sequence[int],
        starts: Sequence[int] | None,
        got: np.ndarray,
        got_lengths: Sequence[int],
    ) -> Transfer:
        """Send a part of an array to each leader, and receive a part from each.

        Parameters
        ----------
        given : array
        lengths : sequence of int
            Number of elements of the part for each leader.
        starts : sequence of int, or None
            First element of each part in ``given``; ``None``: the parts follow each other.
        got : array
            Receives the parts, one after the other.
        got_lengths : sequence of int
            Number of elements of the part from each leader.
        """
        byte = self._mpi.BYTE
        sent = [_bytes(given), _layout(lengths, given.itemsize, starts), byte]
        received = [_bytes(got), _layout(got_lengths, got.itemsize), byte]
        return Transfer(self._parts.Ialltoallv(sent, received), (given, got))

    def all_gather(self, array: np.ndarray, lengths: Sequence[int]) -> Transfer:
        """Fill in, in place, an array of which each leader has a part, in the order of the nodes."""
        received = [_bytes(array), _layout(lengths, array.itemsize), self._mpi.BYTE]
        return Transfer(self._wholes.Iallgatherv(self._mpi.IN_PLACE, received), (array,))


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


def _layout(lengths: Sequence[int], itemsize: int, starts: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
    """Return the number of bytes of each part, and its first byte."""
    counts = [length * itemsize for length in lengths]
    if starts is None:
        return counts, [sum(counts[:i]) for i in range(len(counts))]
    return counts, [start * itemsize for start in starts]


def describe() -> dict[str, str]:
    """Return the versions on this node, and the default floating-point dtype."""
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
    except PackageNotFoundError:  # not installed: its folder is on the path
        return "of unknown version"


def describe_differences(nodes: Sequence[dict[str, str]], hosts: Sequence[str]) -> str:
    """Describe in one line what differs between the nodes; return an empty string if nothing does.

    Parameters
    ----------
    nodes : list of dict
        Result of `describe` on each node.
    hosts : list of str
        Their host names.
    """
    differences = []
    for node, (found, host) in enumerate(zip(nodes, hosts)):
        for name in dict.fromkeys([*nodes[0], *found]):
            first, here = nodes[0].get(name, "missing"), found.get(name, "missing")
            if here != first:
                differences.append(f"{name} is {here} on node {node} ({host}) and {first} on node 0 ({hosts[0]})")
    return "; ".join(differences)


class MultiNodeSignals:
    """The signals that the dispatcher needs, for all nodes."""

    def __init__(self, group: ProcessGroup, comm: LeaderComm) -> None:
        self._signals, self._comm = group.signals, comm
        self.reset = group.signals.reset

    @property
    def aborted(self) -> bool:
        return self._signals.aborted

    def abort(self) -> None:
        self._comm.abort()
        self._signals.abort()


#: Tags of messages.
VOTE, ABORT = 3, 4

_Fill = Callable[[], None]


class Voting(Wire):
    """Votes of one leader. Subclasses override `wait`.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, initialized.

    Attributes
    ----------
    number : int
        Number of the current command.
    is_lost : bool
        Whether a leader is silent, or did not answer an order to stop.
    """

    def __init__(self, mpi: Any) -> None:
        super().__init__(mpi)
        self.number = 0
        self.is_lost = False
        self._meeting = 0
        self._votes: dict[tuple[int, int], dict[int, Any]] = {}
        self._aborted = -1
        self._voting: tuple[tuple[int, int], _Fill] | None = None
        self._owed: tuple[tuple[int, int], _Fill] | None = None
        self._due: _Fill | None = None

    def wait(self, found: Callable[[], Any], check: Callable[[], None] | None = None) -> Any:
        """Wait until ``found()`` returns something true, and return it; ``check`` may raise."""
        raise NotImplementedError

    def take_vote(self, node: int, number: int, vote: int, word: Any) -> None:
        """Record the vote of another leader."""
        self._votes.setdefault((number, vote), {})[node] = word

    def take_abort(self, number: int) -> None:
        """Record that another leader takes part in no further vote of a command."""
        self._aborted = max(self._aborted, number)

    def begin(self, number: int) -> None:
        """Begin a command."""
        self.number, self._meeting = number, 0
        owed = self._owed and self._owed[0]
        self._votes = {key: votes for key, votes in self._votes.items() if key[0] >= number or key == owed}

    def abort(self) -> None:
        """Notify the other leaders that this one takes part in no further vote of this command."""
        if self._aborted < self.number:
            with deferred_interrupts():
                self._aborted = self.number
                for node in self.others:
                    self.send(node, ABORT, self.number)

    def vote(
        self, word: int | None, arrays: Sequence[np.ndarray], check: Callable[[list[int]], None], fill_in: _Fill
    ) -> list[tuple[int | None, list[np.ndarray]]]:
        """Send the other leaders a word and small arrays, and wait for theirs.

        Parameters
        ----------
        word : int, or None
            All leaders continue with the exchange if all words are equal and not ``None``.
        arrays : sequence of array
        check : callable
            Called with the nodes that have not voted; may raise.
        fill_in : callable
            Takes part in the rest of the exchange that follows if all words are equal. It is called by
            `complete_exchange`, or, if this method raises, later, once the votes turn out to be equal.

        Returns
        -------
        list of tuple
            The word and the arrays of each leader, in the order of the nodes.

        Raises
        ------
        CollectiveAborted
            If a leader has failed in this command.
        """
        self.take_in()  # after another's failure this leader does not vote, so nobody enters the exchange
        self._check_aborted()
        place = self.number, self._meeting
        votes = self._votes.setdefault(place, {})

        def found() -> bool:
            if len(votes) < self.n_nodes:
                self._check_aborted()
                return False
            return True

        def look() -> None:
            check([node for node in self.others if node not in votes])

        self._owed = self._due = None
        try:
            with deferred_interrupts():  # all of them receive it, or none
                self._meeting += 1
                self._voting = place, fill_in
                for node in self.others:
                    self.send(node, VOTE, (*place, (word, arrays)))
                votes[self.node] = word, arrays
            self.wait(found, look)
            if self._voting is None:
                raise SessionError(CLOSED_WITHIN)
            self._voting, self._due = None, fill_in if _agree(votes) else None
        except BaseException:
            self._owed, self._voting = self._voting or self._owed, None
            raise
        del self._votes[place]
        return [votes[node] for node in range(self.n_nodes)]

    def complete_owed_exchange(self) -> None:
        """Take part in an exchange that this leader has voted for and left, if all others have voted for it, too."""
        if self._owed is None or self.is_lost:
            return
        place, fill_in = self._owed
        votes = self._votes.get(place, {})
        if len(votes) == self.n_nodes:
            with deferred_interrupts():
                self._owed = None
                del self._votes[place]
                if _agree(votes):
                    fill_in()

    def complete_exchange(self) -> None:
        """Take part in the rest of the exchange that all leaders agreed on, because this one has to leave it."""
        with deferred_interrupts():
            fill_in, self._due = self._due, None
            if fill_in is not None and not self.is_lost:
                fill_in()

    def leave(self) -> None:
        """Leave a vote or an exchange for good, from a signal handler that runs within it."""
        with deferred_interrupts():
            self.abort()
            if self._voting is not None:
                self._owed, self._voting = self._voting, None
            self.complete_exchange()

    def _check_aborted(self) -> None:
        if self._aborted >= self.number:
            raise CollectiveAborted("a rank of another node failed")


def _agree(votes: dict[int, Any]) -> bool:
    """Return whether all leaders continue: their words are equal, and not ``None``."""
    words = {word for word, _ in votes.values()}
    return len(words) == 1 and None not in words


#: Tags of messages.
ORDER, ANSWER = 1, 2

_SPIN_SECONDS = 2e-4
_YIELD_SECONDS = 2e-2  # of waiting during which the core is yielded, before naps begin
_LONGEST_NAP = 4e-3
_LOOK_SECONDS = 0.05
_DEFERRED_SECONDS = 2.0  # for which an exchange may delay Ctrl-C


class LeaderComm(Voting):
    """One leader's end of the communication; the controller is leader of node 0.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, initialized.

    Attributes
    ----------
    node, n_nodes : int
        Number of this node, and number of nodes.
    hosts : list of str
        Host names of all nodes.
    differences : str
        What differs between the nodes; see `describe_differences`.
    orders : deque
        Orders of the controller that this leader has not executed yet.
    answers : dict of int to object
        Last answer of each other leader, by node.
    """

    def __init__(self, mpi: Any) -> None:
        super().__init__(mpi)
        self._heartbeat = Heartbeat(self.node)
        own = socket.gethostname(), describe(), self._heartbeat.door
        known = self._messages.allgather(own)  # before any object of this package is pickled
        self.hosts: list[str] = [host for host, _, _ in known]
        self.differences = describe_differences([versions for _, versions, _ in known], self.hosts)
        self.orders: deque[Any] = deque()
        self._ordered = 0  # number of the last order
        self.answers: dict[int, Any] = {}
        self._abandoned: list[Any] = []  # keeps memory alive that MPI may still write to
        self._pid = os.getpid()
        self._looked_after = 0.0  # time of the last check of the heartbeat process
        self._heartbeat.start(self.hosts, [door for _, _, door in known])

    # -- messages

    def send(self, node: int, kind: int, message: Any, has_rows: bool = False) -> None:
        """Send as `Wire.send` does; send nothing once the processes of a node have ended, because MPI would crash."""
        loss = self._heartbeat.loss()
        if loss is None or loss.reason != Reason.ENDED:
            super().send(node, kind, message, has_rows)

    def take(self, kind: int, node: int, message: Any) -> None:
        """Process a received message."""
        if kind == ORDER:
            if message.number > self._ordered:
                self._ordered = message.number
                self.orders.append(message)
        elif kind == ANSWER:
            self.answers[node] = message
        elif kind == VOTE:
            self.take_vote(node, *message)
        else:
            self.take_abort(message)

    def wait(self, found: Callable[[], Any], check: Callable[[], None] | None = None) -> Any:
        """Wait until ``found()`` returns something true, and return it; ``check`` may raise."""
        start = looked = time.perf_counter()
        while True:
            self.take_in()
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
                time.sleep(min(waited / 50, _LONGEST_NAP))
            elif waited > _SPIN_SECONDS:
                os.sched_yield()

    def wait_outside_calls(self, found: Callable[[], Any]) -> Any:
        """Wait as `wait` does, in `fork` and `close`; complete the message of a `NodeLost`, as calls do."""
        try:
            return self.wait(found)
        except NodeLost as error:
            error.args = (f"{error}; {RESTART}",)
            raise

    def _check_heartbeat(self, now: float) -> None:
        if now - self._looked_after > _LOOK_SECONDS:
            self._looked_after = now
            self._heartbeat.look_after()
        loss = self._heartbeat.loss()
        if loss is not None and not self.node and not self.is_lost:
            self.is_lost = True
            raise NodeLost(
                self._heartbeat.describe(loss),
                machine=loss.node,
            )

    def set_heartbeat(self, seconds: float) -> None:
        """Set the seconds of silence after which a node is lost."""
        self._heartbeat.set_limit(seconds)

    def is_ordered_to_stop(self) -> bool:
        """Return whether the controller has ordered the ranks to end, and this leader has not done so yet."""
        self.take_in()
        return any(isinstance(order, Stop) for order in self.orders)

    # -- exchange of arrays

    def complete(self, is_done: Callable[[], bool], check: Callable[[], None]) -> None:
        """Wait for transfers.

        If the wait is given up, this program can have no other session, because MPI may still write to the arrays.
        """
        start = time.perf_counter()

        def look() -> None:
            if time.perf_counter() - start > _DEFERRED_SECONDS:
                handle_interrupts()
            check()

        try:
            self.wait(is_done, look)
        except BaseException:
            self.is_lost = True
            self._abandoned.append(is_done)
            raise

    # -- shutdown

    def is_own_process(self) -> bool:
        """Return whether this process is the leader itself, not one forked from it."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Leave MPI, once all sent messages have arrived; all leaders call this."""
        if self.is_own_process() and not self._mpi.Is_finalized():
            self.wait(self.has_arrived)
            self._heartbeat.leave()
            self._mpi.Finalize()
            self._heartbeat.stop()

    def abort_job(self) -> None:
        """End all processes of the job, because one of them does not answer."""
        drain_output()
        self._mpi.COMM_WORLD.Abort(1)
