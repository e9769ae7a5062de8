"""Collectives over several nodes: through shared memory within a node, by MPI between the node leaders.

1. The ranks of a node reduce, or gather, to their leader.
2. The leaders combine their contributions.
3. Each leader distributes the result to its ranks.

Small arrays are sent with the leaders' votes. By these votes the leaders agree that all of their ranks have arrived,
with arrays that belong together. Larger arrays follow in pieces: while one piece is between the nodes, the ranks of
each node reduce the next one and fetch the result of the one before.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable, cast

import numpy as np

from synkhronos._collectives.buckets import (
    Algorithm,
    Bucket,
    Piece,
    Undivided,
    divide,
    length_of,
    reduced,
    split_memory,
    way_of,
)
from synkhronos._collectives.pipeline import Pieces, Plan
from synkhronos._collectives.shared_memory import SharedMemoryTransport
from synkhronos._collectives.transport import HostTransport, Part
from synkhronos._processes import STRAGGLING, check_exchange, check_nodes
from synkhronos.errors import CollectiveAborted

if TYPE_CHECKING:
    from synkhronos._collectives.shared_memory import Workspace
    from synkhronos._native import native
    from synkhronos._processes import ProcessGroup

_AGREED, _REFUSED = 0, 1
_UNDER_WAY = 2  # pieces between the nodes at a time


def make_transport(group: ProcessGroup, workspace: Workspace, regions: native.Heap) -> HostTransport:
    """Return the transport of a rank: for one node, or for several."""
    local = workspace, group.signals, regions, group.barrier, group.timeline
    return SharedMemoryTransport(*local) if len(group.world.sizes) == 1 else HierarchicalTransport(*local, group=group)


class HierarchicalTransport(SharedMemoryTransport):
    """One rank's end of the collectives of a session on several nodes.

    Parameters
    ----------
    *args
        Those of `SharedMemoryTransport`, which serves the ranks of this node.
    group : ProcessGroup
    """

    def __init__(self, *args: Any, group: ProcessGroup) -> None:
        super().__init__(*args)
        world, leader = group.world, group.master_rank
        self._n_local, self._n_ranks = self._n_ranks, world.n_ranks
        self._world, self._leader = world, leader
        self._leads = group.rank == leader
        self._group, self._comm, self._deadline = group, world.leaders, group.deadline
        self._check_nodes = functools.partial(check_nodes, group)
        self._left: list[np.ndarray] = []  # arrays that other ranks may still read
        self._lent: dict[tuple[str, int], np.ndarray] = {}
        self._restart_local, self.restart = self.restart, self._restart

    def _restart(self) -> None:
        self._left.clear()
        self._restart_local()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.run([], 0)

    def reduction_of(self, op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...]) -> Algorithm:
        """Return the description of a reduction over all ranks that `run` takes."""
        return way_of(op, dtype, returned, weights, self._world.sizes)[self._world.node]

    def run(self, parts: list[Part], signature: int) -> bool | None:
        """Execute a collective; arguments and result as for `SharedMemoryTransport.run`."""
        small, large = divide(cast("list[Undivided]", parts))  # made by `reduction_of` of this class
        there: list[Part] = [(part.array, self._small_memory(part), self._within(part)) for part in small]
        agreed = self._run_here(there, signature)
        self._left.clear()  # all ranks are here, so they have read the previous results
        results: list[Any] | None = [None] * len(small)
        between = None
        try:
            if self._leads:
                between = self._between(large)
                brought = [memory for _, memory, _ in there if memory is not None]
                results = self._vote(small, brought, None if agreed is None else signature, between.fill_in)
            if agreed is None:
                return None
            if results is None:  # the ranks of this node detect it: the signature differs from theirs
                self._run_here([], _REFUSED)
                return None
            directly = self._move(large, between, [self._back(*both) for both in zip(small, results)])
        except BaseException:
            if self._leads:
                self._comm.complete_exchange()  # the other leaders wait for the rest of the exchange
            raise
        return None if directly is None else directly or agreed

    def _within(self, part: Bucket) -> native.Reduction | list[int]:
        """Return how the ranks of this node form their leader's contribution, as for `native.Collectives.run`."""
        if isinstance(part.how, list):
            return self._local(part.how)
        return [part.array.size] * self._n_local if part.how.within is None else part.how.within

    def _local(self, of_ranks: list[int]) -> list[int]:
        return of_ranks[self._world.first : self._world.first + self._n_local]

    def _small_memory(self, part: Bucket) -> np.ndarray | None:
        if not self._leads:
            return None
        if isinstance(part.how, list):
            return np.empty(sum(self._local(part.how)), part.array.dtype)
        return np.empty((self._n_local if part.how.within is None else 1) * part.array.size, part.how.dtype)

    def _back(self, part: Bucket, result: np.ndarray | None) -> Part:
        """Return the part by which the ranks of this node fetch a result from their leader."""
        length = sum(part.how) if isinstance(part.how, list) else part.array.size
        sizes = [length * (rank == self._leader) for rank in range(self._n_local)]
        if result is None:
            return np.empty(0, part.dtype_of_result), part.out, sizes
        return result, None if result is part.out else part.out, sizes

    def _vote(
        self, small: list[Bucket], brought: list[np.ndarray], signature: int | None, fill_in: Callable[[], None]
    ) -> list[np.ndarray] | None:
        """Vote as a leader, and reduce the small arrays of all leaders.

        Returns the results, or ``None`` if the ranks' arrays do not belong together.
        """
        before = self._timeline.switch(STRAGGLING)
        try:
            words = self._comm.vote(signature, [] if signature is None else brought, self._check_nodes, fill_in)
        except CollectiveAborted:
            self._deadline.begin()  # the ranks of this node learn of it now
            raise
        self._timeline.switch(before)
        if self._world.node:
            self._deadline.begin()  # the deadline is for the ranks of this node
        if signature is None or any(word != signature for word, _ in words):
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

    def _between(self, pieces: list[Piece]) -> Pieces:
        """Return the exchange of pieces with the other leaders, who have the same pieces."""
        ranks = [self._world.ranks_of(node) for node in range(len(self._world.sizes))]
        plans = []
        for piece in pieces:
            array, _, how = piece[0]
            if isinstance(how, list):
                sizes = [sum(how[rank] for rank in of_node) for of_node in ranks]
                plans.append(Plan(sizes, sum(sizes), array.dtype))
            else:
                plans.append(Plan(how, length_of(piece), how.dtype))
        check = functools.partial(check_exchange, self._group)
        return Pieces(self._comm, plans, self._deadline, check, self._world.wire_dtype or "")

    def _move(self, pieces: list[Piece], between: Pieces | None, now: list[Part]) -> bool | None:
        """Move pieces through all nodes, and the results ``now`` to the ranks of this one.

        In each turn, one piece is reduced to the leader, and one that is complete between the nodes is distributed. The
        a barrier precedes each turn: the work of the turn before is then complete, and its piece can be sent.

        Returns
        -------
        bool or None
            Whether any array was read directly, without lanes; ``None`` if the leader refuses the collective.
        """
        memories: list[tuple[np.ndarray | None, np.ndarray | None]] = []
        directly = False
        last = len(pieces) + _UNDER_WAY if pieces else 0
        for turn in range(last + 1):
            if turn < len(pieces):
                memories.append(self._memory_for(pieces[turn], turn))
                for part, memory in zip(pieces[turn], split_memory(pieces[turn], memories[turn][0])):
                    if memory is not part.array:
                        now.append((part.array, memory, self._within(part)))
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

    def _memory_for(self, piece: Piece, turn: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return a leader's memory for its node's contribution to a piece and for the result; ``None`` elsewhere."""
        if not self._leads:
            return None, None
        array, out, how = piece[0]
        lend = functools.partial(self._lend, turn)
        if isinstance(how, list):
            whole = out
            if whole is None:
                whole = np.empty(sum(how), array.dtype)
                self._left.append(whole)
            first = sum(how[: self._world.first])
            return whole[first : first + sum(self._local(how))], whole
        if len(piece) > 1:
            result = lend("result", length_of(piece), how.returned)
            return result if how.within is not None else lend("rows", length_of(piece), how.dtype), result
        result = lend("result", array.size, how.returned) if out is None or out.dtype != how.returned else out
        if how.within is not None:
            return result, result
        return (array if self._n_local == 1 else lend("rows", self._n_local * array.size, how.dtype)), result

    def _lend(self, turn: int, what: str, size: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for one of the pieces in flight; pieces of later turns use it again."""
        key, n_bytes = (what, turn % (_UNDER_WAY + 2)), size * np.dtype(dtype).itemsize
        memory = self._lent.get(key)
        if memory is None or len(memory) < n_bytes:
            memory = self._lent[key] = np.empty(n_bytes, np.uint8)
        return memory[:n_bytes].view(dtype)
