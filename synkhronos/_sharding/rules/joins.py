"""Sharding rules of joining, splitting, repeating, sorting and cumulative operations along an axis without rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import ops
from synkhronos._sharding.lengths import constant_of
from synkhronos._sharding.placements import Partial, Placed, Shard, copied
from synkhronos._sharding.propagate import RULES, Propagation

__all__: list[str] = []


def _join(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    parts = ops.parts_of(node)
    first = [walk.whole(one) for one in node.inputs[: len(node.inputs) - len(parts)]]
    shard, axis = walk.shard_of(parts), constant_of(ops.axis_of(node))
    if shard is None:
        if all(isinstance(walk.placement(part), Partial) and part.dtype == node.outputs[0].dtype for part in parts):
            return [Placed(copied(node, [*first, *map(walk.new, parts)])[0], Partial())]
        return walk.computed_whole(node)
    if axis is None or axis % parts[0].ndim == shard.axis:
        return "rows are joined to rows"
    if any(part.broadcastable[shard.axis] for part in parts):
        return "a part has a single row"
    return [Placed(copied(node, [*first, *(walk.part(part, shard) for part in parts)])[0], shard)]


def _split(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    variable, *others = node.inputs
    shard, axis = walk.shard_of([variable]), constant_of(ops.axis_of(node))
    if shard is None or axis is None or axis % variable.ndim == shard.axis:
        return "rows are split from rows"
    inputs = [walk.new(variable), *(walk.whole(one, "lengths of a split") for one in others)]
    return [Placed(output, shard) for output in copied(node, inputs)]


def _repeat(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    variable, repeats = node.inputs
    shard = walk.shard_of([variable])
    axis = ops.axis_of(node)  # may be negative
    if shard is None or axis is None or axis % variable.ndim == shard.axis or walk.shard_of([repeats]):
        return "rows are repeated"
    return [Placed(copied(node, [walk.new(variable), walk.whole(repeats)])[0], shard)]


RULES.update({ops.Join: _join, ops.Split: _split, ops.RepeatOp: _repeat})


def _along(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    variable, *others = node.inputs
    shard = walk.placement(variable)
    if not isinstance(shard, Shard):
        return walk.computed_whole(node)
    axis = ops.axis_of(node)
    axis = None if axis is None else constant_of(axis)
    if axis is None or axis % variable.ndim == shard.axis or walk.shard_of(others):
        return "it works along the rows"
    inputs = [walk.new(variable), *(walk.whole(one) for one in others)]
    return [Placed(output, shard) for output in copied(node, inputs)]


RULES.update(dict.fromkeys((ops.SortOp, ops.ArgSortOp, ops.CumOp), _along))
