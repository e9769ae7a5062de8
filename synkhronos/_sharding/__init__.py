"""Exact functions: a graph is divided by its rows, with a collective exactly where rows meet."""

from __future__ import annotations

from synkhronos._sharding.sharded_graph import DividedGraph
from synkhronos._sharding.user_shards import check_open

__all__ = ["DividedGraph", "check_open"]
