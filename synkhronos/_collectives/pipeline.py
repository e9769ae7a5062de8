"""Pipelined all-reduce and all-gather of array pieces between node leaders, with several pieces in flight.

A piece is reduced in two steps, a reduce-scatter and an all-gather. In the first step, each leader receives its share
of the elements from all others, and reduces it in node order. In the second step, all leaders exchange their shares.
Results are therefore bitwise equal on all nodes.

With the wire dtype float16 or bfloat16, float32 data takes half the bytes on the wire. Each leader reduces the received
numbers with its own in float32. It rounds its share of the result once, before the second step, and keeps the rounded
values itself, so that results are still equal on all nodes.

Invariants
----------
* All leaders begin the same pieces, and number them in the same order, because the numbers determine the tags of
  messages.
* A leader that has voted for a collective begins all of its pieces, because the others may wait for them. If its own
  ranks have failed, it sends empty messages, and the collective fails on all nodes.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns
from typing import Callable, NamedTuple

import numpy as np

from synkhronos._collectives.buckets import Algorithm, Bucket, Piece, divide, find_small, length_of, way_of
from synkhronos._native import native
from synkhronos._processes import (
    STRAGGLING,
    Ballots,
    Deadline,
    LeaderTransport,
    Place,
    ProcessGroup,
    agree,
    check_exchange,
    check_nodes,
)
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rows import shares
from synkhronos.errors import CollectiveAborted

#: ``lend(what, size, dtype)`` returns scratch memory for the purpose ``what``, reserved until the piece is complete.
Lend = Callable[[str, int, np.dtype], np.ndarray]

_EARLY = 1 << 33  # in signatures of reductions that begin before all of their arrays exist
_OF_LEADERS = 1 << 35  # in signatures of averages over the leaders alone


def lend_new(what: str, size: int, dtype: np.dtype) -> np.ndarray:
    """Return new memory; see `Lend`."""
    return np.empty(size, dtype)


def _reduce(
    comm: LeaderTransport,
    number: int,
    way: Algorithm,
    given: np.ndarray,
    result: np.ndarray,
    lend: Lend,
    short: str,
    has_failed: bool,
) -> native.Piece:
    """Begin to reduce a piece.

    Parameters
    ----------
    comm : LeaderTransport
    number : int
        Number of the piece, which determines the tags of its messages.
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
    has_failed : bool
        Whether this leader has failed, and sends empty messages.
    """
    n, node, length = len(way.rows), comm.node, len(result)
    cuts = [slice(*cut.bounds) for cut in shares(length, n)]
    own, others = cuts[node], [one for one in range(n) if one != node]
    of_others = [way.rows[one] * (own.stop - own.start) for one in others]
    rows = given.reshape(-1, length)
    sent, wire, dtype = rows, result, given.dtype
    if short:
        wire, dtype = lend("halves", length, np.dtype(np.uint16)), np.dtype(np.uint16)
        native.narrow(given, wire, short == "bfloat16")
        sent = wire.reshape(1, length)
    got = lend("got", sum(of_others), dtype)
    wide = lend("wide", len(got), given.dtype) if short else got
    ends = np.cumsum(of_others)[:-1]
    brought = dict(zip(others, np.split(wide, ends)))
    brought[node] = np.ascontiguousarray(rows[:, own])
    operands = [row for one in range(n) for row in brought[one].reshape(way.rows[one], -1)]
    return comm.begin_piece(
        number,
        (
            [(one, np.ascontiguousarray(sent[:, cuts[one]])) for one in others],
            [(one, wire[own]) for one in others],
        ),
        (
            list(zip(others, np.split(got, ends))),
            [(one, wire[cuts[one]]) for one in others],
        ),
        (way.between, operands, result[own]),
        (got, wide, wire, result, own.start, short == "bfloat16") if short else None,
        has_failed,
    )


def _gather(
    comm: LeaderTransport, number: int, full: np.ndarray, sizes: Sequence[int], has_failed: bool
) -> native.Piece:
    """Begin to gather a piece.

    Parameters
    ----------
    comm : LeaderTransport
    number : int
        Number of the piece, which determines the tags of its messages.
    full : array
        Destination of the result. It already contains this leader's part in its place.
    sizes : sequence of int
        Number of elements of each node.
    has_failed : bool
        Whether this leader has failed, and sends empty messages.
    """
    parts = dict(enumerate(np.split(full, np.cumsum(sizes)[:-1])))
    own = parts.pop(comm.node)
    sends = [(one, own) for one in parts]
    return comm.begin_piece(number, ([], sends), ([], list(parts.items())), None, None, has_failed)


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
    is_unchanged : bool
        Whether numbers are sent as they are, whatever the wire dtype.
    """

    how: Algorithm | list[int]
    length: int
    dtype: np.dtype
    is_unchanged: bool = False


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
        Wire dtype, as for `_reduce`. It is used for pieces that are float32 throughout.
    is_early : bool
        Whether leaders may still compute when the exchange begins. Nothing else uses the memory of its results.

    Attributes
    ----------
    times : list of tuple
        When each complete piece was begun, and when it was complete; see `native.Piece`.
    """

    def __init__(
        self,
        comm: LeaderTransport,
        plans: Sequence[Plan],
        deadline: Deadline,
        check: Callable[[], None],
        short: str,
        *,
        is_early: bool = False,
    ) -> None:
        self._comm, self._plans, self._check, self._short = comm, plans, check, short
        self._deadline = deadline
        # A leader that computes takes part in the exchange only afterwards, and the controller reports errors before.
        self._is_left_behind = is_early and not comm.node
        self._under_way: deque[native.Piece] = deque()
        self._n_begun = self._n_complete = 0
        self._has_failed = self._is_leaving = False
        self._first: int | None = None  # number of the first piece
        self.times: list[tuple[int, int]] = []

    def begin(self, given: np.ndarray, result: np.ndarray, lend: Lend) -> None:
        """Begin the next piece.

        Parameters
        ----------
        given : array
            Contribution of this leader, as for `_reduce`. Ignored in an all-gather, where ``result`` contains it.
        result : array
            Destination of the result.
        lend : callable
            Returns scratch memory; see `Lend`.
        """
        if self._n_begun == len(self._plans):
            return  # a signal handler has closed the session, and `fill_in` has begun all pieces
        how, _, _, is_unchanged = self._plans[self._n_begun]
        with deferred_interrupts():
            if self._first is None:
                self._first = self._comm.reserve_tags(len(self._plans))
            number = self._first + self._n_begun
            if isinstance(how, list):
                piece = _gather(self._comm, number, result, how, self._is_leaving)
            else:
                is_short = how.dtype == np.float32 == how.returned and max(how.rows) == 1
                short = self._short if is_short and not is_unchanged else ""
                piece = _reduce(self._comm, number, how, given, result, lend, short, self._is_leaving)
            self._under_way.append(piece)
            self._n_begun += 1  # not earlier: after a MemoryError, `fill_in` must begin this piece
            self._advance()

    def finish(self, n: int) -> None:
        """Wait until the first ``n`` pieces are complete; raise `CollectiveAborted` if any leader has failed."""
        self._wait(n)
        if self._has_failed or self._is_leaving:  # a signal handler may have closed the session
            raise CollectiveAborted("a rank of another node failed")

    def _wait(self, n: int) -> None:
        if self._n_complete < n:
            with deferred_interrupts():
                self._deadline.begin()
                self._comm.complete(lambda: self._advance() >= n, self._check, self._is_leaving)
                self._deadline.begin()

    def _advance(self) -> int:
        """Advance all pieces as far as possible without waiting; return the number of complete pieces."""
        self._comm.exchange.advance()
        while self._under_way and self._under_way[0].is_complete:
            piece = self._under_way.popleft()
            self._has_failed = self._has_failed or piece.has_failed
            self.times.append(piece.times)
            self._n_complete += 1
        return self._n_complete

    def fill_in(self) -> None:
        """Complete the exchange after this leader or a rank of its node has failed, with empty messages.

        In an early exchange, the controller does not wait until it is complete; see `LeaderComm.is_settled`.
        """

        def lend(what: str, size: int, dtype: np.dtype) -> np.ndarray:
            return np.zeros(size, dtype)

        self._comm.exchange.rest()
        self._is_leaving = True
        for piece in self._under_way:
            piece.fail()
        while self._n_begun < len(self._plans):
            how, length, dtype, _ = self._plans[self._n_begun]
            n_rows = 1 if isinstance(how, list) else how.rows[self._comm.node]
            result = np.zeros(length, dtype if isinstance(how, list) else how.returned)
            self.begin(np.zeros(n_rows * length, dtype), result, lend)
            if not self._is_left_behind:
                self._wait(self._n_begun - 1)
        if not self._is_left_behind:
            self._wait(len(self._plans))

    def give_up(self) -> None:
        """Complete the exchange with empty messages, as all leaders do."""
        self.fill_in()
        self._wait(len(self._plans))


class Division(NamedTuple):
    """Division of an early reduction into pieces, each of which is exchanged when its arrays exist.

    Attributes
    ----------
    order : tuple of int
        Indices of the arrays, in the order in which they come into existence.
    pieces : list of list of tuple
        For each piece, the indices of its arrays, and the range of elements of each.
    n_ready : list of int
        Number of complete pieces after each further array.
    plans : list of Plan
        Plan of each piece.
    of_arrays : tuple of tuple of int
        Numbers of each array's pieces.
    """

    order: tuple[int, ...]
    pieces: list[list[tuple[int, slice]]]
    n_ready: list[int]
    plans: list[Plan]
    of_arrays: tuple[tuple[int, ...], ...]


class EarlyReduction:
    """A reduction that begins before all of its arrays exist.

    Parameters
    ----------
    division : Division
    reductions : sequence of Algorithm
        Reduction of each array.
    signature : int
        Must be equal on all ranks.

    Attributes
    ----------
    arrays : dict of int to array
        Arrays that exist, by index.
    n_begun : int
        Number of pieces that were begun.
    between : Pieces or None
        Exchange with the other leaders; ``None`` on other ranks, and before the first piece.
    memory : dict of (int, str) to array
        Memory of each piece by purpose, on a leader.
    """

    def __init__(self, division: Division, reductions: Sequence[Algorithm], signature: int) -> None:
        self.division, self.reductions = division, reductions
        self.signature = zlib.crc32(repr(division.order).encode(), signature) | _EARLY
        self.arrays: dict[int, np.ndarray] = {}
        self.n_begun = 0
        self.between: Pieces | None = None
        self.memory: dict[tuple[int, str], np.ndarray] = {}

    def lend(self, k: int, what: str, size: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for piece ``k``, which this object keeps."""
        memory = self.memory[k, what] = np.empty(size, dtype)
        return memory

    def parts(self, k: int, outs: Sequence[np.ndarray] | None = None) -> Piece:
        """Return the arrays of a piece, with their destinations."""
        return [
            Bucket(
                self.arrays[i].reshape(-1)[some],
                None if outs is None else outs[i].reshape(-1)[some],
                self.reductions[i],
            )
            for i, some in self.division.pieces[k]
        ]


