"""Collectives between the processes of one node, through shared memory.

The compiled core executes them; see ``_native/collectives.h``. Arrays in the shared heap are reduced in place; others
are copied to the staging buffers of the ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from synkhronos._collectives.reductions import OPS, reduction_of
from synkhronos._collectives.transport import Part, Reduction
from synkhronos._memory import Segment, aligned
from synkhronos._native import native

if TYPE_CHECKING:
    from synkhronos._processes import Barrier, Timeline

OUTBOX_BYTES = 64 * 1024


class Workspace:
    """Shared memory for the collectives of one session; the controller creates it before it forks.

    Parameters
    ----------
    n_ranks : int

    Attributes
    ----------
    memory : uint8 array
        Notes and lanes of `SharedMemoryTransport`.
    outboxes : uint8 array of shape (n_ranks, OUTBOX_BYTES)
        Small results of workers for the controller.
    nccl_signatures : int64 array of shape (2, n_ranks)
        Hashes of the shapes that ranks pass to `NcclTransport`.
    """

    def __init__(self, n_ranks: int) -> None:
        n_bytes = aligned(native.Collectives.bytes_for(n_ranks))
        segment = Segment.create(n_bytes + n_ranks * (OUTBOX_BYTES + 2 * 8))
        segment.close_fd()
        self.memory = segment.bytes[:n_bytes]
        self.outboxes = segment.array((n_ranks, OUTBOX_BYTES), np.uint8, n_bytes)
        self.nccl_signatures = segment.array((2, n_ranks), np.int64, n_bytes + self.outboxes.nbytes)


class ShapesDiffer(Exception):
    """The ranks have arrays of different shapes."""


class SharedMemoryTransport:
    """One rank's end of the collectives between the processes of one node.

    Parameters
    ----------
    workspace : Workspace
    words : Words
        This rank's words for signals between the ranks.
    regions : Regions
        The shared heap. Arrays in it are reduced in place; others are copied to lanes.
    barrier : Barrier
    timeline : Timeline
    """

    def __init__(
        self, workspace: Workspace, words: native.Sync, regions: native.Heap, barrier: Barrier, timeline: Timeline
    ) -> None:
        self._n_ranks = words.n_ranks
        self._core = native.Collectives(workspace.memory, words, regions)
        self._barrier = barrier
        self._timeline = timeline
        #: Called by every rank at the start of a command, so that all are in step.
        self.restart = self._core.restart

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._barrier()

    def reduction_of(self, op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...]) -> Reduction:
        """Return the description of a reduction over all ranks that `run` takes."""
        return reduction_of(op, dtype, returned, weights)

    def all_reduce(
        self, arrays: Sequence[np.ndarray], op: str, weights: Sequence[float] | None, layout: Hashable = ()
    ) -> bool:
        """Reduce arrays over the ranks, in place.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous and writable; of the same dtypes on every rank.
        op : str
            A key of `OPS`.
        weights : sequence of float, or None
            For a weighted op: one for each rank; a rank of weight 0 is ignored.
        layout : hashable
            Must be equal on all ranks, like the shapes, for the elements to belong together.

        Returns
        -------
        bool
            Whether large arrays were reduced in the shared heap, without lanes.

        Raises
        ------
        ShapesDiffer
            On every rank, before anything is changed, if the shapes or the layouts differ between ranks.
        """
        return self._reduce(arrays, arrays, op, weights, [array.dtype for array in arrays], layout)

    def reduce(
        self, arrays: Sequence[np.ndarray], op: str, outs: Sequence[np.ndarray] | None, dtypes: Sequence[np.dtype]
    ) -> bool:
        """Reduce arrays over the ranks, with equal weights, into ``outs`` on the ranks that pass them.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous; of the same dtypes on every rank.
        op : str
            As for `all_reduce`.
        outs : sequence of array, or None
            C-contiguous, with the shapes of ``arrays``; or ``arrays`` themselves.
        dtypes : sequence of dtype
            Of the results.

        Returns
        -------
        bool
            Whether large arrays were reduced in the shared heap, without lanes.

        Raises
        ------
        ShapesDiffer
            On every rank, before anything is changed, if the shapes differ between ranks.
        """
        return self._reduce(arrays, [None] * len(arrays) if outs is None else outs, op, None, dtypes)

    def _reduce(
        self,
        arrays: Sequence[np.ndarray],
        outs: Sequence[np.ndarray | None],
        op: str,
        weights: Sequence[float] | None,
        dtypes: Sequence[np.dtype],
        layout: Hashable = (),
    ) -> bool:
        numbers = (1,) * self._n_ranks if weights is None or not OPS[op].weighted else tuple(weights)
        parts: list[Part] = [
            (array, out, self.reduction_of(op, array.dtype, dtype, numbers))
            for array, out, dtype in zip(arrays, outs, dtypes)
        ]
        return self._run(parts, hash((tuple([array.shape for array in arrays]), layout)))

    def all_gather(self, arrays: Sequence[np.ndarray], sizes: Sequence[list[int]]) -> tuple[list[np.ndarray], bool]:
        """Concatenate arrays of all ranks, in rank order.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous; of the same dtypes on every rank.
        sizes : sequence of list of int
            For each array, the number of elements on each rank.

        Returns
        -------
        gathered : list of array
            New arrays, flat.
        directly : bool
            Whether large arrays were read in the shared heap, without lanes.
        """
        gathered = [np.empty(sum(size), array.dtype) for array, size in zip(arrays, sizes)]
        return gathered, self._run(list(zip(arrays, gathered, sizes)), 0)

    def _run(self, parts: list[Part], signature: int) -> bool:
        directly = self.run(parts, signature)
        if directly is None:
            raise ShapesDiffer("the shapes differ between ranks")
        return directly

    def run(self, parts: list[Part], signature: int) -> bool | None:
        """Execute a collective; arguments and result as for `native.Collectives.run`."""
        return self._run_here(parts, signature)

    def _run_here(self, parts: list[Part], signature: int, is_open: bool = False) -> bool | None:
        wait = self._barrier.wait if self._timeline.on else None
        return self._core.run(parts, signature, self._barrier.check, wait, is_open)
