"""All-reduce over shared memory: cache-sized blocks through lanes that every rank can read.

Each rank has two lanes, which take turns. For a block, every rank copies its part into its lane and meets the others
at a barrier. Then, with few ranks or little data, every rank reduces the whole block straight into its own array (one
barrier a block); otherwise each rank reduces one chunk of the block, back into its lane, and after a second barrier
collects the chunks of all (reduce-scatter and all-gather). Either way each element is combined in the order of the
ranks, so the result is the same to the bit on every rank. A rank writes to a lane again only after a barrier that
others enter once they have read it, which is why two lanes suffice. Beyond the lanes no memory is used, whatever the
size of the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import numpy as np

from synkhronos._collectives._arithmetic import as_stored, normalized, reduce_into, weighted_mean
from synkhronos._partition import shares
from synkhronos._segments import aligned

__all__ = ["LANE_BYTES", "ShapesDiffer", "SharedMemoryTransport"]

#: Bytes of one lane: small enough that what one rank writes is still in cache when another reads it.
LANE_BYTES = 512 * 1024

#: With no more ranks than this, reducing everything everywhere moves fewer bytes than reduce-scatter and all-gather.
_FEW_RANKS = 3
_LITTLE_BYTES = 32 * 1024


class ShapesDiffer(Exception):
    """The ranks brought arrays of different shapes; every rank raises this, and nothing was changed."""


class SharedMemoryTransport:
    """One rank's end of the shared-memory transport.

    Parameters
    ----------
    lanes : uint8 array of shape (2, n_ranks, LANE_BYTES)
        In memory that all ranks share.
    signatures : int64 array of shape (n_ranks,)
        In memory that all ranks share.
    rank : int
    barrier : callable
        Returns once every rank has called it; raises if that cannot happen any more.
    """

    def __init__(self, lanes: np.ndarray, signatures: np.ndarray, rank: int, barrier: Callable[[], None]) -> None:
        self._lanes = lanes
        self._signatures = signatures
        self._rank = rank
        self._barrier = barrier
        self._n_ranks = lanes.shape[1]
        self.restart()

    def restart(self) -> None:
        """Every rank calls this at the start of a command, so that all begin with the same lanes."""
        self._turn = 0
        self._checked = False

    def all_reduce(self, arrays: Sequence[np.ndarray], op: str, weights: Sequence[float] | None) -> None:
        """Reduce arrays over the ranks, in place.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous and writable; of the same dtypes on every rank.
        op : str
            ``"avg"``, ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``.
        weights : sequence of float, or None
            For ``"avg"``: one for each rank; a rank of weight 0 is left out.

        Raises
        ------
        ShapesDiffer
            On every rank, before anything is changed, if the shapes are not the same on all.
        """
        self._signatures[self._rank] = hash(tuple(array.shape for array in arrays))
        factors = normalized(weights if weights is not None else (1.0,) * self._n_ranks) if op == "avg" else None
        pending: list[np.ndarray] = []
        room = LANE_BYTES
        for array in arrays:
            flat = array.reshape(-1)
            per_block = LANE_BYTES // flat.itemsize
            for start in range(0, flat.size, per_block):
                block = flat[start : start + per_block]
                n_bytes = aligned(block.nbytes)
                if n_bytes > room:
                    self._reduce_blocks(pending, op, factors)
                    pending, room = [], LANE_BYTES
                pending.append(block)
                room -= n_bytes
        if pending or not self._checked:
            self._reduce_blocks(pending, op, factors)

    def _reduce_blocks(self, blocks: list[np.ndarray], op: str, factors: list[float] | None) -> None:
        """Reduce blocks that fit into one lane together."""
        lanes = self._lanes[self._turn]
        self._turn ^= 1
        offset = 0
        views = []
        for block in blocks:
            places = lanes[:, offset : offset + block.nbytes]
            views.append([place.view(block.dtype) for place in places])
            np.copyto(views[-1][self._rank], block)
            offset += aligned(block.nbytes)
        self._barrier()
        if not self._checked:
            if (self._signatures != self._signatures[self._rank]).any():
                raise ShapesDiffer("the shapes differ between ranks")
            self._checked = True
        if self._n_ranks <= _FEW_RANKS or offset <= _LITTLE_BYTES:
            for block, view in zip(blocks, views):
                _reduce(block, view, op, factors)
            return
        for block, view in zip(blocks, views):
            mine = shares(block.size, self._n_ranks)[self._rank]
            reduced = np.empty(len(mine), block.dtype)
            _reduce(reduced, [lane[mine.start : mine.stop] for lane in view], op, factors)
            np.copyto(view[self._rank][mine.start : mine.stop], reduced)
        self._barrier()
        for block, view in zip(blocks, views):
            for lane, rows in zip(view, shares(block.size, self._n_ranks)):
                np.copyto(block[rows.start : rows.stop], lane[rows.start : rows.stop])


def _reduce(out: np.ndarray, operands: list[np.ndarray], op: str, factors: list[float] | None) -> None:
    """Combine the ranks' blocks into ``out``, which is none of them."""
    if factors is None:
        reduce_into(out, operands, op)
    elif out.dtype.kind not in "iub" and len(set(factors)) == 1:
        reduce_into(out, operands, "sum")
        np.multiply(out, out.dtype.type(factors[0]), out=out)
    else:
        present = [(operand, factor) for operand, factor in zip(operands, factors) if factor > 0]
        np.copyto(out, as_stored(weighted_mean(*zip(*present)), out.dtype))
