"""Exchange of pieces of arrays between node leaders, with several pieces in flight.

A piece is reduced in two steps, a reduce-scatter and an all-gather. First each leader receives its share of the
elements from all others, and reduces it in the order of the nodes. Then all leaders receive all shares. So results are
bitwise equal on all nodes.

With the wire dtype float16 or bfloat16, float32 numbers are sent between nodes in half the bytes. Each leader adds the
received numbers to its own in float32. It rounds its share of the result once, before it sends it to all leaders, and
uses the rounded values itself.

Invariants
----------
* All leaders begin the first steps of the pieces in the same order, and likewise the second steps, because MPI matches
  its collectives by order. The two steps have communicators of their own.
* A leader that has voted for a collective begins all of its pieces, with arbitrary data if its own ranks have failed,
  because the others may wait for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Callable, NamedTuple

import numpy as np

from synkhronos._collectives.buckets import Algorithm, reduced
from synkhronos._native import native
from synkhronos._processes import Deadline, LeaderTransport, Transfer
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rows import shares

#: ``lend(what, size, dtype)``: return memory that nobody else uses until the piece is complete.
Lend = Callable[[str, int, np.dtype], np.ndarray]


def _reducing(
    comm: LeaderTransport, way: Algorithm, given: np.ndarray, result: np.ndarray, lend: Lend, short: str
) -> Iterator[Transfer | None]:
    """Run the steps of the reduction of a piece; each yields the transfer that must complete before the next.

    Parameters
    ----------
    comm : LeaderTransport
    way : Algorithm
    given : array
        Contribution of this leader: its arrays, one after the other.
    result : array
        Of ``way.returned``. May be the memory of ``given``, if that is one array of the same dtype.
    lend : callable
        See `Lend`.
    short : str
        Wire dtype: ``"float16"`` or ``"bfloat16"``; empty: the numbers' own dtype.
    """
    n, node, length = len(way.rows), comm.node, len(result)
    cuts = shares(length, n)
    own = slice(*cuts[node].bounds)
    sizes = list(map(len, cuts))
    counts = [size * way.rows[node] for size in sizes]
    got_counts = [sizes[node] * k for k in way.rows]
    counts[node] = got_counts[node] = 0
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
        sent = np.concatenate([np.empty(0, dtype) if one == node else part for one, part in enumerate(parts)])
    # a leader's own share is not sent
    got = lend("got", sum(got_counts), dtype)
    places = None if len(mine) > 1 else [cut.start for cut in cuts]
    wide = lend("wide", len(got), given.dtype) if short else got
    brought = np.split(wide, np.cumsum(got_counts)[:-1])
    brought[node] = np.ascontiguousarray(mine)
    yield comm.all_to_all(sent, counts, places, got, got_counts)
    if short:
        native.widen(got, wide, is_brain)
    reduced(way, brought, result[own])
    if not short:
        yield comm.all_gather(result, sizes)
        return
    native.narrow(result[own], sent[own], is_brain)
    yield comm.all_gather(sent, sizes)
    native.widen(sent, result, is_brain)


def _gathering(comm: LeaderTransport, whole: np.ndarray, sizes: Sequence[int]) -> Iterator[Transfer | None]:
    """Run the steps of a gathering, like `_reducing`; the first step has no transfer.

    ``whole`` contains this leader's part in its place; ``sizes`` are the numbers of elements of the nodes.
    """
    yield None
    yield comm.all_gather(whole, sizes)


class Plan(NamedTuple):
    """Description of the exchange of a piece.

    Attributes
    ----------
    how : Algorithm or list of int
        How it is reduced; for a gathering, the number of elements of each node.
    length : int
        Number of elements of the result.
    dtype : dtype
        Of the leaders' contributions.
    """

    how: Algorithm | list[int]
    length: int
    dtype: np.dtype


class _Piece:
    """A piece in flight.

    Attributes
    ----------
    transfer : Transfer or None
        Transfer to complete; ``None``: none.
    is_second : bool
        Whether the transfer is that of the second step.
    """

    def __init__(self, steps: Iterator[Transfer | None]) -> None:
        self.steps = steps
        self.transfer = next(steps)
        self.is_second = False

    def is_through(self) -> bool:
        return self.transfer is None or self.transfer.is_complete()


class Pieces:
    """The pieces of one collective, in order.

    Parameters
    ----------
    comm : LeaderTransport
    plans : list of Plan
        One for each piece.
    deadline : Deadline
        Deadline, which starts again before and after each wait.
    check : callable
        Called regularly while this leader waits for the others; may raise.
    short : str
        Wire dtype, as for `_reducing`.
    """

    def __init__(
        self, comm: LeaderTransport, plans: Sequence[Plan], deadline: Deadline, check: Callable[[], None], short: str
    ) -> None:
        self._comm, self._plans, self._check, self._short = comm, plans, check, short
        self._deadline = deadline
        self._under_way: deque[_Piece] = deque()
        self._n_begun = self._n_complete = 0

    def begin(self, given: np.ndarray, result: np.ndarray, lend: Lend) -> None:
        """Begin the next piece.

        Parameters
        ----------
        given : array
            Contribution of this leader, as for `_reducing`; for a gathering, it is in its place in ``result``.
        result : array
        lend : callable
            See `Lend`.
        """
        if self._n_begun == len(self._plans):
            return  # a signal handler closed the session meanwhile, and called `fill_in`
        how = self._plans[self._n_begun].how
        with deferred_interrupts():
            if isinstance(how, list):
                steps = _gathering(self._comm, result, how)
            else:
                is_short = how.dtype == np.float32 == how.returned and max(how.rows) == 1
                steps = _reducing(self._comm, how, given, result, lend, self._short if is_short else "")
            self._under_way.append(_Piece(steps))
            self._n_begun += 1  # only now: if memory was too short, `fill_in` begins this piece
            self._advance()

    def finish(self, n: int) -> None:
        """Wait until the first ``n`` pieces are complete."""
        if self._n_complete < n:
            with deferred_interrupts():
                self._deadline.begin()
                self._comm.complete(lambda: self._advance() >= n, self._check)
                self._deadline.begin()

    def _advance(self) -> int:
        """Do everything that needs no waiting; return the number of complete pieces."""
        for piece in self._under_way:
            if not piece.is_second:
                if not piece.is_through():
                    break  # second steps begin in order on all leaders
                piece.transfer, piece.is_second = next(piece.steps), True
        while self._under_way and self._under_way[0].is_second and self._under_way[0].is_through():
            next(self._under_way[0].steps, None)
            self._under_way.popleft()
            self._n_complete += 1
        return self._n_complete

    def fill_in(self) -> None:
        """Complete the exchange with zeros, because the ranks of this node have failed."""

        def lend(what: str, size: int, dtype: np.dtype) -> np.ndarray:
            return np.zeros(size, dtype)

        while self._n_begun < len(self._plans):
            how, length, dtype = self._plans[self._n_begun]
            n_rows = 1 if isinstance(how, list) else how.rows[self._comm.node]
            result = np.zeros(length, dtype if isinstance(how, list) else how.returned)
            self.begin(np.zeros(n_rows * length, dtype), result, lend)
            self.finish(self._n_begun - 1)
        self.finish(len(self._plans))
