"""What leaders do to combine arrays of several machines: pieces of them, several under way at a time.

A piece is reduced in two steps: each leader gets from all others its part of the elements, and combines these in the
order of the machines; then all leaders get all parts. So results are the same to the bit on every machine.

With ``exchange="float16"`` or ``"bfloat16"`` numbers of float32 go from machine to machine in half the bytes: each
leader adds in float32 what it has itself to what the others sent, and rounds once what it gives to all, itself
included.

Invariants
----------
* All leaders begin the first steps of the pieces in the same order, and so they do the second ones: MPI tells messages
  of its collectives apart by their order. The two have communicators of their own.
* Who has voted for a collective begins all of its pieces, with anything where its own ranks have failed: the others may
  wait for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._collectives.ways import Way, reduced
from synkhronos._interrupts import deferred_interrupts
from synkhronos._native import native
from synkhronos._partition import shares
from synkhronos._team import Patience

__all__ = ["Pieces", "Plan"]

#: ``lend(what, size, dtype)``: memory that nobody else uses until the piece is complete.
Lend = Callable[[str, int, Any], np.ndarray]


def _reducing(line: Any, way: Way, given: np.ndarray, result: np.ndarray, lend: Lend, short: str) -> Iterator[Any]:
    """The steps of the reduction of a piece: each is what is to be completed next.

    Parameters
    ----------
    line : Line
    way : Way
    given : array
        What this leader brings: its arrays, one after the other.
    result : array
        Of ``way.returned``; may be the memory of ``given``, if that is one array of that dtype.
    lend : callable
        See `Lend`.
    short : str
        The type of numbers on their way; empty: their own.
    """
    n, machine, length = len(way.rows), line.machine, len(result)
    cuts = shares(length, n)
    own = slice(*cuts[machine].bounds)
    sizes = list(map(len, cuts))
    counts = [size * way.rows[machine] for size in sizes]
    got_counts = [sizes[machine] * k for k in way.rows]
    counts[machine] = got_counts[machine] = 0
    mine = given.reshape(-1, length)[:, own]
    dtype = np.dtype(np.uint16) if short else given.dtype
    is_brain = short == "bfloat16"
    sent = given
    if short:
        sent = lend("halves", length, dtype)
        native.narrow(given, sent, is_brain)
    elif len(mine) > 1:
        rows = given.reshape(-1, length)
        parts = [rows[:, cut.start : cut.stop].reshape(-1) for cut in cuts]
        sent = np.concatenate([np.empty(0, dtype) if one == machine else part for one, part in enumerate(parts)])
    # what a leader gives itself does not travel
    got = lend("got", sum(got_counts), dtype)
    places = None if len(mine) > 1 else [cut.start for cut in cuts]
    wide = lend("wide", len(got), given.dtype) if short else got
    brought = np.split(wide, np.cumsum(got_counts)[:-1])
    brought[machine] = np.ascontiguousarray(mine)
    yield line.all_to_all(sent, counts, places, got, got_counts)
    if short:
        native.widen(got, wide, is_brain)
    reduced(way, brought, result[own])
    if not short:
        yield line.all_gather(result, sizes)
        return
    native.narrow(result[own], sent[own], is_brain)
    yield line.all_gather(sent, sizes)
    native.widen(sent, result, is_brain)


def _gathering(line: Any, whole: np.ndarray, sizes: Sequence[int]) -> Iterator[Any]:
    """The steps of a gathering: ``whole`` has this leader's part in its place; ``sizes`` are those of the machines."""
    yield None
    yield line.all_gather(whole, sizes)


class Plan(NamedTuple):
    """What is to be done with a piece.

    Attributes
    ----------
    how : Way or list of int
        How it is reduced; to be gathered: how many elements each machine has of it.
    length : int
        The number of elements of the result.
    dtype : dtype
        Of what leaders bring.
    """

    how: Any
    length: int
    dtype: Any


class _Piece:
    """One that has been begun.

    Attributes
    ----------
    transfer : Transfer or None
        What is to be completed; ``None``: nothing.
    is_second : bool
        Whether that is the second step.
    """

    def __init__(self, steps: Iterator[Any]) -> None:
        self.steps = steps
        self.transfer = next(steps)
        self.is_second = False

    def is_through(self) -> bool:
        return self.transfer is None or self.transfer.is_complete()


class Pieces:
    """The pieces of one collective, in their order.

    Parameters
    ----------
    line : Line
    plans : list of Plan
        Of each.
    patience : Patience
        Begins anew with each piece that is complete.
    check : callable
        Called now and then while this leader waits for the others; may raise.
    short : str
        As of `_reducing`.
    """

    def __init__(
        self, line: Any, plans: Sequence[Plan], patience: Patience, check: Callable[[], None], short: str
    ) -> None:
        self._line, self._plans, self._check, self._short = line, plans, check, short
        self._patience = patience
        self._under_way: deque[_Piece] = deque()
        self._n_begun = self._n_complete = 0

    def begin(self, given: np.ndarray, result: np.ndarray, lend: Lend) -> None:
        """Begin the next piece.

        Parameters
        ----------
        given : array
            What this leader brings, as of `_reducing`; to be gathered, it lies in its place in the result.
        result : array
        lend : callable
            See `Lend`.
        """
        if self._n_begun == len(self._plans):
            return  # `fill_in` was called within, by a handler of a signal that has closed the session
        how = self._plans[self._n_begun].how
        with deferred_interrupts():
            if isinstance(how, list):
                steps = _gathering(self._line, result, how)
            else:
                is_short = how.dtype == np.float32 == how.returned and max(how.rows) == 1
                steps = _reducing(self._line, how, given, result, lend, self._short if is_short else "")
            self._under_way.append(_Piece(steps))
            self._n_begun += 1  # if there was no memory for it, `fill_in` begins it
            self._advance()

    def finish(self, n: int) -> None:
        """Wait until the first ``n`` pieces are complete."""
        if self._n_complete < n:
            with deferred_interrupts():
                self._patience.begin()
                self._line.complete(lambda: self._advance() >= n, self._check)
                self._patience.begin()

    def _advance(self) -> int:
        """Do what can be done without waiting; returns how many pieces are complete."""
        for piece in self._under_way:
            if not piece.is_second:
                if not piece.is_through():
                    break  # the ones behind it may not begin with their second step
                piece.transfer, piece.is_second = next(piece.steps), True
        while self._under_way and self._under_way[0].is_second and self._under_way[0].is_through():
            next(self._under_way[0].steps, None)
            self._under_way.popleft()
            self._n_complete += 1
        return self._n_complete

    def fill_in(self) -> None:
        """Take part in what is left with anything, because the ranks of this machine have failed."""

        def lend(what: str, size: int, dtype: Any) -> np.ndarray:
            return np.zeros(size, dtype)

        while self._n_begun < len(self._plans):
            how, length, dtype = self._plans[self._n_begun]
            n_rows = 1 if isinstance(how, list) else how.rows[self._line.machine]
            result = np.zeros(length, dtype if isinstance(how, list) else how.returned)
            self.begin(np.zeros(n_rows * length, dtype), result, lend)
            self.finish(self._n_begun - 1)
        self.finish(len(self._plans))
