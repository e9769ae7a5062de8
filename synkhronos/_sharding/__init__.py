"""Sharding propagation for exact functions: rewrite a graph for one rank's rows, and insert collectives."""

from __future__ import annotations

from synkhronos._sharding.placements import Partial, Replicate, Shard
from synkhronos._sharding.propagate import register_sharding
from synkhronos._sharding.sharded_graph import ShardedGraph, row_axes
from synkhronos._sharding.user_shards import check_open

__all__ = ["Partial", "Replicate", "Shard", "ShardedGraph", "check_open", "register_sharding", "row_axes"]
