"""The way between the leaders: messages by MPI, from one to another, and the exchange of arrays.

Invariants
----------
* Only the leader's main thread, or whoever holds the session's lock in the master, speaks MPI.
* A leader never waits in a call of MPI: it looks for messages, and at its own team, with naps in between that grow.
* Commands are numbered, and votes by command and meeting; what a message says of an earlier command is forgotten.
* All leaders enter a collective of MPI, or none: each has heard from all others before that they will. One that has
  voted and has to leave before it has heard all of them takes part when it has, with anything; nobody uses that.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos._interrupts import deferred_interrupts, handle_interrupts
from synkhronos._nodes.heartbeat import HEARTBEAT, Heartbeat
from synkhronos._nodes.versions import describe, tell_differences
from synkhronos._nodes.wire import Wire
from synkhronos.errors import CollectiveAborted, NodeLost

__all__ = ["Line"]

#: Kinds of messages: their tags.
ORDER, ANSWER, VOTE, ABORT = 1, 2, 3, 4

_SPIN_SECONDS = 2e-4
_YIELD_SECONDS = 2e-2  # in which whoever else wants the core has it
_LONGEST_NAP = 4e-3
_LOOK_SECONDS = 0.05
_DEFERRED_SECONDS = 2.0  # that Ctrl-C may wait for an exchange

_Fill = Callable[[], None]


class Line(Wire):
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
    number : int
        Of the command under way.
    orders : deque
        What the master has said and this leader has not done yet.
    answers : dict
        ``answers[machine]``: the last answer of another leader.
    is_lost : bool
        Whether a leader is silent, or did not answer when it was told to stop.
    """

    def __init__(self, mpi: Any) -> None:
        super().__init__(mpi)
        self._heartbeat = Heartbeat(self.machine)
        own = socket.gethostname(), describe(), self._heartbeat.door
        known = self._messages.allgather(own)  # before anything of ours is pickled
        self.hosts: list[str] = [host for host, _, _ in known]
        self.differences = tell_differences([versions for _, versions, _ in known], self.hosts)
        self.number = 0
        self.orders: deque[Any] = deque()
        self.answers: dict[int, Any] = {}
        self.is_lost = False
        self._meeting = 0
        self._votes: dict[tuple[int, int], dict[int, Any]] = {}
        self._aborted = -1
        self._owed: tuple[tuple[int, int], _Fill] | None = None
        self._due: _Fill | None = None
        self._abandoned: list[Any] = []  # what MPI may still write to
        self._pid = os.getpid()
        self._heartbeat.start({machine: (known[machine][0], known[machine][2]) for machine in self.others})

    # -- messages

    def take(self, kind: int, machine: int, message: Any) -> None:
        """A message has come."""
        if kind == ORDER:
            self.orders.append(message)
        elif kind == ANSWER:
            self.answers[machine] = message
        elif kind == VOTE:
            number, meeting, word = message
            self._votes.setdefault((number, meeting), {})[machine] = word
        else:
            self._aborted = max(self._aborted, message)

    def wait(self, found: Callable[[], Any], check: Callable[[], None] | None = None) -> Any:
        """Wait until ``found()`` returns something, and return that; ``check`` may raise."""
        start = looked = time.perf_counter()
        while True:
            self.take_in()
            if self._owed is not None and not self.is_lost:
                self._fill_in()
            result = found()
            if result:
                return result
            self._check_heartbeat()
            now = time.perf_counter()
            if check is not None and now - looked > _LOOK_SECONDS:
                looked = now
                check()
            waited = now - start
            if waited > _YIELD_SECONDS:
                time.sleep(min(waited / 50, _LONGEST_NAP))
            elif waited > _SPIN_SECONDS:
                os.sched_yield()

    def _check_heartbeat(self) -> None:
        silent = self._heartbeat.silent()
        if silent is not None and not self.machine and not self.is_lost:
            self.is_lost = True
            raise NodeLost(
                f"machine {silent} ({self.hosts[silent]}) was not heard of for {HEARTBEAT:g} seconds: it is down, or "
                "the line to it is cut; start the program anew",
                machine=silent,
            )

    # -- meetings

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
                for machine in self.others:
                    self.send(machine, VOTE, (*place, (word, arrays)))
                votes[self.machine] = word, arrays
            self.wait(found, look)
            self._due = fill_in if _agree(votes) else None
        except BaseException:
            self._owed = place, fill_in
            raise
        del self._votes[place]
        return [votes[machine] for machine in range(self.n_machines)]

    def _fill_in(self) -> None:
        """Take part in the exchange that this leader has voted for and left, if all others are in it."""
        assert self._owed is not None
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

    def _check_aborted(self) -> None:
        if self._aborted >= self.number:
            raise CollectiveAborted("a rank of another machine failed")

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
        self._mpi.COMM_WORLD.Abort(1)


def _agree(votes: dict[int, Any]) -> bool:
    """Whether all leaders go on: their words are the same, and a word."""
    words = {word for word, _ in votes.values()}
    return len(words) == 1 and None not in words
