"""The collectives on shared variables."""

from __future__ import annotations

from synkhronos._variables.checking import check_replicas
from synkhronos._variables.collectives import all_gather, broadcast, gather, scatter
from synkhronos._variables.reductions import all_reduce, reduce
from synkhronos._variables.single import get_lengths, get_shapes, get_value, set_value

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "check_replicas",
    "gather",
    "get_lengths",
    "get_shapes",
    "get_value",
    "reduce",
    "scatter",
    "set_value",
]