def go_on(comm: LeaderTransport) -> None:
    """Have a thread advance the exchanges of a leader, if MPI allows it; otherwise, its waits advance them."""
    if comm.may_poll:
        with contextlib.suppress(OSError):  # there can be no more threads
            comm.exchange.poll()


class Ticket:
    """A reduction of an array over all ranks that goes on while the ranks compute, on one rank.

    The node leaders vote without waiting for each other. Each begins to send the array in its first call of `advance`
    after all votes have arrived, and a thread continues.

    Parameters
    ----------
    lead : Lead or None
        The exchange with the other leaders; ``None`` on other ranks.
    distribute : callable
        ``distribute(lead)`` returns the result on each rank of the node, when the exchange is complete.
    """

    def __init__(self, lead: Lead | None, distribute: Callable[[Lead | None], np.ndarray]) -> None:
        self._lead, self._distribute = lead, distribute

    def advance(self) -> None:
        """Continue the exchange without waiting; call it between two steps of computation."""
        if self._lead is not None:
            self._lead.advance()

    def complete(self) -> None:
        """Wait, on a leader, until the exchange is complete, and nothing is on its way to or from other nodes.

        Raises
        ------
        CollectiveAborted
            If a rank of another node has failed.
        """
        if self._lead is not None:
            self._lead.complete()

    def wait(self) -> np.ndarray:
        """Wait for the result, and return it. All ranks call this in the same order with other collectives.

        Returns
        -------
        array
            A new array of the shape of the operand.

        Raises
        ------
        CollectiveAborted
            If a rank has failed.
        ShapesDiffer
            On all ranks, if shapes or dtypes differ between ranks.
        """
        self.complete()
        return self._distribute(self._lead)


