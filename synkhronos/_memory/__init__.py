"""Memory shared by the processes of a session: allocate, map, send, grow and free it."""

from synkhronos._memory.channels import LOCK_BYTES, Board, FdChannel, Mailbox, SharedLocks
from synkhronos._memory.descriptors import Descriptor, OwnedSocket, release_freed_memory, remove_stale
from synkhronos._memory.heap import (
    Arena,
    Place,
    array_at,
    copy_around,
    copy_to_heap,
    look_at_free_memory,
    make_heap,
    place_of,
)
from synkhronos._memory.segments import (
    ArrayRef,
    FilePart,
    Segment,
    SegmentRef,
    SegmentTable,
    aligned,
    dtype_spec,
    find_part,
    open_part,
    segment_of_file,
)
