"""What is sent from leader to leader: messages, and parts of arrays, by MPI.

What must be the same on all machines of a session, and what of it is not.

The flag by which ranks are told that one of them has failed, on all machines.

Meetings of the leaders: each tells all others whether its ranks are there, and all go on to an exchange, or none.

Invariants
----------
* Commands are numbered, and votes by command and meeting; what a message says of an earlier command is forgotten.
* All leaders enter a collective of MPI, or none: each has heard from all others before that they will. One that has
  voted and has to leave before it has heard all of them takes part when it has, with anything; nobody uses that.

The way between the leaders: messages by MPI, from one to another, and the exchange of arrays.

Invariants
----------
* Only the leader's main thread, or whoever holds the session's lock in the master, speaks MPI.
* Messages with rows and those without go ways of their own, and may overtake each other. Orders are numbered: one that
  comes after a later one is forgotten, for the master has given it up.
* A leader never waits in a call of MPI: it looks for messages, and at its own team, with naps in between that grow.
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
from synkhronos._processes import Team
from synkhronos._utils.interrupts import deferred_interrupts, handle_interrupts
from synkhronos._utils.rendezvous import RESTART, drain_output
from synkhronos.errors import CLOSED_WITHIN, CollectiveAborted, NodeLost, SessionError

__all__ = ["ABORT", "VOTE", "FleetSignals", "Line", "Meetings", "Transfer", "Wire", "describe", "tell_differences"]


class Transfer(NamedTuple):
    """One step of an exchange, under way.

    Attributes
    ----------
    request : mpi4py.MPI.Request
    arrays : tuple of array
        The memory that it reads and writes.
    """

    request: Any
    arrays: tuple[np.ndarray, ...]

    def is_complete(self) -> bool:
        """Whether nothing of it is left to do."""
        return bool(self.request.Test())


class Wire:
    """One leader's end; the master's has number 0. Whoever uses it overrides `take`.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, initialised.

    Attributes
    ----------
    machine, n_machines : int
    others : list of int
        The other machines.
    """

    def __init__(self, mpi: Any) -> None:
        from mpi4py.util import pkl5

        self._mpi = mpi
        self._messages, self._rows = mpi.COMM_WORLD.Dup(), pkl5.Intracomm(mpi.COMM_WORLD.Dup())
        self._parts, self._wholes = mpi.COMM_WORLD.Dup(), mpi.COMM_WORLD.Dup()
        self.machine, self.n_machines = self._messages.Get_rank(), self._messages.Get_size()
        self.others = [machine for machine in range(self.n_machines) if machine != self.machine]
        self._sending: list[Any] = []

    def send(self, machine: int, kind: int, message: Any, has_rows: bool = False) -> None:
        """Send a message, which nobody changes until it has arrived; ``has_rows``: with large arrays in it."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        way = self._rows if has_rows else self._messages
        self._sending.append(way.isend(message, machine, kind))

    def take_in(self) -> None:
        """Receive what has arrived, and `take` it."""
        for way in (self._messages, self._rows):
            while way.iprobe():
                with deferred_interrupts():  # a message that is half received is lost
                    self._receive(way)

    def _receive(self, way: Any) -> None:
        status = self._mpi.Status()
        found = way.improbe(status=status)
        if found is not None:
            self.take(status.Get_tag(), status.Get_source(), found.recv())

    def take(self, kind: int, machine: int, message: Any) -> None:
        """A message has come, of a kind, from a machine."""
        raise NotImplementedError

    def has_arrived(self) -> bool:
        """Whether all that was sent has arrived."""
        return all(request.test()[0] for request in self._sending)

    def all_to_all(
        self,
        given: np.ndarray,
        lengths: Sequence[int],
        starts: Sequence[int] | None,
        got: np.ndarray,
        got_lengths: Sequence[int],
    ) -> Transfer:
        """Give each leader a part of an array, and get one from each, which are put one after the other.

        ``lengths`` are those of the parts, in elements, ``starts`` where they begin; ``None``: one after the other.
        """
        byte = self._mpi.BYTE
        sent = [_bytes(given), _layout(lengths, given.itemsize, starts), byte]
        received = [_bytes(got), _layout(got_lengths, got.itemsize), byte]
        return Transfer(self._parts.Ialltoallv(sent, received), (given, got))

    def all_gather(self, array: np.ndarray, lengths: Sequence[int]) -> Transfer:
        """Complete an array of which each leader has a part, in the order of the machines."""
        received = [_bytes(array), _layout(lengths, array.itemsize), self._mpi.BYTE]
        return Transfer(self._wholes.Iallgatherv(self._mpi.IN_PLACE, received), (array,))


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


