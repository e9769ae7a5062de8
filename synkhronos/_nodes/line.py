"""The way between the leaders: messages by MPI, from one to another, and the exchange of arrays.

Invariants
----------
* Only the leader's main thread, or whoever holds the session's lock in the master, speaks MPI.
* Messages with rows and those without go ways of their own, and may overtake each other. Orders are numbered: one that
  comes after a later one is forgotten, for the master has given it up.
* A leader never waits in a call of MPI: it looks for messages, and at its own team, with naps in between that grow.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from typing import Any, Callable

from synkhronos._nodes.heartbeat import Heartbeat
from synkhronos._nodes.meetings import VOTE, Meetings
from synkhronos._nodes.messages import Stop
from synkhronos._nodes.silence import Reason
from synkhronos._nodes.versions import describe, tell_differences
from synkhronos._utils.interrupts import handle_interrupts
from synkhronos._utils.rendezvous import RESTART, drain_output
from synkhronos.errors import NodeLost

__all__ = ["Line"]

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
