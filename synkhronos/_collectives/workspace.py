"""The memory that collectives between processes work in."""

from __future__ import annotations

import numpy as np

from synkhronos._collectives.lanes import LANE_BYTES
from synkhronos._memory import Segment

__all__ = ["Workspace"]


class Workspace:
    """Shared memory for the collectives of one session; made by the master before it forks.

    Parameters
    ----------
    n_ranks : int

    Attributes
    ----------
    lanes : uint8 array of shape (2, n_ranks, LANE_BYTES)
    signatures, nccl_signatures : int64 arrays of shapes (n_ranks,) and (2, n_ranks)
        Where ranks note what shapes they bring: to `SharedMemoryTransport`, and to `NcclTransport`.
    """

    def __init__(self, n_ranks: int) -> None:
        segment = Segment.create(n_ranks * (2 * LANE_BYTES + 3 * 8))
        segment.close_fd()
        self.lanes = segment.array((2, n_ranks, LANE_BYTES), np.uint8)
        signatures = segment.array((3, n_ranks), np.int64, offset=self.lanes.nbytes)
        self.signatures, self.nccl_signatures = signatures[0], signatures[1:]
