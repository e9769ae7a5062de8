"""Combining arrays across ranks: the arithmetic, and the transports that move the bytes."""

from __future__ import annotations

from synkhronos._collectives.across_machines import make_transport
from synkhronos._collectives.arithmetic import Accumulator, combine, result_dtype
from synkhronos._collectives.communicator import connect, make_clique
from synkhronos._collectives.nccl import NcclTransport, nccl_moves, nccl_reduces
from synkhronos._collectives.on_device import DeviceAccumulator, accumulates
from synkhronos._collectives.ops import OPS, check_op, lists_ops
from synkhronos._collectives.shared_memory import ShapesDiffer, SharedMemoryTransport
from synkhronos._collectives.workspace import Workspace

__all__ = [
    "OPS",
    "Accumulator",
    "DeviceAccumulator",
    "NcclTransport",
    "ShapesDiffer",
    "SharedMemoryTransport",
    "Workspace",
    "accumulates",
    "check_op",
    "combine",
    "connect",
    "lists_ops",
    "make_clique",
    "make_transport",
    "nccl_moves",
    "nccl_reduces",
    "result_dtype",
]
