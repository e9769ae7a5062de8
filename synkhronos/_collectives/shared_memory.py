"""Collectives between the processes of one machine.

*Through lanes* (see `lanes`): each rank publishes its arrays block by block, and combines the blocks of all ranks.

*Directly*, an all-reduce of large arrays, where the kernel lets the ranks read each other's memory: each rank reduces
one chunk of each array in place, and after a barrier collects the chunks of the others. So there are few barriers, and
nothing is written for others to read: to write where another core has read before can take ten times as long as to
read there.

Either way each element is combined in the order of the ranks, so the result is the same to the bit on every rank, and
no memory but the lanes is used, whatever the size of the arrays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

import numpy as np

from synkhronos._collectives.arithmetic import reduction_of
from synkhronos._collectives.lanes import Lanes
from synkhronos._collectives.peer_memory import address_of, can_read, read, readable_by
from synkhronos._collectives.workspace import Workspace
from synkhronos._partition import shares

if TYPE_CHECKING:
    from synkhronos._team import Barrier

__all__ = ["ShapesDiffer", "SharedMemoryTransport"]

#: Arrays of this size and more, on all ranks together, are reduced directly.
LARGE_BYTES = 16 * 1024 * 1024

#: Combines as many operands as there are ranks into another array, or into one of them.
_Reduction = Callable[["list[np.ndarray]", np.ndarray], None]


class ShapesDiffer(Exception):
    """The ranks brought arrays of different shapes; every rank raises this, and nothing was changed."""


class SharedMemoryTransport:
    """One rank's end of the shared-memory transport.

    Parameters
    ----------
    workspace : Workspace
    rank : int
    barrier : Barrier
    """

    def __init__(self, workspace: Workspace, rank: int, barrier: Barrier) -> None:
        self._n_ranks = len(workspace.signatures)
        self._lanes = Lanes(workspace.lanes, rank, barrier)
        self._signatures = workspace.signatures.data
        self._rank = rank
        self._barrier = barrier
        self.restart()

    def restart(self) -> None:
        """Every rank calls this at the start of a command, so that all are in step."""
        self._lanes.restart()

    def all_reduce(self, arrays: Sequence[np.ndarray], op: str, weights: Sequence[float] | None) -> bool:
        """Reduce arrays over the ranks, in place; once in each command.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous and writable; of the same dtypes on every rank.
        op : str
            A key of `OPS`.
        weights : sequence of float, or None
            For a weighted op: one for each rank; a rank of weight 0 is left out.

        Returns
        -------
        bool
            Whether the large ones, if there are any, went directly from rank to rank.

        Raises
        ------
        ShapesDiffer
            On every rank, before anything is changed, if the shapes are not the same on all.
        """
        reduction = self._reduction(op, weights)
        self._note_shapes(arrays)
        flat = [array.reshape(-1) for array in arrays]
        limit = LARGE_BYTES // self._n_ranks
        large = [array for array in flat if array.nbytes >= limit]
        small = [array for array in flat if array.nbytes < limit]
        self._through_lanes(small, reduction, small)  # compares shapes, even if there are none
        if not large:
            return False
        direct = self._directly(large, reduction)
        if not direct:
            self._through_lanes(large, reduction, large)
        return direct

    def reduce(self, arrays: Sequence[np.ndarray], op: str, outs: Sequence[np.ndarray] | None) -> None:
        """Reduce arrays over the ranks, with equal weights, into ``outs`` on the ranks that have them.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous; of the same dtypes on every rank.
        op : str
            As for `all_reduce`.
        outs : sequence of array, or None
            C-contiguous, with the shapes of ``arrays`` and the dtypes of the results; or ``arrays`` themselves.

        Raises
        ------
        ShapesDiffer
            On every rank, before anything is changed, if the shapes are not the same on all.
        """
        self._note_shapes(arrays)
        flat_outs = None if outs is None else [out.reshape(-1) for out in outs]
        self._through_lanes([array.reshape(-1) for array in arrays], self._reduction(op, None), flat_outs)

    def all_gather(self, arrays: Sequence[np.ndarray], sizes: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Concatenate arrays of all ranks, in rank order.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous; of the same dtypes on every rank.
        sizes : sequence of sequence of int
            For each array, the number of elements that each rank has.

        Returns
        -------
        list of array
            New ones, flat.
        """
        gathered = [np.empty(sum(size), array.dtype) for array, size in zip(arrays, sizes)]
        starts = [np.cumsum([0, *size]).tolist() for size in sizes]
        flat = [array.reshape(-1) for array in arrays]
        for block in self._lanes.blocks(flat, [max(size) for size in sizes]):
            for (i, start, _, _), published in block:
                for size, first, part in zip(sizes[i], starts[i], published):
                    if start < size:
                        part = part[: size - start]
                        gathered[i][first + start : first + start + part.size] = part
        return gathered

    def _note_shapes(self, arrays: Sequence[np.ndarray]) -> None:
        self._signatures[self._rank] = hash(tuple(array.shape for array in arrays))

    def _reduction(self, op: str, weights: Sequence[float] | None) -> _Reduction:
        numbers = (1,) * self._n_ranks if weights is None else tuple(weights)
        return lambda operands, out: reduction_of(op, operands[0].dtype, out.dtype, numbers)(operands, [out])

    def _through_lanes(
        self, arrays: Sequence[np.ndarray], reduction: _Reduction, outs: Sequence[np.ndarray] | None
    ) -> None:
        """Reduce flat arrays, perhaps none, into ``outs``, which may be the arrays; if `None`, only publish."""
        for block in self._lanes.blocks(arrays, [array.size for array in arrays]):
            if len(set(self._signatures)) > 1:
                raise ShapesDiffer("the shapes differ between ranks")
            if outs is None:
                continue
            for (i, start, stop, _), published in block:
                published[self._rank] = arrays[i][start:stop]  # which is at hand
                reduction(published, outs[i][start:stop])

    # -- directly

    def _directly(self, arrays: Sequence[np.ndarray], reduction: _Reduction) -> bool:
        """Reduce flat arrays in place; returns whether the ranks may read each other's memory; else nothing changes."""
        with readable_by(self._barrier.root):
            notes = self._lanes.exchange([os.getpid(), *map(address_of, arrays)])
            places = [(rank, *note) for rank, note in enumerate(notes) if rank != self._rank]
            able = all(can_read(pid, addresses[0]) for _, pid, *addresses in places)
            if not all(able for (able,) in self._lanes.exchange([able])):
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
        buffers = self._lanes.buffers(array.dtype)
        for start in range(chunk.start, chunk.stop, buffers[0].size):
            own = array[start : min(start + buffers[0].size, chunk.stop)]
            operands = [buffer[: own.size] for buffer in buffers]
            for rank, pid, address in places:
                read(pid, address + start * array.itemsize, operands[rank])
            operands[self._rank] = own
            reduction(operands, own)

    def _collect_chunks(self, array: np.ndarray, places: list[tuple[int, int, int]]) -> None:
        chunks = shares(array.size, self._n_ranks)
        for rank, pid, address in places:
            start, stop = chunks[rank].bounds
            read(pid, address + start * array.itemsize, array[start:stop])
