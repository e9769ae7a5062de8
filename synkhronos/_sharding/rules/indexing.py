"""Sharding rules of indexing and its gradients.

A sharded axis stays sharded if the index selects all of it, in order. If a replicated array is indexed by sharded
arrays of integers, as in an embedding, the result is sharded like the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from synkhronos._backends import INTEGERS, T, TensorType, ops
from synkhronos._sharding.placements import ONE, Partial, Placed, Replicate, Shard, can_reduce, copied, is_zero, placed
from synkhronos._sharding.propagate import RULES, Propagation

__all__: list[str] = []

_PICKED = "the index selects some of the rows, or changes their order"
#: Operations that add to, or set, the entries that index arrays select.
_INCREMENTS = (ops.AdvancedIncSubtensor1, ops.AdvancedIncSubtensor)


def _index(propagation: Propagation, variable: Any, inputs: Sequence[Any], op: Any) -> list[Any]:
    """Return the basic index of an Apply node, with ``slice(None)`` for each axis that is selected fully, in order."""
    index, dims = ops.basic_index(inputs, op), propagation.lengths.dims(variable)
    return [slice(None) if propagation.lengths.takes_all(one, dims[axis]) else one for axis, one in enumerate(index)]


def _axis_after(index: Sequence[Any], axis: int) -> int | None:
    """Return the position of an axis after basic indexing; ``None`` if it is not selected fully, in order."""
    if len(index) > axis and index[axis] != slice(None):
        return None
    return axis - sum(not isinstance(one, slice) for one in index[:axis])


def _shard_of_increment(propagation: Propagation, y: Any, shard: Shard, axis: int, n_axes: int) -> Any:
    """Return this rank's shard of what is broadcast to an array of ``n_axes`` axes sharded along ``axis``.

    This may be an increment of ``x[index]``, or an array of an index. It may have fewer axes.
    """
    own = axis - (n_axes - y.ndim)
    return propagation.replicated(y, _PICKED) if own < 0 else propagation.sharded(y, shard.moved(own), broadcasts=True)


def _subtensor(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    variable, *numbers = node.inputs
    placement = propagation.placement(variable)
    inputs = [propagation.new(variable), *map(propagation.replicated, numbers)]
    if isinstance(placement, Shard):
        axis = _axis_after(_index(propagation, variable, node.inputs, node.op), placement.axis)
        if axis is None:
            return _PICKED
        placement = placement.moved(axis)
    return placed(node, inputs, placement)


def _inc_subtensor(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    x, y, *numbers = node.inputs
    index = _index(propagation, x, node.inputs[1:], node.op)
    n_axes = x.ndim - sum(not isinstance(one, slice) for one in index)
    of_x, of_y = propagation.placement(x), propagation.placement(y)
    if isinstance(of_x, Shard):
        shard = of_x
    elif isinstance(of_y, Shard):
        place = of_y.axis + n_axes - y.ndim
        axes = [axis for axis in range(x.ndim) if _axis_after(index, axis) == place]
        if not axes:
            return _PICKED
        shard = of_y.moved(axes[-1])
    elif _are_sums(propagation, node):
        sums = [propagation.new(x), propagation.new(y)]
        return placed(node, [*sums, *map(propagation.replicated, numbers)], Partial())
    else:
        return propagation.computed_replicated(node)
    axis = _axis_after(index, shard.axis)
    if axis is None or x.broadcastable[shard.axis]:
        return _PICKED
    y_here = _shard_of_increment(propagation, y, shard, axis, n_axes)
    return placed(node, [propagation.sharded(x, shard), y_here, *map(propagation.replicated, numbers)], shard)


def _are_sums(propagation: Propagation, node: Any) -> bool:
    """Return whether x and y are both partial or zero. Uninitialized memory counts as zero if y is set, not added."""
    x, y = node.inputs[:2]
    is_empty = x.owner is not None and isinstance(x.owner.op, ops.AllocEmpty) and node.op.set_instead_of_inc
    fits = [propagation.placement(one) == Partial() or is_zero(one) for one in (x, y)]
    return x.dtype == y.dtype and (fits[0] or is_empty) and fits[1]


class _Places(NamedTuple):
    """Positions of axes after indexing by arrays, which are broadcast to one shape."""

    entries: list[Any]  # an array or a slice for each axis; ``slice(None)`` if it selects all in order
    n_axes: int  # of the common shape
    first: int  # position of the first axis of that shape in the result

    @property
    def arrays(self) -> list[Any]:
        """The entries that are not slices."""
        return [one for one in self.entries if not isinstance(one, slice)]

    @property
    def n_results(self) -> int:
        """Number of axes of the result."""
        return self.n_axes + len(self.entries) - len(self.arrays)

    def axis_after(self, axis: int) -> int | None:
        """Return the position of an axis in the result; ``None`` if no slice selects it fully, in order."""
        if self.entries[axis] != slice(None):
            return None
        n_before = sum(isinstance(one, slice) for one in self.entries[:axis])
        return n_before + (self.n_axes if n_before >= self.first else 0)

    def shard_of_arrays(self, propagation: Propagation) -> Shard | None:
        """Return the placement of the first sharded index array, as broadcast to the common shape, else ``None``."""
        one = next((one for one in self.arrays if isinstance(propagation.placement(one), Shard)), None)
        if one is None:
            return None
        shard = propagation.shard_of([one])
        return None if shard is None else shard.moved(shard.axis + self.n_axes - one.ndim)

    def local(self, propagation: Propagation, inputs: Sequence[Any], shard: Shard) -> list[Any]:
        """Return this rank's shards of the index arrays among the inputs, and the full values of the others."""
        arrays = set(self.arrays)
        return [
            _shard_of_increment(propagation, one, shard, shard.axis, self.n_axes)
            if one in arrays
            else propagation.replicated(one)
            for one in inputs
        ]