def _layout(lengths: Sequence[int], itemsize: int, starts: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
    """How many bytes each part has, and where it begins."""
    counts = [length * itemsize for length in lengths]
    if starts is None:
        return counts, [sum(counts[:i]) for i in range(len(counts))]
    return counts, [start * itemsize for start in starts]


def describe() -> dict[str, str]:
    """The versions on this machine, and the type that numbers have by default."""
    return {
        "Python": platform.python_version(),
        "Synkhronos": _version_of("synkhronos"),
        _backends.TITLE: _version_of(_backends.name),
        "NumPy": np.__version__,
        "floatX": _backends.T.scalar().dtype,
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # its folder is on the path, and that is all
        return "of unknown version"


def tell_differences(machines: Sequence[dict[str, str]], hosts: Sequence[str]) -> str:
    """Tell in one line what is not on every machine as it is on the first one; empty if all is.

    Parameters
    ----------
    machines : list of dict
        What `describe` says on each.
    hosts : list of str
        Their names.
    """
    told = []
    for machine, (found, host) in enumerate(zip(machines, hosts)):
        for name in dict.fromkeys([*machines[0], *found]):
            first, here = machines[0].get(name, "missing"), found.get(name, "missing")
            if here != first:
                told.append(f"{name} is {here} on machine {machine} ({host}) and {first} on machine 0 ({hosts[0]})")
    return "; ".join(told)


class FleetSignals:
    """What the dispatcher asks of `Signals`, for all machines."""

    def __init__(self, team: Team, line: Line) -> None:
        self._signals, self._line = team.signals, line
        self.reset = team.signals.reset

    @property
    def aborted(self) -> bool:
        return self._signals.aborted

    def abort(self) -> None:
        self._line.abort()
        self._signals.abort()


#: Kinds of messages: their tags.
VOTE, ABORT = 3, 4

_Fill = Callable[[], None]


class Meetings(Wire):
    """One leader's part in them. Whoever uses it overrides `wait`.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, initialised.

    Attributes
    ----------
    number : int
        Of the command under way.
    is_lost : bool
        Whether a leader is silent, or did not answer when it was told to stop.
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
        """Wait until ``found()`` returns something, and return that; ``check`` may raise."""
        raise NotImplementedError

    def take_vote(self, machine: int, number: int, meeting: int, word: Any) -> None:
        """What another leader tells has come."""
        self._votes.setdefault((number, meeting), {})[machine] = word

    def take_abort(self, number: int) -> None:
        """Another leader does not come to any meeting of a command more."""
        self._aborted = max(self._aborted, number)

    def begin(self, number: int) -> None:
        """A command begins."""
        self.number, self._meeting = number, 0
        owed = self._owed and self._owed[0]
        self._votes = {key: votes for key, votes in self._votes.items() if key[0] >= number or key == owed}

    def abort(self) -> None:
        """Tell the other leaders that this one does not come to any meeting of this command more."""
        if self._aborted < self.number:
            with deferred_interrupts():
                self._aborted = self.number
                for machine in self.others:
                    self.send(machine, ABORT, self.number)

    def vote(
        self, word: Any, arrays: Sequence[np.ndarray], check: Callable[[list[int]], None], fill_in: _Fill
    ) -> list[Any]:
        """Tell the other leaders a word, and small arrays; returns what all of them have told, in order.

        Parameters
        ----------
        word, arrays
        check : callable
            Gets the machines that are waited for, and may raise.
        fill_in : callable
            Takes part in what is left of the exchange that follows when all tell the same word. It is called later if
            this raises, and they turn out to do so; and by `pay`.

        Raises
        ------
        CollectiveAborted
            If one of them has failed in this command.
        """
        self.take_in()  # who hears that another has failed does not vote, which keeps everybody out of the exchange
        self._check_aborted()
        place = self.number, self._meeting
        votes = self._votes.setdefault(place, {})

        def found() -> bool:
            if len(votes) < self.n_machines:
                self._check_aborted()
                return False
            return True

        def look() -> None:
            check([machine for machine in self.others if machine not in votes])

        self._owed = self._due = None
        try:
            with deferred_interrupts():  # all of them get it, or none
                self._meeting += 1
                self._voting = place, fill_in
                for machine in self.others:
                    self.send(machine, VOTE, (*place, (word, arrays)))
                votes[self.machine] = word, arrays
            self.wait(found, look)
            if self._voting is None:
                raise SessionError(CLOSED_WITHIN)
            self._voting, self._due = None, fill_in if _agree(votes) else None
        except BaseException:
            self._owed, self._voting = self._voting or self._owed, None
            raise
        del self._votes[place]
        return [votes[machine] for machine in range(self.n_machines)]

    def pay_what_is_owed(self) -> None:
        """Take part in the exchange that this leader has voted for and left, if all others are in it."""
        if self._owed is None or self.is_lost:
            return
        place, fill_in = self._owed
        votes = self._votes.get(place, {})
        if len(votes) == self.n_machines:
            with deferred_interrupts():
                self._owed = None
                del self._votes[place]
                if _agree(votes):
                    fill_in()

    def pay(self) -> None:
        """Take part in what is left of the exchange that all leaders have agreed on, if this one has to leave it."""
        with deferred_interrupts():
            fill_in, self._due = self._due, None
            if fill_in is not None and not self.is_lost:
                fill_in()

    def leave(self) -> None:
        """Leave a meeting for good, from within it: by a handler of a signal."""
        with deferred_interrupts():
            self.abort()
            if self._voting is not None:
                self._owed, self._voting = self._voting, None
            self.pay()

    def _check_aborted(self) -> None:
        if self._aborted >= self.number:
            raise CollectiveAborted("a rank of another machine failed")


def _agree(votes: dict[int, Any]) -> bool:
    """Whether all leaders go on: their words are the same, and a word."""
    words = {word for word, _ in votes.values()}
    return len(words) == 1 and None not in words


#: Kinds of messages: their tags.
ORDER, ANSWER = 1, 2

_SPIN_SECONDS = 2e-4
_YIELD_SECONDS = 2e-2  # in which whoever else wants the core has it
_LONGEST_NAP = 4e-3
_LOOK_SECONDS = 0.05
_DEFERRED_SECONDS = 2.0  # that Ctrl-C may wait for an exchange


class Line(Meetings):
    """One leader's end; the master's has number 0.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, initialised.

    Attributes
    ----------
    machine, n_machines : int
    hosts : list of str
        The names of all machines.
    differences : str
        What is not on all machines as it is on the first one; see `tell_differences`.
    orders : deque
        What the master has said and this leader has not done yet.
    answers : dict
        ``answers[machine]``: the last answer of another leader.
    """

    def __init__(self, mpi: Any) -> None:
        super().__init__(mpi)
        self._heartbeat = Heartbeat(self.machine)
        own = socket.gethostname(), describe(), self._heartbeat.door
        known = self._messages.allgather(own)  # before anything of ours is pickled
        self.hosts: list[str] = [host for host, _, _ in known]
        self.differences = tell_differences([versions for _, versions, _ in known], self.hosts)
        self.orders: deque[Any] = deque()
        self._ordered = 0  # the number of the last one
        self.answers: dict[int, Any] = {}
        self._abandoned: list[Any] = []  # what MPI may still write to
        self._pid = os.getpid()
        self._looked_after = 0.0  # when the heartbeat was
        self._heartbeat.start(self.hosts, [door for _, _, door in known])

    # -- messages

    def send(self, machine: int, kind: int, message: Any, has_rows: bool = False) -> None:
        """As `Wire.send`; nothing once the processes of a node have ended, because MPI crashes then."""
        loss = self._heartbeat.loss()
        if loss is None or loss.reason != Reason.ENDED:
            super().send(machine, kind, message, has_rows)

    def take(self, kind: int, machine: int, message: Any) -> None:
        """A message has come."""
        if kind == ORDER:
            if message.number > self._ordered:
                self._ordered = message.number
                self.orders.append(message)
        elif kind == ANSWER:
            self.answers[machine] = message
        elif kind == VOTE:
            self.take_vote(machine, *message)
        else:
            self.take_abort(message)

    def wait(self, found: Callable[[], Any], check: Callable[[], None] | None = None) -> Any:
        """Wait until ``found()`` returns something, and return that; ``check`` may raise."""
        start = looked = time.perf_counter()
        while True:
            self.take_in()
            self.pay_what_is_owed()
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
        """Wait as `wait` does, for `fork` and `close`; the message of a `NodeLost` is complete, as in calls."""
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
        if loss is not None and not self.machine and not self.is_lost:
            self.is_lost = True
            raise NodeLost(
                self._heartbeat.describe(loss),
                machine=loss.node,
            )

    def set_heartbeat(self, seconds: float) -> None:
        """Set after how many seconds of silence a node is lost."""
        self._heartbeat.set_limit(seconds)

    def is_told_to_stop(self) -> bool:
        """Whether the master has said that the ranks are to end, which this leader has not done yet."""
        self.take_in()
        return any(isinstance(order, Stop) for order in self.orders)

    # -- exchange

    def complete(self, is_done: Callable[[], bool], check: Callable[[], None]) -> None:
        """Wait for transfers. If that is given up no other session can be had: MPI may still write to the arrays."""
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

    # -- the end

    def is_own_process(self) -> bool:
        """Whether this process is the leader, and none that was forked from it."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Leave MPI, once all that was sent has arrived; all leaders do so."""
        if self.is_own_process() and not self._mpi.Is_finalized():
            self.wait(self.has_arrived)
            self._heartbeat.leave()
            self._mpi.Finalize()
            self._heartbeat.stop()

    def break_off(self) -> None:
        """End all processes of the job, because one of them does not answer."""
        drain_output()
        self._mpi.COMM_WORLD.Abort(1)
