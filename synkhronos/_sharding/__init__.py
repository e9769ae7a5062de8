"""Sharding propagation for exact functions: rewrite a graph for one rank's rows, and insert collectives."""

from synkhronos._sharding.placements import Partial, Replicate, Shard
from synkhronos._sharding.propagate import register_sharding
from synkhronos._sharding.report import Prediction
from synkhronos._sharding.sharded_graph import ShardedGraph, row_axes
from synkhronos._sharding.slices import Slices
from synkhronos._sharding.user_shards import check_open, minibatches
from synkhronos._sharding.work import Needs, WorkReader
