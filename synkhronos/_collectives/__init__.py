"""Combining arrays across ranks: the arithmetic, and the transports that move the bytes."""

from __future__ import annotations

from synkhronos._collectives._arithmetic import OPS, Accumulator, as_stored, combine
from synkhronos._collectives._shared_memory import LANE_BYTES, ShapesDiffer, SharedMemoryTransport

__all__ = ["LANE_BYTES", "OPS", "Accumulator", "ShapesDiffer", "SharedMemoryTransport", "as_stored", "combine"]
