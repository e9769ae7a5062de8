"""Transports, which move and reduce arrays between ranks: their protocols, and the one through shared memory.

`SharedMemoryTransport` connects the ranks of one node. The compiled core implements its collectives: see
``_native/collectives.h``. It reads large arrays directly if they lie in the shared heap on every rank. It copies other
arrays through staging buffers, one for each rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Optional, Protocol, Union

import numpy as np

from synkhronos._collectives.buckets import Algorithm
from synkhronos._collectives.pipeline import Division, EarlyReduction, Ticket
from synkhronos._collectives.reductions import OPS, reduction_of
from synkhronos._memory import Segment, aligned
from synkhronos._native import native
from synkhronos._processes import Barrier, Timeline

#: Reduction over all ranks: a `native.Reduction` on one node, an `Algorithm` on several.
Reduction = Union[native.Reduction, Algorithm]

#: One array of a collective: this rank's operand, the destination of the result (``None`` if this rank does not need
#: it), and the reduction. For an all-gather, the number of elements of each rank replaces the reduction.
Part = tuple[np.ndarray, Optional[np.ndarray], Union[Reduction, list[int]]]


class Transport(Protocol):
    """Transport of one rank, for arrays in host memory or on devices.

    Every rank calls the same methods in the same order. If a rank dies, the waits of the others raise an exception.
    """

    def restart(self) -> None:
        """Reset the numbers of rounds, which are equal on all ranks. Every rank calls it at the start of a command."""

    def all_reduce(self, arrays: Sequence[Any], op: str, weights: Sequence[float] | None, /) -> bool:
        """Reduce arrays over the ranks, in place.

        Returns
        -------
        bool
            Whether arrays were reduced directly, without a copy.

        Raises
        ------
        ShapesDiffer
            On every rank, before any array changes, if shapes differ between ranks.
        """


class EarlyTransport(Protocol):
    """The part of a transport over several nodes whose reductions go on while ranks compute, and its measurement.

    `HierarchicalTransport` documents the parameters.
    """

    def divide(
        self,
        kinds: Sequence[tuple[tuple[int, ...], np.dtype]],
        reductions: Sequence[Algorithm],
        order: Sequence[int],
        /,
    ) -> Division | None:
        """Divide an early reduction into pieces."""

    def add(self, early: EarlyReduction, array: np.ndarray, /) -> bool:
        """Add the next array of an early reduction, and begin to exchange the pieces that are complete with it."""

    def finish(self, early: EarlyReduction, outs: Sequence[np.ndarray] | None, /) -> bool:
        """Wait for the results of an early reduction, or give it up."""

    def leave(self) -> None:
        """Leave the reductions that have begun, because the function of this rank has failed."""

    def start(self, array: np.ndarray, op: str = "avg", /) -> Ticket:
        """Begin to reduce an array over all ranks in the background."""

    def time_messages(self, n_bytes: int, repetitions: int, /) -> list[float]:
        """Return the seconds of messages between the node leaders."""


class HostTransport(Transport, Protocol):
    """Transport for arrays in host memory, which every session has.

    `SharedMemoryTransport` documents the parameters.

    Attributes
    ----------
    early : EarlyTransport or None
        Begins reductions early, and reduces in the background; ``None`` on one node.
    """

    early: EarlyTransport | None

    @property
    def on_node(self) -> HostTransport:
        """Transport for collectives over the ranks of this node only, also while others go on in the background."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def all_reduce(
        self, arrays: Sequence[np.ndarray], op: str, weights: Sequence[float] | None, layout: Hashable = (), /
    ) -> bool:
        """Reduce arrays over the ranks, in place."""

    def reduce(
        self, arrays: Sequence[np.ndarray], op: str, outs: Sequence[np.ndarray] | None, dtypes: Sequence[np.dtype], /
    ) -> bool:
        """Reduce arrays over the ranks, into ``outs`` on the ranks that pass it."""

    def all_gather(self, arrays: Sequence[np.ndarray], sizes: Sequence[list[int]], /) -> tuple[list[np.ndarray], bool]:
        """Concatenate the arrays of all ranks, in rank order."""

    def reduction_of(self, op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...], /) -> Reduction:
        """Return a reduction over all ranks, as `run` takes it."""

    def run(self, parts: list[Part], signature: int, /) -> bool | None:
        """Run a collective of several arrays; parameters and result as for `native.Collectives.run`."""


# -- the ranks of one node

OUTBOX_BYTES = 64 * 1024
NOTES = 4096  # of a rank


class Workspace:
    """Shared memory for the collectives of a session, created before the workers are forked.

    Parameters
    ----------
    n_ranks : int

    Attributes
    ----------
    memory : uint8 array
        Headers and staging buffers of `SharedMemoryTransport`.
    outboxes : uint8 array of shape (n_ranks, OUTBOX_BYTES)
        Small results that workers return to the controller.
    nccl_signatures : int64 array of shape (2, n_ranks)
        Hashes of the shapes that ranks pass to `NcclTransport`.
    notes : int64 array of shape (n_ranks, NOTES)
        Notes of each rank on its part of a step, see `Steps`, and of a leader on the places of values.
    """

    def __init__(self, n_ranks: int) -> None:
        n_bytes = aligned(native.Collectives.bytes_for(n_ranks))
        segment = Segment.create(n_bytes + n_ranks * (OUTBOX_BYTES + (2 + NOTES) * 8))
        segment.close_fd()
        self.memory = segment.bytes[:n_bytes]
        self.outboxes = segment.array((n_ranks, OUTBOX_BYTES), np.uint8, n_bytes)
        self.nccl_signatures = segment.array((2, n_ranks), np.int64, n_bytes + self.outboxes.nbytes)
        n_bytes += self.outboxes.nbytes + self.nccl_signatures.nbytes
        self.notes = segment.array((n_ranks, NOTES), np.int64, n_bytes)


