"""Collectives of arrays in the ranks' own memory, carried out by the compiled core; see ``_native/collectives.h``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synkhronos._collectives.arithmetic import reduction_of
from synkhronos._collectives.ops import OPS
from synkhronos._native import native

if TYPE_CHECKING:
    from synkhronos._collectives.workspace import Workspace
    from synkhronos._team import Barrier, Timeline

__all__ = ["ShapesDiffer", "SharedMemoryTransport"]


class ShapesDiffer(Exception):
    """The ranks have arrays of different shapes."""


class SharedMemoryTransport:
    """What one rank does in the collectives between processes of one machine.

    Parameters
    ----------
    workspace : Workspace
    words : Words
        As this rank has them.
    regions : Regions
        Memory that all ranks map. What lies there is reduced where it lies; the rest is copied to lanes.
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
        #: Every rank calls this at the start of a command, so that all are in step.
        self.restart = self._core.restart

    def meet(self) -> None:
        """Wait for all ranks."""
        self._barrier()

    def reduction_of(self, op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...]) -> Any:
        """What `run` takes for a reduction of all ranks."""
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
            For a weighted op: one for each rank; a rank of weight 0 is left out.
        layout : hashable
            What must be the same on all ranks, too, for the elements to belong together.

        Returns
        -------
        bool
            Whether large ones were reduced where they lie.

        Raises
        ------
        ShapesDiffer
            On every rank, before anything is changed, if the shapes, or the layouts, are not the same on all.
        """
        return self._reduce(arrays, arrays, op, weights, [array.dtype for array in arrays], layout)

    def reduce(
        self, arrays: Sequence[np.ndarray], op: str, outs: Sequence[np.ndarray] | None, dtypes: Sequence[np.dtype]
    ) -> bool:
        """Reduce arrays over the ranks, with equal weights, into ``outs`` on the ranks that have them.

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
            Whether large ones were reduced where they lie.

        Raises
        ------
        ShapesDiffer
            On every rank, before anything is changed, if the shapes are not the same on all.
        """
        return self._reduce(arrays, [None] * len(arrays) if outs is None else outs, op, None, dtypes)

    def _reduce(
        self,
        arrays: Sequence[np.ndarray],
        outs: Sequence[Any],
        op: str,
        weights: Sequence[float] | None,
        dtypes: Sequence[np.dtype],
        layout: Hashable = (),
    ) -> bool:
        numbers = (1,) * self._n_ranks if weights is None or not OPS[op].weighted else tuple(weights)
        parts = [
            (array, out, self.reduction_of(op, array.dtype, dtype, numbers))
            for array, out, dtype in zip(arrays, outs, dtypes)
        ]
        return self._run(parts, hash((tuple([array.shape for array in arrays]), layout)))

    def all_gather(self, arrays: Sequence[np.ndarray], sizes: Sequence[Sequence[int]]) -> tuple[list[np.ndarray], bool]:
        """Concatenate arrays of all ranks, in rank order.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous; of the same dtypes on every rank.
        sizes : sequence of sequence of int
            For each array, the number of elements that each rank has.

        Returns
        -------
        gathered : list of array
            New ones, flat.
        directly : bool
            Whether large ones were read where they lie.
        """
        gathered = [np.empty(sum(size), array.dtype) for array, size in zip(arrays, sizes)]
        return gathered, self._run(list(zip(arrays, gathered, sizes)), 0)

    def _run(self, parts: list[tuple[Any, Any, Any]], signature: int) -> bool:
        directly = self.run(parts, signature)
        if directly is None:
            raise ShapesDiffer("the shapes differ between ranks")
        return directly

    def run(self, parts: list[tuple[Any, Any, Any]], signature: int) -> bool | None:
        """Carry out a collective; arguments and result as of `native.Collectives.run`."""
        return self._run_here(parts, signature)

    def _run_here(self, parts: list[tuple[Any, Any, Any]], signature: int, is_open: bool = False) -> bool | None:
        wait = self._barrier.wait if self._timeline.on else None
        return self._core.run(parts, signature, self._barrier.check, wait, is_open)