class Lead:
    """The part of a `Ticket` on a node leader: the exchange with the other leaders.

    Parameters
    ----------
    comm : LeaderTransport
    between : Pieces
        The exchange.
    word : int or None
        Signature of the reduction; ``None`` if the signatures of this node's ranks differ.
    memory : list of tuple of array
        For each piece, this leader's contribution, and the destination of the result.
    hear : callable
        ``hear(place)`` waits for the votes of all leaders, and returns them.

    Attributes
    ----------
    is_agreed : bool
        Whether the signatures of all ranks are equal, when the votes have come.
    times : list of tuple of int
        Start and end of each complete piece; see `native.Piece.times`.
    computing : tuple of int
        When this leader began, and when it has last begun to wait.
    """

    def __init__(
        self,
        comm: LeaderTransport,
        between: Pieces,
        word: int | None,
        memory: list[tuple[np.ndarray, np.ndarray]],
        hear: Callable[[Place], Ballots],
    ) -> None:
        self._comm, self._between, self._memory, self._hear = comm, between, memory, hear
        self._is_complete = self.is_agreed = False
        self.times = between.times
        self.computing = monotonic_ns(), 0
        self._place: Place | None = comm.cast(word, [], between.fill_in)

    def advance(self) -> None:
        """Begin the exchange if all leaders have voted, or continue it where no thread does so."""
        if self._place is not None:
            ballots = self._comm.votes_at(self._place)
            if ballots is not None:
                self._begin(ballots)
        elif not self._is_complete and not self._comm.may_poll:
            self._comm.exchange.advance()

    def _begin(self, ballots: Ballots) -> None:
        self._place, self.is_agreed = None, agree(ballots)
        if not self.is_agreed:
            self._is_complete = True
            return
        for given, result in self._memory:
            self._between.begin(given, result, lend_new)
        go_on(self._comm)

    def complete(self) -> None:
        """Wait for the end of the exchange; the exceptions are those of `Ticket.complete`.

        The deadline limits the wait for each piece.
        """
        if self._is_complete:
            return
        self.computing = self.computing[0], monotonic_ns()
        try:
            if self._place is not None:
                self._begin(self._hear(self._place))
            if not self._is_complete:
                for n in range(1, len(self._memory) + 1):
                    self._between.finish(n)
                self._comm.exchange.rest()
                self._comm.end_exchange(self._between.fill_in)
                self._is_complete = True
        except BaseException:
            self._comm.leave()  # otherwise the other leaders would wait for this one
            raise


