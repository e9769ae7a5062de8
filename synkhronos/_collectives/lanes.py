"""Lanes: memory in which every rank publishes its part of an array, piece by piece, for all to read.

Each rank publishes block after block in its lanes, which take turns. There is one step of the barrier for each block.
Between arriving and waiting a rank publishes the next block, so ranks that keep up hardly ever wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from synkhronos._memory import aligned

if TYPE_CHECKING:
    from synkhronos._team import Barrier

__all__ = ["LANE_BYTES", "Lanes", "Piece"]

#: Bytes of one lane. Each rank has two, with room for two blocks in each. All of it together is as much as a core's own
#: cache can hold: by the time that a rank comes back to a block, what others read of it has left their caches.
LANE_BYTES = 512 * 1024

#: A rank publishes block t when all have arrived at step t - 2, and so are done with block t - 4.
_SLOTS = 4
_SLOT_BYTES = 2 * LANE_BYTES // _SLOTS


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of one of several flat arrays, and the byte of a slot where each rank has them."""

    array: int
    start: int
    stop: int
    place: int


#: Pieces that share a slot, each with what every rank publishes of it: views that are valid until the next block.
Block = list[tuple[Piece, list[np.ndarray]]]


class Lanes:
    """One rank's view of the lanes.

    Parameters
    ----------
    lanes : uint8 array of shape (2, n_ranks, LANE_BYTES)
        In memory that all ranks share.
    rank : int
    barrier : Barrier
    """

    def __init__(self, lanes: np.ndarray, rank: int, barrier: Barrier) -> None:
        self._n_ranks = lanes.shape[1]
        self._slots = lanes.reshape(_SLOTS, self._n_ranks, _SLOT_BYTES)
        self._slots_as: dict[np.dtype, list[list[np.ndarray]]] = {}
        self._rank = rank
        self._barrier = barrier
        self.restart()

    def restart(self) -> None:
        """Every rank calls this at the start of a command, so that all begin with the same slot."""
        self._turn = 0

    def blocks(self, arrays: Sequence[np.ndarray], sizes: Sequence[int]) -> Iterator[Block]:
        """Publish flat arrays, and give block after block of what all ranks publish; at least one, perhaps empty.

        ``sizes`` are the most elements that any rank has of each array. The views are as long for all ranks; of ranks
        that have fewer elements, the rest means nothing.
        """
        cuts = _cut(arrays, sizes)
        following: tuple[Block, int] | None = self._publish(arrays, next(cuts, []))
        while following is not None:
            block, step = following
            pieces = next(cuts, None)
            following = None if pieces is None else self._publish(arrays, pieces)
            self._barrier.wait(step)
            yield block

    def exchange(self, words: Sequence[int]) -> list[list[int]]:
        """The words of each rank, which are as many on all."""
        [[(_, published)]] = self.blocks([np.array(words, dtype=np.int64)], [len(words)])
        return [one.tolist() for one in published]

    def buffers(self, dtype: np.dtype) -> list[np.ndarray]:
        """Scratch memory for a piece of each rank's array: its slots but the last, which others may still read."""
        slots = [self._slots[(self._turn + i) % _SLOTS, self._rank].view(dtype) for i in range(_SLOTS - 1)]
        per_slot = -(-self._n_ranks // len(slots))
        size = slots[0].size // per_slot
        return [slots[rank // per_slot][rank % per_slot * size :][:size] for rank in range(self._n_ranks)]

    def _publish(self, arrays: Sequence[np.ndarray], pieces: list[Piece]) -> tuple[Block, int]:
        """Copy pieces to the next slot; returns the block, and the step of the barrier to wait for."""
        block = []
        for piece in pieces:
            own = arrays[piece.array][piece.start : piece.stop]
            published = self._views(own.dtype, piece)
            np.copyto(published[self._rank][: own.size], own)
            block.append((piece, published))
        self._turn += 1
        return block, self._barrier.arrive()

    def _views(self, dtype: np.dtype, piece: Piece) -> list[np.ndarray]:
        """Where each rank publishes a piece in the next slot."""
        slots = self._slots_as.get(dtype)
        if slots is None:
            slots = self._slots_as[dtype] = [list(slot) for slot in self._slots.view(dtype)]
        first = piece.place // dtype.itemsize
        return [one[first : first + piece.stop - piece.start] for one in slots[self._turn % _SLOTS]]


def _cut(arrays: Sequence[np.ndarray], sizes: Sequence[int]) -> Iterator[list[Piece]]:
    """Cut flat arrays into pieces, as many to a block as fit into a slot."""
    pieces: list[Piece] = []
    used = 0
    for i, (array, size) in enumerate(zip(arrays, sizes)):
        most = _SLOT_BYTES // array.itemsize
        for start in range(0, size, most):
            stop = min(start + most, size)
            n_bytes = (stop - start) * array.itemsize
            if used + n_bytes > _SLOT_BYTES:
                yield pieces
                pieces, used = [], 0
            pieces.append(Piece(i, start, stop, used))
            used += aligned(n_bytes)
    if pieces:
        yield pieces
