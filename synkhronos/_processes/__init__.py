"""Fork, synchronize, monitor and stop the processes of a session. This folder knows neither graphs nor commands."""

from synkhronos._processes.process_group import (
    Arrays,
    Ballots,
    Completion,
    LeaderTransport,
    Place,
    ProcessGroup,
    World,
    agree,
    check_exchange,
    check_nodes,
    kind_of,
)
from synkhronos._processes.rank_process import end_with, log, start_detached
from synkhronos._processes.sync import POLL, Barrier, Deadline, SessionStatus
from synkhronos._processes.timeline import (
    CATEGORIES,
    COLLECTIVES,
    CONTROL,
    FUNCTION,
    OUTSIDE,
    SHUFFLE,
    STRAGGLING,
    TRANSFERS,
    Notes,
    Timeline,
    convert_clock,
    spans,
)
