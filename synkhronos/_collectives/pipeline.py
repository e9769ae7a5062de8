"""Pipelined all-reduce and all-gather of array pieces between node leaders, with several pieces in flight.

A piece is reduced in two steps, a reduce-scatter and an all-gather. In the first step, each leader receives its share
of the elements from all others, and reduces it in node order. In the second step, all leaders exchange their shares.
Results are therefore bitwise equal on all nodes.

With the wire dtype float16 or bfloat16, float32 data takes half the bytes on the wire. Each leader reduces the received
numbers with its own in float32. It rounds its share of the result once, before the second step, and keeps the rounded
values itself, so that results are still equal on all nodes.

Invariants
----------
* All leaders begin the first steps of the pieces in the same order, because MPI matches collectives by their order. The
  same holds for the second steps. Each step has its own communicator.
* A leader that has voted for a collective begins all of its pieces, because the others may wait for them. If its own
  ranks have failed, it sends arbitrary data.
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

#: ``lend(what, size, dtype)`` returns scratch memory for the purpose ``what``, reserved until the piece is complete.
Lend = Callable[[str, int, np.dtype], np.ndarray]


def _reducing(
    comm: LeaderTransport, way: Algorithm, given: np.ndarray, result: np.ndarray, lend: Lend, short: str
) -> Iterator[Transfer | None]:
    """Reduce a piece step by step; yield the transfer of each step, which must complete before the next step begins.

    Parameters
    ----------
    comm : LeaderTransport
    way : Algorithm
    given : array
        Contribution of this leader: its arrays, concatenated.
    result : array
        Destination of the result, of dtype ``way.returned``. It may share the memory of ``given`` if that is a single
        array of the same dtype.
    lend : callable
        Returns scratch memory; see `Lend`.
    short : str
        Wire dtype, ``"float16"`` or ``"bfloat16"``. Empty: the dtype of ``given``.
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
    # a leader does not send its own share to itself: the counts for it are 0
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


def _gathering(comm: LeaderTransport, full: np.ndarray, sizes: Sequence[int]) -> Iterator[Transfer | None]:
    """Gather a piece in steps, as `_reducing` does; the first step has no transfer.

    Parameters
    ----------
    comm : LeaderTransport
    full : array
        Destination of the result. It already contains this leader's part in its place.
    sizes : sequence of int
        Number of elements of each node.
    """
    yield None
    yield comm.all_gather(full, sizes)


class Plan(NamedTuple):
    """Plan of the exchange of one piece.

    Attributes
    ----------
    how : Algorithm or list of int
        Reduction, or, for an all-gather, the number of elements of each node.
    length : int
        Number of elements of the result.
    dtype : dtype
        Dtype of the leaders' contributions.
    """

    how: Algorithm | list[int]
    length: int
    dtype: np.dtype


class _Piece:
    """A piece in flight.

    Attributes
    ----------
    transfer : Transfer or None
        Transfer of the current step; ``None`` if the step has none.
    is_second : bool
        Whether the piece is in its second step.
    """

    def __init__(self, steps: Iterator[Transfer | None]) -> None:
        self.steps = steps
        self.transfer = next(steps)
        self.is_second = False

    def is_through(self) -> bool:
        """Return whether the transfer of the current step is complete."""
        return self.transfer is None or self.transfer.is_complete()


class Pieces:
    """Exchange of the pieces of one collective between node leaders.

    Parameters
    ----------
    comm : LeaderTransport
    plans : list of Plan
        Plan of each piece, in order.
    deadline : Deadline
        Restarted before and after each wait.
    check : callable
        Called regularly while this leader waits for the others; may raise.
    short : str
        Wire dtype, as for `_reducing`. It is used for pieces that are float32 throughout.
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
            Contribution of this leader, as for `_reducing`. Ignored in an all-gather, where ``result`` contains it.
        result : array
            Destination of the result.
        lend : callable
            Returns scratch memory; see `Lend`.
        """
        if self._n_begun == len(self._plans):
            return  # a signal handler has closed the session, and `fill_in` has begun all pieces
        how = self._plans[self._n_begun].how
        with deferred_interrupts():
            if isinstance(how, list):
                steps = _gathering(self._comm, result, how)
            else:
                is_short = how.dtype == np.float32 == how.returned and max(how.rows) == 1
                steps = _reducing(self._comm, how, given, result, lend, self._short if is_short else "")
            self._under_way.append(_Piece(steps))
            self._n_begun += 1  # not earlier: after a MemoryError, `fill_in` must begin this piece
            self._advance()

    def finish(self, n: int) -> None:
        """Wait until the first ``n`` pieces are complete."""
        if self._n_complete < n:
            with deferred_interrupts():
                self._deadline.begin()
                self._comm.complete(lambda: self._advance() >= n, self._check)
                self._deadline.begin()

    def _advance(self) -> int:
        """Advance all pieces as far as possible without waiting; return the number of complete pieces."""
        for piece in self._under_way:
            if not piece.is_second:
                if not piece.is_through():
                    break  # all leaders must begin second steps in the same order
                piece.transfer, piece.is_second = next(piece.steps), True
        while self._under_way and self._under_way[0].is_second and self._under_way[0].is_through():
            next(self._under_way[0].steps, None)
            self._under_way.popleft()
            self._n_complete += 1
        return self._n_complete

    def fill_in(self) -> None:
        """Complete the exchange after the ranks of this node have failed; zeros replace their data."""

        def lend(what: str, size: int, dtype: np.dtype) -> np.ndarray:
            return np.zeros(size, dtype)

        while self._n_begun < len(self._plans):
            how, length, dtype = self._plans[self._n_begun]
            n_rows = 1 if isinstance(how, list) else how.rows[self._comm.node]
            result = np.zeros(length, dtype if isinstance(how, list) else how.returned)
            self.begin(np.zeros(n_rows * length, dtype), result, lend)
            self.finish(self._n_begun - 1)
        self.finish(len(self._plans))
