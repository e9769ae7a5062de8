"""Protocols of the transports, which move and reduce arrays between ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Optional, Protocol, Union

import numpy as np

from synkhronos._collectives.buckets import Algorithm
from synkhronos._collectives.pipeline import Division, EarlyReduction
from synkhronos._native import native

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
        """Bring the ranks in step. Every rank calls it at the start of a command."""

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
    """The part of a transport over several nodes that begins reductions before all of their arrays exist.

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


class HostTransport(Transport, Protocol):
    """Transport for arrays in host memory, which every session has.

    `SharedMemoryTransport` documents the parameters.

    Attributes
    ----------
    early : EarlyTransport or None
        Begins reductions early; ``None`` on one node.
    """

    early: EarlyTransport | None

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
