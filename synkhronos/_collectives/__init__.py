"""Reductions of arrays over ranks, and the transports that move arrays between ranks."""

from synkhronos._collectives.buckets import PIECE_BYTES, SHARED_BYTES
from synkhronos._collectives.hierarchical import LEAST_EARLY, make_transport
from synkhronos._collectives.nccl import (
    DeviceAccumulator,
    NcclTransport,
    accumulates,
    connect,
    make_clique,
    nccl_moves,
    nccl_reduces,
)
from synkhronos._collectives.pipeline import EarlyReduction, Ticket, average_of_leaders
from synkhronos._collectives.reductions import OPS, Accumulator, check_op, combine, lists_ops, result_dtype
from synkhronos._collectives.transport import (
    NOTES,
    HostTransport,
    Part,
    ShapesDiffer,
    SharedMemoryTransport,
    Transport,
    Workspace,
)
