"""Sharding of a graph by its rows, with collectives only where values of different rows are combined."""

from __future__ import annotations

from synkhronos._sharding.sharded_graph import ShardedGraph, row_axes
from synkhronos._sharding.user_shards import check_open

__all__ = ["ShardedGraph", "check_open", "row_axes"]
