"""One rank: its state (functions, shared variables, memory), the controller's commands, and their execution."""

from synkhronos._rank.call import borrowed_row
from synkhronos._rank.collective_handlers import digest_of
from synkhronos._rank.commands import (
    IGNORES_VALUES,
    KEEPS_SHAPES,
    STATE_PART,
    AllGather,
    AllReduce,
    Bind,
    Broadcast,
    Call,
    Command,
    Connect,
    Digest,
    EndLoop,
    Exchange,
    Flush,
    Follow,
    Get,
    InOrder,
    KeepValues,
    Load,
    Loop,
    Nccl,
    Put,
    Record,
    Reduce,
    RestoreLoop,
    RowProduct,
    RowsRef,
    SaveLoop,
    Shapes,
    Share,
    SlicedUpdate,
    Source,
    Step,
    TimeFunction,
    TimeReduction,
    Unshare,
    keeps_equal,
    parts_of,
)
from synkhronos._rank.environment import digest_of_states, seed_rank
from synkhronos._rank.loop import MOST_BARRIERS, MOST_STEPS, pack, unpack
from synkhronos._rank.messages import (
    MOST_CACHED_BYTES,
    Arrays,
    Decoder,
    Encoder,
    Envelope,
    Failure,
    Records,
    Release,
    summarize,
)
from synkhronos._rank.replica import Replica, start_ranks
from synkhronos._rank.steps import MOST_SUMS, MOST_VALUES, TornUpdate
