"""Memory that the processes of a session share: made, mapped, grown and given back."""

from __future__ import annotations

from synkhronos._memory.arena import Arena
from synkhronos._memory.box import Box
from synkhronos._memory.descriptors import clear_of_streams
from synkhronos._memory.files import OpenFile
from synkhronos._memory.heap import keep_freed_memory, return_freed_memory
from synkhronos._memory.segments import (
    ArrayRef,
    FileRef,
    Segment,
    SegmentRef,
    SegmentTable,
    aligned,
    dtype_spec,
    remove_stale,
)

__all__ = [
    "Arena",
    "ArrayRef",
    "Box",
    "FileRef",
    "OpenFile",
    "Segment",
    "SegmentRef",
    "SegmentTable",
    "aligned",
    "clear_of_streams",
    "dtype_spec",
    "keep_freed_memory",
    "remove_stale",
    "return_freed_memory",
]
