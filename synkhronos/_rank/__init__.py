"""State of one rank, and execution of the controller's commands on it."""

from synkhronos._rank.call import borrowed
from synkhronos._rank.collective_handlers import digest_of
from synkhronos._rank.commands import (
    KEEPS_SHAPES,
    AllGather,
    AllReduce,
    Bind,
    Call,
    Command,
    Connect,
    Digest,
    Follow,
    Get,
    InOrder,
    Load,
    Nccl,
    Put,
    Record,
    Reduce,
    RowsRef,
    Settle,
    Shapes,
    Source,
)
from synkhronos._rank.environment import digest_of_states, set_apart
from synkhronos._rank.messages import Arrays, Decoder, Encoder, Envelope, Failure, Release, summarize
from synkhronos._rank.replica import Replica
from synkhronos._rank.start import start_ranks
