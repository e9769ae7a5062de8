"""The memory that collectives between processes work in."""

from __future__ import annotations

import numpy as np

from synkhronos._memory import Segment, aligned
from synkhronos._native import native

__all__ = ["Workspace"]

OUTBOX_BYTES = 64 * 1024


class Workspace:
    """Shared memory for the collectives of one session; made by the master before it forks.

    Parameters
    ----------
    n_ranks : int

    Attributes
    ----------
    memory : uint8 array
        Where `SharedMemoryTransport` publishes notes and lanes.
    outboxes : uint8 array of shape (n_ranks, OUTBOX_BYTES)
        Where workers put small results for the master.
    nccl_signatures : int64 array of shape (2, n_ranks)
        Where ranks note what shapes they bring to `NcclTransport`.
    """

    def __init__(self, n_ranks: int) -> None:
        n_bytes = aligned(native.Collectives.bytes_for(n_ranks))
        segment = Segment.create(n_bytes + n_ranks * (OUTBOX_BYTES + 2 * 8))
        segment.close_fd()
        self.memory = segment.bytes[:n_bytes]
        self.outboxes = segment.array((n_ranks, OUTBOX_BYTES), np.uint8, n_bytes)
        self.nccl_signatures = segment.array((2, n_ranks), np.int64, n_bytes + self.outboxes.nbytes)
