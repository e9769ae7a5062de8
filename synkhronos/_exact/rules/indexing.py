"""Indexing, and its gradients: rows stay where all are taken in order; tables that are whole are looked up by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._engine import INTEGERS, T, TensorType, ops
from synkhronos._exact.nodes import copied
from synkhronos._exact.placements import ONE, Partial, Placed, Replicate, Shard
from synkhronos._exact.rules.reductions import is_summed, is_zero
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]

_PICKED = "rows are picked"


def _index(walk: Walk, variable: Any, inputs: Sequence[Any], op: Any) -> list[Any]:
    """The basic index of a node; ``slice(None)`` wherever it takes all."""
    index, dims = ops.basic_index(inputs, op), walk.lengths.dims(variable)
    return [slice(None) if walk.lengths.takes_all(one, dims[axis]) else one for axis, one in enumerate(index)]


def _axis_after(index: Sequence[Any], axis: int) -> int | None:
    """Where an axis is after basic indexing; ``None`` where not all of it is taken in order."""
    if len(index) > axis and index[axis] != slice(None):
        return None
    return axis - sum(not isinstance(one, slice) for one in index[:axis])


def _part_of_increment(walk: Walk, y: Any, shard: Shard, axis: int, n_axes: int) -> Any:
    """What is put where x[index], of so many axes, has its rows along an axis; y may have fewer axes."""
    own = axis - (n_axes - y.ndim)
    return walk.whole(y, _PICKED) if own < 0 else walk.part(y, shard.moved(own), broadcasts=True)


def _subtensor(walk: Walk, node: Any) -> str | Sequence[Placed]:
    variable, *numbers = node.inputs
    placement = walk.placement(variable)
    inputs = [walk.new(variable), *map(walk.whole, numbers)]
    if isinstance(placement, Shard):
        axis = _axis_after(_index(walk, variable, node.inputs, node.op), placement.axis)
        if axis is None:
            return _PICKED
        placement = placement.moved(axis)
    return [Placed(copied(node, inputs)[0], placement)]


def _inc_subtensor(walk: Walk, node: Any) -> str | Sequence[Placed]:
    x, y, *numbers = node.inputs
    index = _index(walk, x, node.inputs[1:], node.op)
    n_axes = x.ndim - sum(not isinstance(one, slice) for one in index)
    of_x, of_y = walk.placement(x), walk.placement(y)
    if isinstance(of_x, Shard):
        shard = of_x
    elif isinstance(of_y, Shard):
        place = of_y.axis + n_axes - y.ndim
        axes = [axis for axis in range(x.ndim) if _axis_after(index, axis) == place]
        if not axes:
            return _PICKED
        shard = of_y.moved(axes[-1])
    elif _are_sums(walk, node):
        return [Placed(copied(node, [walk.new(x), walk.new(y), *map(walk.whole, numbers)])[0], Partial())]
    else:
        return walk.computed_whole(node)
    axis = _axis_after(index, shard.axis)
    if axis is None or x.broadcastable[shard.axis]:
        return _PICKED
    inputs = [walk.part(x, shard), _part_of_increment(walk, y, shard, axis, n_axes), *map(walk.whole, numbers)]
    return [Placed(copied(node, inputs)[0], shard)]


def _are_sums(walk: Walk, node: Any) -> bool:
    """Whether a sum over ranks, or zeros, is put into such: memory that is not written yet is as good as zeros."""
    x, y = node.inputs[:2]
    is_empty = x.owner is not None and isinstance(x.owner.op, ops.AllocEmpty) and node.op.set_instead_of_inc
    fits = [isinstance(walk.placement(one), Partial) or is_zero(one) for one in (x, y)]
    return x.dtype == y.dtype and (fits[0] or is_empty) and fits[1]


def _take(walk: Walk, node: Any) -> str | Sequence[Placed]:
    table, index = node.inputs
    of_table, of_index = walk.placement(table), walk.placement(index)
    if isinstance(of_table, Shard):
        if of_table.axis == 0 or isinstance(of_index, Shard):
            return _PICKED
        return [Placed(copied(node, [walk.new(table), walk.whole(index)])[0], of_table)]
    if isinstance(of_index, Shard):
        return [Placed(copied(node, [walk.whole(table), walk.new(index)])[0], of_index)]
    return walk.computed_whole(node)


def _add_to_table(walk: Walk, node: Any) -> str | Sequence[Placed]:
    table, y, index = node.inputs
    of_table, of_y, of_index = map(walk.placement, node.inputs)
    n_missing = table.ndim - y.ndim
    if isinstance(of_table, Shard):
        if of_table.axis == 0 or isinstance(of_index, Shard):
            return _PICKED
        y_here = _part_of_increment(walk, y, of_table, of_table.axis, table.ndim)
        return [Placed(copied(node, [walk.new(table), y_here, walk.whole(index)])[0], of_table)]
    if isinstance(of_index, Shard):
        shard = of_index
    elif isinstance(of_y, Shard) and of_y.axis + n_missing == 0 and not index.broadcastable[0]:
        shard = of_y
    else:
        return "the rows are no entries of the table" if walk.shard_of(node.inputs) else walk.computed_whole(node)
    if node.op.set_instead_of_inc or not is_summed(node.outputs[0]):
        return _PICKED
    whole, zeros = walk.whole(table), T.zeros_like(walk.whole(table))
    inputs = [zeros, _part_of_increment(walk, y, shard, 0, table.ndim), walk.part(index, shard)]
    (added,) = copied(node, inputs)
    if is_zero(table):
        return [Placed(added, Partial())]
    return [Placed(whole + walk.reduced(node.outputs[0], added, "sum"), Replicate())]


def _rows_of_points(walk: Walk, x: Any, index: Sequence[Any]) -> Shard | None:
    """The rows of ``x[arange(rows × k), y, …]``, x as long: where each is taken once, in order; else ``None``."""
    length = walk.lengths.range(index[0])
    per_row = None if length is None else walk.lengths.per_row(length)
    if per_row is None or not all(isinstance(one.type, TensorType) for one in index):
        return None
    shard = Shard(0, ONE, per_row)
    if walk.placement(x) != shard and (walk.shard_of([x]) or walk.lengths.dims(x)[0] != length):
        return None
    fits = all(one.ndim == 0 or (one.ndim == 1 and one.dtype in INTEGERS) for one in index)
    return shard if fits and not x.broadcastable[0] else None


def _index_here(walk: Walk, index: Sequence[Any], shard: Shard) -> list[Any]:
    here = T.arange(walk.lengths.here(shard.inner), dtype=index[0].dtype)
    return [here, *(walk.part(one, shard, broadcasts=True) if one.ndim else walk.whole(one) for one in index[1:])]


def _advanced(walk: Walk, node: Any) -> str | Sequence[Placed]:
    x, *index = node.inputs
    shard = _rows_of_points(walk, x, index)
    if shard is not None:
        inputs = [walk.part(x, shard), *_index_here(walk, index, shard)]
        return [Placed(copied(node, inputs)[0], shard)]
    of_index = walk.shard_of(index)
    if walk.shard_of([x]) or of_index is None:
        return _PICKED if walk.shard_of(node.inputs) else walk.computed_whole(node)
    if not all(isinstance(one.type, TensorType) and one.dtype in INTEGERS for one in index):
        return _PICKED
    n_axes = max(one.ndim for one in index)
    first = next(one for one in index if isinstance(walk.placement(one), Shard))
    axis = of_index.axis + n_axes - first.ndim
    inputs = [walk.whole(x), *(_part_of_increment(walk, one, of_index, axis, n_axes) for one in index)]
    return [Placed(copied(node, inputs)[0], of_index.moved(axis))]


def _advanced_inc(walk: Walk, node: Any) -> str | Sequence[Placed]:
    x, y, *index = node.inputs
    shard = _rows_of_points(walk, x, index)
    if shard is None:
        return _PICKED if walk.shard_of(node.inputs) else walk.computed_whole(node)
    y_here = _part_of_increment(walk, y, shard, 0, x.ndim - len(index) + 1)
    return [Placed(copied(node, [walk.part(x, shard), y_here, *_index_here(walk, index, shard)])[0], shard)]


RULES: dict[type, Rule] = {
    ops.Subtensor: _subtensor,
    ops.IncSubtensor: _inc_subtensor,
    ops.AdvancedSubtensor1: _take,
    ops.AdvancedIncSubtensor1: _add_to_table,
    ops.AdvancedSubtensor: _advanced,
    ops.AdvancedIncSubtensor: _advanced_inc,
}
