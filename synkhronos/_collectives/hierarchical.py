"""Hierarchical collectives over several nodes: shared memory within a node, MPI between the node leaders.

1. The ranks of each node reduce or gather to their leader.
2. The leaders combine their contributions.
3. Each leader distributes the result to its ranks.

Before step 2, the leaders vote: each confirms that all of its ranks have arrived, and sends the signature of their
arrays. Small arrays are sent with the votes. Larger arrays follow in pieces, as a pipeline: while one piece is sent
between the nodes, the ranks of each node reduce the next piece and fetch the result of the previous one.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Sequence
from time import monotonic_ns, perf_counter
from typing import TYPE_CHECKING, Any, Callable, cast

import numpy as np

from synkhronos._collectives.buckets import (
    Algorithm,
    Bucket,
    Piece,
    Undivided,
    divide,
    find_small,
    length_of,
    reduced,
    split_memory,
    way_of,
)
from synkhronos._collectives.pipeline import Division, EarlyReduction, Lead, Lend, Pieces, Plan, Ticket, go_on, lend_new
from synkhronos._collectives.transport import HostTransport, Part, ShapesDiffer, SharedMemoryTransport, Workspace
from synkhronos._processes import STRAGGLING, agree, check_exchange, check_nodes
from synkhronos.errors import CollectiveAborted

if TYPE_CHECKING:
    from synkhronos._native import native
    from synkhronos._processes import Ballots, Completion, Place, ProcessGroup

_AGREED, _REFUSED = 0, 1
_UNDER_WAY = 3  # pieces in flight between the nodes: with two, leaders may wait for each other by turns
_IN_BACKGROUND = 1 << 34  # in signatures of reductions in the background
_MESSAGES = 1 << 36  # signature of messages that are timed
LEAST_EARLY = 256 * 1024  # bytes of a reduction that begins before all of its arrays exist
_MOST_PIECES = 1024  # of such a reduction, so that tags of messages differ


def _nothing() -> None:
    pass


def make_transport(group: ProcessGroup, workspace: Workspace, heap: native.Heap) -> HostTransport:
    """Return the host transport of a rank, for a session on one node or on several.

    Parameters
    ----------
    group : ProcessGroup
        Process group of this rank's node.
    workspace : Workspace
    heap : Heap
        Shared heap of this node.
    """
    local = workspace, group.sync, heap, group.barrier, group.timeline
    return SharedMemoryTransport(*local) if len(group.world.sizes) == 1 else HierarchicalTransport(*local, group=group)


class HierarchicalTransport(SharedMemoryTransport):
    """Transport of one rank, for collectives over several nodes.

    Parameters
    ----------
    *args
        Arguments of `SharedMemoryTransport`, which connects the ranks of this node.
    group : ProcessGroup
        Process group of this node.
    """

    def __init__(self, *args: Any, group: ProcessGroup) -> None:
        super().__init__(*args)
        self._on_node = SharedMemoryTransport(*args, core=self._core)
        world, leader = group.world, group.master_rank
        self._n_ranks = world.n_ranks
        self._world, self._leader = world, leader
        self._leads = group.rank == leader
        self._group, self._comm, self._deadline = group, world.leaders, group.deadline
        self._check_nodes = functools.partial(check_nodes, group)
        self._left: list[np.ndarray] = []  # arrays that other ranks may still read
        self._lent: dict[tuple[str, int], np.ndarray] = {}
        self.early = self
        self._under_way = False  # whether an early reduction has begun, on a leader
        self._since = 0  # nanoseconds: when this leader has last gone on to compute meanwhile
        self._computing: list[tuple[int, int]] = []  # intervals in which it has computed meanwhile
        self._ticket: Ticket | None = None  # of the last reduction in the background in this command
        self._restart_local, self.restart = self.restart, self._restart

    @property
    def on_node(self) -> HostTransport:
        """Transport for collectives over the ranks of this node only, also while others go on in the background."""
        return self._on_node

    def _restart(self) -> None:
        """Bring the ranks in step, and release arrays of the previous command."""
        self._left.clear()
        self._ticket = None
        self._restart_local()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.run([], 0)

    def reduction_of(self, op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...]) -> Algorithm:
        """Return a reduction over all ranks, as `run` takes it."""
        return way_of(op, dtype, returned, weights, self._world.sizes)[self._world.node]

    def run(self, parts: list[Part], signature: int) -> bool | None:
        """Run a collective; parameters and result as for `SharedMemoryTransport.run`."""
        self._come_back()
        undivided = cast("list[Undivided]", parts)  # `reduction_of` of this class has made the reductions
        small, large = divide(undivided, find_small(undivided, len(self._world.sizes)))
        there: list[Part] = [(part.array, self._small_memory(part), self._within(part)) for part in small]
        agreed = self._run_here(there, signature)
        self._left.clear()  # all ranks have arrived here, so they have read the previous results
        results: list[Any] | None = [None] * len(small)
        between = None
        try:
            if self._leads:
                between = self._exchange_of(self._plans(large))
                brought = [memory for _, memory, _ in there if memory is not None]
                results = self._vote(small, brought, None if agreed is None else signature, between.fill_in)
            if agreed is None:
                return None
            if results is None:  # the ranks of this node wait in `_move`: the other signature makes them return None
                self._run_here([], _REFUSED)
                return None
            directly = self._move(large, between, [self._back(*both) for both in zip(small, results)])
            if between is not None:
                self._comm.end_exchange(between.fill_in)
                self._timeline.exchange(between.times, ())
        except BaseException:
            if self._leads:
                self._comm.leave()  # otherwise the other leaders would wait for this one
            raise
        self._advance_meanwhile()
        return None if directly is None else directly or agreed

    def _within(self, part: Bucket) -> native.Reduction | list[int]:
        """Return the reduction, or the lengths of an all-gather, that forms this node's contribution."""
        if isinstance(part.how, list):
            return self._local(part.how)
        return [part.array.size] * self._n_local if part.how.within is None else part.how.within

    def _local(self, of_ranks: list[int]) -> list[int]:
        """Return the entries of this node's ranks."""
        return of_ranks[self._world.first : self._world.first + self._n_local]

    def _small_memory(self, part: Bucket) -> np.ndarray | None:
        """Return memory for this node's contribution to a small array, on its leader; ``None`` on other ranks."""
        if not self._leads:
            return None
        if isinstance(part.how, list):
            return np.empty(sum(self._local(part.how)), part.array.dtype)
        return np.empty((self._n_local if part.how.within is None else 1) * part.array.size, part.how.dtype)

    def _there(self, piece: Piece, given: np.ndarray | None) -> list[Part]:
        """Return the parts of a collective that form this node's contribution to a piece, in memory of its leader."""
        return [
            (part.array, memory, self._within(part))
            for part, memory in zip(piece, split_memory(piece, given))
            if memory is not part.array
        ]

    def _back(self, part: Bucket, result: np.ndarray | None) -> Part:
        """Return the part of a collective that broadcasts a result from the leader to the ranks of this node.

        The part is an all-gather to which only the leader contributes elements. On other ranks, ``result`` is ``None``.
        """
        length = sum(part.how) if isinstance(part.how, list) else part.array.size
        sizes = [length * (rank == self._leader) for rank in range(self._n_local)]
        if result is None:
            return np.empty(0, part.dtype_of_result), part.out, sizes
        return result, None if result is part.out else part.out, sizes

    def _vote(
        self, small: list[Bucket], brought: list[np.ndarray], signature: int | None, fill_in: Callable[[], None]
    ) -> list[np.ndarray] | None:
        """Vote, and reduce the small arrays of all leaders; called on leaders only.

        Parameters
        ----------
        small : list of Bucket
        brought : list of array
            This node's contribution to each of ``small``.
        signature : int or None
            Signature of the collective; ``None`` if the signatures of this node's ranks differ.
        fill_in : callable
            Takes part in the exchange of the large arrays if this leader fails; see `LeaderComm.vote`.

        Returns
        -------
        list of array, or None
            Results; ``None`` if the signatures of the ranks differ.
        """
        arrays = [] if signature is None else brought
        words = self._hear(lambda: self._comm.vote(signature, arrays, self._check_nodes, fill_in))
        if not agree(words):
            return None
        results = []
        for i, part in enumerate(small):
            arrays = [arrays[i] for _, arrays in words]
            if isinstance(part.how, list):
                result = np.concatenate(arrays)
            else:
                result = np.empty(part.array.size, part.how.returned)
                reduced(part.how, arrays, result)
            results.append(result)
        self._left += results
        return results

    def _hear(self, wait: Callable[[], Ballots]) -> Ballots:
        """Wait for the votes of all leaders, and return them."""
        before = self._timeline.switch(STRAGGLING)
        try:
            ballots = wait()
        except CollectiveAborted:
            self._deadline.begin()  # the ranks of this node get the full time to abort, too
            raise
        self._timeline.switch(before)
        if self._world.node:
            self._deadline.begin()  # here the deadline limits only the ranks of this node, not the wait for others
        return ballots

    def _plans(self, pieces: list[Piece]) -> list[Plan]:
        """Return the plan of each piece for its exchange with the other leaders, which have the same pieces."""
        ranks = [self._world.ranks_of(node) for node in range(len(self._world.sizes))]
        plans = []
        for piece in pieces:
            array, _, how = piece[0]
            if isinstance(how, list):
                sizes = [sum(how[rank] for rank in of_node) for of_node in ranks]
                plans.append(Plan(sizes, sum(sizes), array.dtype))
            else:
                plans.append(Plan(how, length_of(piece), how.dtype))
        return plans

    def _exchange_of(self, plans: list[Plan], is_early: bool = False) -> Pieces:
        check = functools.partial(check_exchange, self._group)
        return Pieces(self._comm, plans, self._deadline, check, self._world.wire_dtype or "", is_early=is_early)

    def _move(self, pieces: list[Piece], between: Pieces | None, now: list[Part]) -> bool | None:
        """Run the pipeline of pieces, and distribute the results of the small arrays.

        Each turn is one collective of this node. It reduces a piece to the leader, and distributes an earlier piece,
        which the leaders have combined. The barrier in it shows that the work of the previous turn is complete. The
        leader then begins to send the piece of the previous turn.

        Parameters
        ----------
        pieces : list of Piece
        between : Pieces or None
            Exchange with the other leaders; ``None`` on ranks other than the leader.
        now : list of Part
            Parts of the first turn's collective that distribute the results of the small arrays.

        Returns
        -------
        bool or None
            Whether any array was read directly, without staging buffers. ``None`` if the leader refused the collective.
        """
        memories: list[tuple[np.ndarray | None, np.ndarray | None]] = []
        directly = False
        last = len(pieces) + _UNDER_WAY if pieces else 0
        for turn in range(last + 1):
            if turn < len(pieces):
                memories.append(self._memory_for(pieces[turn], functools.partial(self._lend, turn)))
                now += self._there(pieces[turn], memories[turn][0])
            done = turn - _UNDER_WAY - 1
            if done >= 0:
                if between is not None:
                    between.finish(done + 1)
                for part, memory in zip(pieces[done], split_memory(pieces[done], memories[done][1])):
                    if self._n_local > 1 or memory is not part.out:
                        now.append(self._back(part, memory))
            if now or turn <= len(pieces):
                moved = self._run_here(now, _AGREED, is_open=turn < last)
                if moved is None:
                    return None
                directly = directly or moved
            if between is not None and 0 < turn <= len(pieces):
                given, result = memories[turn - 1]
                assert given is not None and result is not None
                between.begin(given, result, functools.partial(self._lend, turn - 1))
            now = []
        return directly

    # -- reductions that begin before all of their arrays exist

    def divide(
        self,
        kinds: Sequence[tuple[tuple[int, ...], np.dtype]],
        reductions: Sequence[Algorithm],
        order: Sequence[int],
    ) -> Division | None:
        """Divide an early reduction into pieces.

        Parameters
        ----------
        kinds : sequence of tuple
            Shape and dtype of each array.
        reductions : sequence of Algorithm
            Reduction of each array.
        order : sequence of int
            Indices of the arrays, in the order in which they come into existence.

        Returns
        -------
        Division or None
            ``None`` if the arrays are small, cannot be reduced within a node, or would all be exchanged at once.
        """
        arrays = [np.broadcast_to(np.empty((), dtype), math.prod(shape)) for shape, dtype in kinds]  # without memory
        parts: list[Undivided] = [(array, None, how) for array, how in zip(arrays, reductions)]
        if sum(array.nbytes for array in arrays) < LEAST_EARLY or any(max(how.rows) > 1 for how in reductions):
            return None
        are_small = find_small(parts, len(self._world.sizes)) if self._world.wire_dtype else [False] * len(parts)
        pieces: list[Piece] = []
        plans: list[Plan] = []
        for is_small, some in itertools.groupby(order, are_small.__getitem__):
            more = divide([parts[i] for i in some if arrays[i].size], [False] * len(parts))[1]
            pieces += more
            plans += [plan._replace(is_unchanged=is_small) for plan in self._plans(more)]
        ends = np.cumsum([arrays[i].size for i in order])
        places: list[list[tuple[int, slice]]] = []
        end = 0
        for piece in pieces:
            places.append([])
            for part in piece:
                place = int(np.searchsorted(ends, end, side="right"))
                start = end - int(ends[place]) + arrays[order[place]].size
                places[-1].append((order[place], slice(start, start + part.array.size)))
                end += part.array.size
        n_ready = np.searchsorted(np.cumsum(list(map(length_of, pieces))), ends, side="right").tolist()
        if n_ready.index(len(pieces)) == np.flatnonzero(n_ready)[0] or len(pieces) > _MOST_PIECES:
            return None  # all pieces would begin at the same time
        of_arrays: list[tuple[int, ...]] = [()] * len(arrays)
        for k, placed in enumerate(places):
            for i, _ in placed:
                of_arrays[i] += (k,)
        return Division(tuple(order), places, n_ready, plans, tuple(of_arrays))

    def add(self, early: EarlyReduction, array: np.ndarray) -> bool:
        """Add the next array of an early reduction, and begin to exchange the pieces that are complete with it.

        Returns
        -------
        bool
            False if the signatures of the ranks differ.
        """
        early.arrays[early.division.order[len(early.arrays)]] = array
        ready = range(early.n_begun, early.division.n_ready[len(early.arrays) - 1])
        if not ready:
            return True
        self._come_back()
        if self._leads:
            self._comm.check_aborted()
        there: list[Part] = []
        memories = []
        for k in ready:
            piece = early.parts(k)
            given, result = self._early_memory(early, piece, k)
            memories.append((given, result))
            there += self._there(piece, given)
        agreed = self._run_here(there, early.signature) is not None
        if not early.n_begun and self._leads:
            early.between = self._exchange_of(early.division.plans, is_early=True)
        if not early.n_begun or not agreed:
            fill_in = _nothing if early.between is None else early.between.fill_in
            if not self._agree(agreed, early.signature, fill_in):
                return False
        early.n_begun = ready.stop
        if early.between is not None:
            for k, (given, result) in zip(ready, memories):
                assert given is not None and result is not None
                early.between.begin(given, result, functools.partial(early.lend, k))
            self._under_way = True
            self._advance_meanwhile()
        return True

    def finish(self, early: EarlyReduction, outs: Sequence[np.ndarray] | None) -> bool:
        """Wait for the results of an early reduction whose arrays were all added, or give it up.

        Parameters
        ----------
        early : EarlyReduction
        outs : sequence of array, or None
            Destination of each result. They may be the operands. ``None``: give up, on all ranks; the operands are
            unchanged.

        Returns
        -------
        bool
            False if the signatures of the ranks differ.
        """
        if not early.n_begun:
            return True
        self._come_back()
        signature = early.signature ^ (outs is None)
        agreed = self._run_here([], signature) is not None
        if not self._agree(agreed, signature, _nothing):
            return False
        self._under_way = False
        if early.between is not None:
            if outs is None:
                early.between.give_up()
            else:
                for n in range(1, len(early.division.plans) + 1):  # the deadline limits the wait for each piece
                    early.between.finish(n)
            self._comm.exchange.rest()
            self._comm.end_exchange(early.between.fill_in)
            self._timeline.exchange(early.between.times, self._computing)
            self._computing.clear()
        if outs is None:
            return True
        there = []
        for k in range(len(early.division.pieces)):
            piece = early.parts(k, outs)
            results = split_memory(piece, early.memory.get((k, "result")))
            there += [self._back(*both) for both in zip(piece, results)]
        self._run_here(there, _AGREED)
        return True

    def _agree(self, agreed: bool, signature: int, fill_in: Completion) -> bool:
        """Vote, and return on all ranks of this node whether the signatures of all ranks of all nodes are equal.

        Parameters
        ----------
        agreed : bool
            Whether the signatures of the ranks of this node are equal.
        signature : int
        fill_in : callable
            See `LeaderComm.vote`.
        """
        is_agreed = agreed
        if self._leads:
            is_agreed = self._vote([], [], signature if agreed else None, fill_in) is not None
        return agreed and self._run_here([], _AGREED if is_agreed else _REFUSED) is not None and is_agreed

    def _advance_meanwhile(self) -> None:
        """Have a thread advance an early reduction while this rank computes."""
        if self._under_way:
            self._since = monotonic_ns()
            go_on(self._comm)

    def _come_back(self) -> None:
        """Complete the reduction in the background; note that this rank has computed during an early reduction."""
        if self._ticket is not None:
            self._ticket.complete()
            self._ticket = None
        if self._under_way:
            self._computing.append((self._since, monotonic_ns()))

    def leave(self) -> None:
        """Leave the reductions that have begun, because the function of this rank has failed."""
        self._under_way = False
        self._computing.clear()
        if self._leads:
            self._comm.leave()

    # -- reductions in the background

    def start(self, array: np.ndarray, op: str = "avg") -> Ticket:
        """Begin to reduce an array over all ranks in the background.

        The ranks of a node reduce their arrays here. One such reduction at a time is exchanged between the nodes: the
        next collective over all ranks first waits for its end.

        Parameters
        ----------
        array : array
            C-contiguous array with the same shape and dtype on every rank. It must not change until the ticket is
            complete.
        op : str
            Key of `OPS`.

        Returns
        -------
        Ticket
        """
        self._come_back()
        how = self.reduction_of(op, array.dtype, array.dtype, (1,) * self._n_ranks)
        whole = Bucket(array.reshape(-1), np.empty(array.size, array.dtype), how)
        pieces = divide([whole], [False])[1] if array.size else []
        memories = [self._memory_for(piece, lend_new) for piece in pieces]
        there = [part for piece, (given, _) in zip(pieces, memories) for part in self._there(piece, given)]
        signature = hash((_IN_BACKGROUND, array.shape, zlib.crc32(f"{op} {array.dtype}".encode())))
        agreed = self._run_here(there, signature)
        lead = None
        if self._leads:
            is_small = find_small([whole], len(self._world.sizes))[0]
            plans = [plan._replace(is_unchanged=is_small) for plan in self._plans(pieces)]
            between, word = self._exchange_of(plans, is_early=True), None if agreed is None else signature
            own = cast("list[tuple[np.ndarray, np.ndarray]]", memories)  # a leader has all of them
            lead = Lead(self._comm, between, word, own, self._hear_at)
        self._ticket = Ticket(lead, functools.partial(self._distribute, whole, array.shape))
        return self._ticket

    def _hear_at(self, place: Place) -> Ballots:
        """Wait for the votes at a place, and return them."""
        return self._hear(lambda: self._comm.await_votes(place, self._check_nodes))

    def _distribute(self, part: Bucket, shape: tuple[int, ...], lead: Lead | None) -> np.ndarray:
        """Return the result of a reduction in the background on each rank of this node."""
        is_refused = lead is not None and not lead.is_agreed
        if lead is not None and not is_refused:
            self._timeline.exchange(lead.times, [lead.computing])
        there = [] if is_refused else [self._back(part, None if lead is None else part.out)]
        if self._run_here(there, _REFUSED if is_refused else _AGREED) is None:
            raise ShapesDiffer("the shapes differ between ranks")
        assert part.out is not None
        return part.out.reshape(shape)

    # -- measurements

    def time_messages(self, n_bytes: int, repetitions: int) -> list[float]:
        """Return the seconds in which an array gets from the leader of node 0 to the other leaders.

        They are half of those until the leader of node 1 has then sent an array to the others. All ranks call this; the
        list is empty on ranks other than leaders.
        """
        self.barrier()
        if not self._leads:
            return []
        n_nodes, array = len(self._world.sizes), np.zeros(n_bytes, np.uint8)
        self._left.append(array)
        plans = [
            Plan([n_bytes * (node == turn % 2) for node in range(n_nodes)], n_bytes, array.dtype)
            for turn in range(2 * repetitions)
        ]
        between = self._exchange_of(plans)
        times: list[float] = []
        try:
            self._hear(lambda: self._comm.vote(_MESSAGES, [], self._check_nodes, between.fill_in))
            for turn in range(len(plans)):
                times.append(perf_counter())
                between.begin(array, array, functools.partial(self._lend, turn))
                between.finish(turn + 1)
            times.append(perf_counter())
            self._comm.end_exchange(between.fill_in)
        except BaseException:
            self._comm.leave()
            raise
        return [(end - start) / 2 for start, end in zip(times[::2], times[2::2])]

    # -- memory

    def _early_memory(self, early: EarlyReduction, piece: Piece, k: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return memory for this node's contribution to piece ``k``, and for its result; ``None`` on non-leaders."""
        how = piece[0].how
        if not self._leads or isinstance(how, list):
            return None, None
        result = early.lend(k, "result", length_of(piece), how.returned)
        if how.within is not None:
            return result, result
        return piece[0].array if len(piece) == 1 else early.lend(k, "given", length_of(piece), how.dtype), result

    def _memory_for(self, piece: Piece, lend: Lend) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return memory for this node's contribution to a piece, and for the result; ``None`` on non-leaders.

        It is the memory of the arrays themselves where possible, to avoid copies. Both may be the same memory.
        """
        if not self._leads:
            return None, None
        array, out, how = piece[0]
        if isinstance(how, list):
            full = out
            if full is None:
                full = np.empty(sum(how), array.dtype)
                self._left.append(full)
            first = sum(how[: self._world.first])
            return full[first : first + sum(self._local(how))], full
        if len(piece) > 1:
            result = lend("result", length_of(piece), how.returned)
            return result if how.within is not None else lend("rows", length_of(piece), how.dtype), result
        result = lend("result", array.size, how.returned) if out is None or out.dtype != how.returned else out
        if how.within is not None:
            return result, result
        return (array if self._n_local == 1 else lend("rows", self._n_local * array.size, how.dtype)), result

    def _lend(self, turn: int, what: str, size: int, dtype: np.dtype) -> np.ndarray:
        """Return scratch memory for the piece of a turn; later turns reuse it when that piece is complete."""
        key, n_bytes = (what, turn % (_UNDER_WAY + 2)), size * np.dtype(dtype).itemsize
        memory = self._lent.get(key)
        if memory is None or len(memory) < n_bytes:
            memory = self._lent[key] = np.empty(n_bytes, np.uint8)
        return memory[:n_bytes].view(dtype)