def _places(propagation: Propagation, x: Any, index: Sequence[Any]) -> _Places | None:
    """Return the positions of axes after advanced indexing; ``None`` if an entry is not a slice or integer array."""
    dims = propagation.lengths.dims(x)
    known: list[Any] = [
        slice(None) if propagation.lengths.takes_all(one, dims[axis]) else one for axis, one in enumerate(index)
    ]
    known += [slice(None)] * (x.ndim - len(known))
    places = [axis for axis, one in enumerate(known) if not isinstance(one, slice)]
    arrays = [known[axis] for axis in places]
    if not arrays or not all(isinstance(one.type, TensorType) and one.dtype in INTEGERS for one in arrays):
        return None
    is_together = places[-1] - places[0] + 1 == len(places)
    return _Places(known, max(one.ndim for one in arrays), places[0] if is_together else 0)


def _rows_of_points(propagation: Propagation, x: Any, index: Sequence[Any]) -> Shard | None:
    """Return the placement of ``x[arange(n), y, …]`` for x of length n = rows × k; ``None`` for other indices.

    Such an index selects each row once, in order. The arrays may have further axes, along which the first is broadcast.
    """
    if any(isinstance(one, slice) or not isinstance(one.type, TensorType) for one in index):
        return None
    length = propagation.lengths.ranges.get(index[0])
    per_row = None if length is None else propagation.lengths.per_row(length)
    if per_row is None:
        return None
    shard = Shard(0, ONE, per_row)
    if propagation.placement(x) != shard and (propagation.shard_of([x]) or propagation.lengths.dims(x)[0] != length):
        return None
    fits = all(one.ndim <= index[0].ndim and one.dtype in INTEGERS for one in index)
    return shard if fits and not x.broadcastable[0] else None


def _local_index(propagation: Propagation, index: Sequence[Any], shard: Shard) -> list[Any]:
    n_axes = index[0].ndim
    here = T.arange(propagation.lengths.local(shard.inner), dtype=index[0].dtype).dimshuffle(0, *["x"] * (n_axes - 1))
    return [here, *(_shard_of_increment(propagation, one, shard, 0, n_axes) for one in index[1:])]


def _advanced(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    """Index an array by arrays, or add to its entries: then the second input is the increment."""
    x, *increment = node.inputs[: 1 + isinstance(node.op, _INCREMENTS)]
    rest = node.inputs[1 + len(increment) :]
    index = ops.advanced_index(node.inputs[len(increment) :], node.op)
    shard = _rows_of_points(propagation, x, index)
    if shard is not None:
        n_axes = x.ndim - len(index) + index[0].ndim
        y_here = [_shard_of_increment(propagation, y, shard, 0, n_axes) for y in increment]
        return placed(node, [propagation.sharded(x, shard), *y_here, *_local_index(propagation, index, shard)], shard)
    if propagation.shard_of(node.inputs) is None:
        return propagation.computed_replicated(node)
    places, of_x = _places(propagation, x, index), propagation.placement(x)
    if places is None:
        return _PICKED
    of_index = places.shard_of_arrays(propagation)
    if isinstance(of_x, Shard):
        axis = places.axis_after(of_x.axis)
        if axis is None or of_index is not None:
            return _PICKED
        y_here = [_shard_of_increment(propagation, y, of_x, axis, places.n_results) for y in increment]
        inputs = [propagation.new(x), *y_here, *map(propagation.replicated, rest)]
        return placed(node, inputs, of_x if increment else of_x.moved(axis))
    if increment:
        return _added_to_table(propagation, node, places, of_index or _entries_of(propagation, increment[0], places))
    if of_index is None:
        return _PICKED
    inputs = [propagation.replicated(x), *places.local(propagation, rest, of_index)]
    return placed(node, inputs, of_index.moved(places.first + of_index.axis))


def _entries_of(propagation: Propagation, y: Any, places: _Places) -> Shard | None:
    """Return the placement of an increment, in terms of the common shape of the index arrays.

    ``None`` if it is not sharded along an axis of that shape, or if all index arrays are broadcast along that axis.
    """
    shard = propagation.shard_of([y])
    if shard is None:
        return None
    axis = shard.axis + places.n_results - y.ndim - places.first
    if not 0 <= axis < places.n_axes:
        return None
    owns = [one.ndim - places.n_axes + axis for one in places.arrays]
    is_one = all(own < 0 or one.broadcastable[own] for one, own in zip(places.arrays, owns))
    return None if is_one else shard.moved(axis)


def _added_to_table(
    propagation: Propagation, node: Any, places: _Places, shard: Shard | None
) -> str | Sequence[Placed]:
    """Add to a replicated array the sum of the ranks' increments, which each rank computes from its own rows."""
    table, y, *rest = node.inputs
    if shard is None:
        return "it is sharded along an axis that the index arrays do not have"
    if not ops.adds(node.op) or not can_reduce(node.outputs[0]):
        return _PICKED
    full, zeros = propagation.replicated(table), T.zeros_like(propagation.replicated(table))
    y_here = _shard_of_increment(propagation, y, shard, places.first + shard.axis, places.n_results)
    (added,) = copied(node, [zeros, y_here, *places.local(propagation, rest, shard)])
    if is_zero(table):
        return [Placed(added, Partial())]
    return [Placed(full + propagation.reduced(node.outputs[0], added, "sum"), Replicate())]


RULES.update(
    {
        ops.Subtensor: _subtensor,
        ops.IncSubtensor: _inc_subtensor,
        **dict.fromkeys((ops.AdvancedSubtensor1, ops.AdvancedSubtensor, *_INCREMENTS), _advanced),
    }
)