class ShapesDiffer(Exception):
    """The ranks have arrays of different shapes."""


class SharedMemoryTransport:
    """Transport of one rank, for collectives within its node.

    Parameters
    ----------
    workspace : Workspace
    words : Sync
        Counters by which the ranks of this node wait for each other.
    heap : Heap
        Shared heap. Large arrays in it are reduced directly, without staging buffers.
    barrier : Barrier
    timeline : Timeline
    core : Collectives, optional
        The compiled core of another transport of this rank, which then takes turns with this one.

    Attributes
    ----------
    restart : callable
        Bring the ranks of this node in step. Every rank calls it at the start of a command.
    early : EarlyTransport or None
        See `HostTransport`.
    """

    def __init__(
        self,
        workspace: Workspace,
        words: native.Sync,
        heap: native.Heap,
        barrier: Barrier,
        timeline: Timeline,
        *,
        core: native.Collectives | None = None,
    ) -> None:
        self._n_local = self._n_ranks = words.n_ranks
        self._core = native.Collectives(workspace.memory, words, heap) if core is None else core
        self._barrier = barrier
        self._timeline = timeline
        self.restart = self._core.restart
        self.early: EarlyTransport | None = None

    @property
    def on_node(self) -> HostTransport:
        """Return this transport, because there is one node."""
        return self

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._barrier()

    def reduction_of(self, op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...]) -> Reduction:
        """Return a reduction over all ranks, as `run` takes it."""
        return reduction_of(op, dtype, returned, weights)

    def all_reduce(
        self, arrays: Sequence[np.ndarray], op: str, weights: Sequence[float] | None, layout: Hashable = ()
    ) -> bool:
        """Reduce arrays over the ranks, in place.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous, writable arrays with the same shapes and dtypes on every rank.
        op : str
            Key of `OPS`.
        weights : sequence of float, or None
            Weight of each rank, for a weighted op; ranks of weight 0 are ignored. ``None``: equal weights.
        layout : hashable
            Any further description of how the elements lie in memory. It must be equal on all ranks.

        Returns
        -------
        bool
            Whether any array was reduced directly, without staging buffers.

        Raises
        ------
        ShapesDiffer
            On every rank, before any array changes, if shapes or layouts differ between ranks.
        """
        return self._reduce(arrays, arrays, op, weights, [array.dtype for array in arrays], layout)

    def reduce(
        self, arrays: Sequence[np.ndarray], op: str, outs: Sequence[np.ndarray] | None, dtypes: Sequence[np.dtype]
    ) -> bool:
        """Reduce arrays over the ranks, with equal weights, into ``outs`` on the ranks that pass it.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous arrays with the same shapes and dtypes on every rank.
        op : str
            Key of `OPS`.
        outs : sequence of array, or None
            C-contiguous arrays with the shapes of ``arrays``; may be ``arrays``. ``None``: this rank needs no result.
        dtypes : sequence of dtype
            Dtypes of the results.

        Returns
        -------
        bool
            Whether any array was reduced directly, without staging buffers.

        Raises
        ------
        ShapesDiffer
            On every rank, before any array changes, if shapes differ between ranks.
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
        """Reduce arrays into ``outs``; the parameters are those of `all_reduce` and `reduce`."""
        numbers = (1,) * self._n_ranks if weights is None or not OPS[op].weighted else tuple(weights)
        parts: list[Part] = [
            (array, out, self.reduction_of(op, array.dtype, dtype, numbers))
            for array, out, dtype in zip(arrays, outs, dtypes)
        ]
        return self._run(parts, hash((tuple([array.shape for array in arrays]), layout)))

    def all_gather(self, arrays: Sequence[np.ndarray], sizes: Sequence[list[int]]) -> tuple[list[np.ndarray], bool]:
        """Concatenate the arrays of all ranks, in rank order.

        Parameters
        ----------
        arrays : sequence of array
            C-contiguous arrays with the same dtypes on every rank.
        sizes : sequence of list of int
            For each array, the number of elements on each rank.

        Returns
        -------
        gathered : list of array
            New 1-d arrays.
        directly : bool
            Whether any array was read directly, without staging buffers.
        """
        gathered = [np.empty(sum(size), array.dtype) for array, size in zip(arrays, sizes)]
        return gathered, self._run(list(zip(arrays, gathered, sizes)), 0)

    def _run(self, parts: list[Part], signature: int) -> bool:
        """Run a collective, and return whether any array was read directly; raise `ShapesDiffer` on a mismatch."""
        directly = self.run(parts, signature)
        if directly is None:
            raise ShapesDiffer("the shapes differ between ranks")
        return directly

    def run(self, parts: list[Part], signature: int) -> bool | None:
        """Execute a collective; arguments and result as for `native.Collectives.run`."""
        return self._run_here(parts, signature)

    def _run_here(self, parts: list[Part], signature: int, is_open: bool = False) -> bool | None:
        """Run a collective within this node; with ``is_open``, skip its last barrier (see `native.Collectives.run`)."""
        wait = self._barrier.wait if self._timeline.on else None
        return self._core.run(parts, signature, self._barrier.check, wait, is_open)
