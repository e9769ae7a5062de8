"""Meetings of the leaders: each tells all others whether its ranks are there, and all go on to an exchange, or none.

Invariants
----------
* Commands are numbered, and votes by command and meeting; what a message says of an earlier command is forgotten.
* All leaders enter a collective of MPI, or none: each has heard from all others before that they will. One that has
  voted and has to leave before it has heard all of them takes part when it has, with anything; nobody uses that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos._nodes.wire import Wire
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos.errors import CLOSED_WITHIN, CollectiveAborted, SessionError

__all__ = ["ABORT", "VOTE", "Meetings"]

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