def average_of_leaders(group: ProcessGroup, values: np.ndarray) -> np.ndarray:
    """Return the mean of a vector over the node leaders; each calls this, while the other ranks of its node go on.

    Parameters
    ----------
    group : ProcessGroup
        Process group of this node.
    values : array of shape (n,)
        A floating-point vector, of the same size and dtype on all nodes. It must not change meanwhile.

    Returns
    -------
    array of shape (n,)
        A new vector, bitwise equal on all nodes.

    Raises
    ------
    CollectiveAborted
        If a rank of any node has failed.
    """
    comm, n_nodes, timeline = group.world.leaders, len(group.world.sizes), group.timeline
    how = way_of("avg", values.dtype, values.dtype, (1,) * n_nodes, (1,) * n_nodes)[group.world.node]
    mean = np.empty_like(values)
    is_small = find_small([(values, mean, how)], n_nodes)[0]
    pieces = divide([(values, mean, how)], [False])[1]
    plans = [Plan(how, length_of(piece), how.dtype, is_small) for piece in pieces]
    check_pieces = functools.partial(check_exchange, group)
    between = Pieces(comm, plans, group.deadline, check_pieces, group.world.wire_dtype or "")
    signature = hash((_OF_LEADERS, values.size))

    def check(silent: Sequence[int]) -> None:
        if group.sync.aborted:  # the other ranks of this node, which have not arrived here, may fail meanwhile
            raise CollectiveAborted("another rank failed")
        check_nodes(group, silent)

    before = timeline.switch(STRAGGLING)
    try:
        words = comm.vote(signature, [], check, between.fill_in)
        assert all(word == signature for word, _ in words)
        timeline.switch(before)
        for (part,) in pieces:
            assert part.out is not None
            between.begin(part.array, part.out, lend_new)
        for number in range(len(pieces)):
            between.finish(number + 1)
        comm.end_exchange(between.fill_in)
    except BaseException:
        group.deadline.begin()  # the ranks of this node get the full time to abort, too
        comm.leave()  # otherwise the other leaders would wait for this one
        raise
    timeline.exchange(between.times, ())
    return mean
