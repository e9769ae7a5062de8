"""All-reduce between the processes of one machine.

*Through lanes*, memory that all ranks share: the arrays are cut into blocks. Each rank publishes block after block in
its lanes, which take turns, and combines the blocks of all ranks into its own array. There is one step of the barrier
for each block. Between arriving and waiting a rank publishes the next block, so ranks that keep up hardly ever wait.

*Directly*, for large arrays, where the kernel lets the ranks read each other's memory: each rank reduces one chunk of
each array in place, and after a barrier collects the chunks of the others. So there are few barriers, and nothing is
written for others to read: to write where another core has read before can take ten times as long as to read there.

Either way each element is combined in the order of the ranks, so the result is the same to the bit on every rank, and
no memory but the lanes is used, whatever the size of the arrays.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Callable

import numpy as np

from synkhronos._collectives._arithmetic import as_stored, normalized, reduce_into, weighted_mean
from synkhronos._collectives._peer_memory import address_of, can_read, read, readable_by
from synkhronos._partition import shares
from synkhronos._segments import aligned

if TYPE_CHECKING:
    from synkhronos._signals import Barrier

__all__ = ["LANE_BYTES", "ShapesDiffer", "SharedMemoryTransport"]

#: Bytes of one lane. Each rank has two, with room for two blocks in each. All of it together is as much as a core's own
#: cache can hold: by the time that a rank comes back to a block, what others read of it has left their caches.
LANE_BYTES = 512 * 1024

#: A rank publishes block t when all have arrived at step t - 2, and so are done with block t - 4.
_SLOTS = 4
_SLOT_BYTES = 2 * LANE_BYTES // _SLOTS

#: Arrays of this size and more, on all ranks together, are reduced directly.
LARGE_BYTES = 16 * 1024 * 1024

#: Combines as many operands as there are ranks into its first argument, which may be one of the first two operands.
_Reduction = Callable[[np.ndarray, list[np.ndarray]], None]

#: Pieces of flat arrays that go into one lane, each with the byte where it begins there.
_Block = list[tuple[np.ndarray, int]]

#: Pieces of flat arrays, each with what every rank publishes of it, and the step of the barrier to wait for.
_Published = tuple[list[tuple[np.ndarray, list[np.ndarray]]], int]


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
    barrier : Barrier
    """

    def __init__(self, lanes: np.ndarray, signatures: np.ndarray, rank: int, barrier: Barrier) -> None:
        self._n_ranks = len(signatures)
        self._slots = lanes.reshape(_SLOTS, self._n_ranks, _SLOT_BYTES)
        self._slots_as: dict[np.dtype, list[list[np.ndarray]]] = {}
        self._signatures = signatures.data
        self._rank = rank
        self._barrier = barrier
        self.restart()

    def restart(self) -> None:
        """Every rank calls this at the start of a command, so that all begin with the same slot."""
        self._turn = 0
        self._checked = False

    def all_reduce(self, arrays: Sequence[np.ndarray], op: str, weights: Sequence[float] | None) -> None:
        """Reduce arrays over the ranks, in place; once in each command.

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
        factors = normalized(weights if weights is not None else (1.0,) * self._n_ranks) if op == "avg" else None
        reduction = functools.partial(_reduce, op=op, factors=factors)
        self._signatures[self._rank] = hash(tuple(array.shape for array in arrays))
        flat = [array.reshape(-1) for array in arrays]
        limit = LARGE_BYTES // self._n_ranks
        large = [array for array in flat if array.nbytes >= limit]
        self._through_lanes([array for array in flat if array.nbytes < limit], reduction)
        if large and not self._directly(large, reduction):
            self._through_lanes(large, reduction)

    # -- through lanes

    def _through_lanes(self, arrays: Sequence[np.ndarray], reduction: _Reduction) -> None:
        """Reduce flat arrays, perhaps none."""
        blocks = self._blocks(arrays)
        following: _Published | None = self._publish(next(blocks))
        while following is not None:
            pieces, step = following
            block = next(blocks, None)
            following = None if block is None else self._publish(block)
            self._barrier.wait(step)
            if not self._checked:
                if len(set(self._signatures)) > 1:
                    raise ShapesDiffer("the shapes differ between ranks")
                self._checked = True
            for own, published in pieces:
                if self._rank < 2:
                    published[self._rank] = own  # which is at hand, and may be overwritten
                reduction(own, published)

    def _blocks(self, arrays: Sequence[np.ndarray]) -> Iterator[_Block]:
        """Cut flat arrays into pieces that fit into a slot together; the last block, and the only one, may be empty."""
        block: _Block = []
        used = 0
        for array in arrays:
            size = _SLOT_BYTES // array.itemsize
            for start in range(0, array.size, size):
                piece = array[start : start + size]
                if used + piece.nbytes > _SLOT_BYTES:
                    yield block
                    block, used = [], 0
                block.append((piece, used))
                used += aligned(piece.nbytes)
        yield block

    def _publish(self, block: _Block) -> _Published:
        """Copy pieces to the next slot."""
        pieces = []
        for piece, start in block:
            published = self._published(piece, start)
            np.copyto(published[self._rank], piece)
            pieces.append((piece, published))
        self._turn += 1
        return pieces, self._barrier.arrive()

    def _published(self, piece: np.ndarray, start: int) -> list[np.ndarray]:
        """Where each rank publishes a piece: views of the next slot from byte ``start`` on."""
        slots = self._slots_as.get(piece.dtype)
        if slots is None:
            slots = self._slots_as[piece.dtype] = [list(slot) for slot in self._slots.view(piece.dtype)]
        first = start // piece.itemsize
        return [one[first : first + piece.size] for one in slots[self._turn % _SLOTS]]

    def _exchange(self, words: Sequence[int]) -> list[list[int]]:
        """The words of each rank, which are as many on all."""
        note = np.array(words, dtype=np.int64)
        [(_, published)], step = self._publish([(note, 0)])
        self._barrier.wait(step)
        return [one.tolist() for one in published]

    # -- directly

    def _directly(self, arrays: Sequence[np.ndarray], reduction: _Reduction) -> bool:
        """Reduce flat arrays in place; returns whether the ranks may read each other's memory; else nothing changes."""
        with readable_by(self._barrier.root):
            notes = self._exchange([os.getpid(), *map(address_of, arrays)])
            places = [(rank, *note) for rank, note in enumerate(notes) if rank != self._rank]
            able = all(can_read(pid, addresses[0]) for _, pid, *addresses in places)
            if not all(able for (able,) in self._exchange([able])):
                return False
            for i, array in enumerate(arrays):
                self._reduce_chunk(array, [(rank, pid, addresses[i]) for rank, pid, *addresses in places], reduction)
            self._barrier()
            for i, array in enumerate(arrays):
                self._collect_chunks(array, [(rank, pid, addresses[i]) for rank, pid, *addresses in places])
            self._barrier()  # until here others may be reading
        return True

    def _reduce_chunk(self, array: np.ndarray, places: list[tuple[int, int, int]], reduction: _Reduction) -> None:
        chunk = shares(array.size, self._n_ranks)[self._rank]
        buffers = self._buffers(array.dtype)
        for start in range(chunk.start, chunk.stop, buffers[0].size):
            own = array[start : min(start + buffers[0].size, chunk.stop)]
            operands = [buffer[: own.size] for buffer in buffers]
            for rank, pid, address in places:
                read(pid, address + start * array.itemsize, operands[rank])
            if self._rank < 2:
                operands[self._rank] = own
            else:
                np.copyto(operands[self._rank], own)
            reduction(own, operands)

    def _collect_chunks(self, array: np.ndarray, places: list[tuple[int, int, int]]) -> None:
        chunks = shares(array.size, self._n_ranks)
        for rank, pid, address in places:
            start, stop = chunks[rank]
            read(pid, address + start * array.itemsize, array[start:stop])

    def _buffers(self, dtype: np.dtype) -> list[np.ndarray]:
        """Memory for a piece of each rank's array: this rank's slots but the last, which others may still read."""
        slots = [self._slots[(self._turn + i) % _SLOTS, self._rank].view(dtype) for i in range(_SLOTS - 1)]
        per_slot = -(-self._n_ranks // len(slots))
        size = slots[0].size // per_slot
        return [slots[rank // per_slot][rank % per_slot * size :][:size] for rank in range(self._n_ranks)]


def _reduce(out: np.ndarray, operands: list[np.ndarray], op: str, factors: list[float] | None) -> None:
    if factors is None:
        reduce_into(out, operands, op)
    elif out.dtype.kind not in "iub" and len(set(factors)) == 1:
        reduce_into(out, operands, "sum")
        np.multiply(out, out.dtype.type(factors[0]), out=out)
    else:
        present = [(operand, factor) for operand, factor in zip(operands, factors) if factor > 0]
        np.copyto(out, as_stored(weighted_mean(*zip(*present)), out.dtype))
