"""Interfaces of the transports: what code above this folder may expect of the ways to move arrays between ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Optional, Protocol, Union

import numpy as np

from synkhronos._collectives.buckets import Algorithm
from synkhronos._native import native

#: What `HostTransport.reduction_of` returns.
Reduction = Union[native.Reduction, Algorithm]

#: A part of a collective: an array, the array for the result if the rank wants it, and how the ranks' arrays are
#: reduced, or, to gather them, the number of elements of each rank.
Part = tuple[np.ndarray, Optional[np.ndarray], Union[Reduction, list[int]]]


class Transport(Protocol):
    """One rank's end of the collectives of all ranks, of arrays in host memory or on devices.

    Every rank calls the same methods in the same order. A wait ends with an exception if another rank dies.
    """

    def restart(self) -> None:
        """Bring the ranks in step; each calls this at the start of a command."""

    def all_reduce(self, arrays: Sequence[Any], op: str, weights: Sequence[float] | None, /) -> bool:
        """Reduce arrays over the ranks, in place; return whether large ones were reduced without a copy.

        Raises
        ------
        ShapesDiffer
            On every rank, before anything is changed, if the shapes differ between ranks.
        """


class HostTransport(Transport, Protocol):
    """The transport of arrays in host memory, which every session has.

    `SharedMemoryTransport` documents the arguments.
    """

    def barrier(self) -> None:
        """Wait for all ranks."""

    def all_reduce(
        self, arrays: Sequence[np.ndarray], op: str, weights: Sequence[float] | None, layout: Hashable = (), /
    ) -> bool:
        """Reduce arrays over the ranks, in place."""

    def reduce(
        self, arrays: Sequence[np.ndarray], op: str, outs: Sequence[np.ndarray] | None, dtypes: Sequence[np.dtype], /
    ) -> bool:
        """Reduce arrays over the ranks, into ``outs`` on the ranks that pass them."""

    def all_gather(self, arrays: Sequence[np.ndarray], sizes: Sequence[list[int]], /) -> tuple[list[np.ndarray], bool]:
        """Concatenate arrays of all ranks, in rank order."""

    def reduction_of(self, op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...], /) -> Reduction:
        """Return the description of a reduction over all ranks that `run` takes."""

    def run(self, parts: list[Part], signature: int, /) -> bool | None:
        """Execute a collective of several parts; arguments and result as for `native.Collectives.run`."""
