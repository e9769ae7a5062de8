"""Nodes of the user's graph and of the divided one, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from synkhronos._engine import TensorType, ops, with_broadcastable
from synkhronos._exact.placements import Placed, Placement, Replicate, Shard

__all__ = ["copied", "is_broadcast", "is_of_one_sum", "typed"]


def copied(node: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a node like this one, of other inputs of the same types."""
    if all(new is old for new, old in zip(inputs, node.inputs)):
        return list(node.outputs)
    return list(node.clone_with_new_inputs(list(inputs)).outputs)


def is_of_one_sum(variable: Any, placements: Mapping[Any, Placement]) -> bool:
    """Whether a variable is made of one that is no larger and can be reduced in its place, for others too."""
    node = variable.owner
    if node is None or not isinstance(node.op, (ops.Elemwise, ops.DimShuffle)):
        return False
    sums = [one for one in node.inputs if not isinstance(placements[one], Replicate)]
    return len(sums) == 1 and sums[0].broadcastable.count(False) == variable.broadcastable.count(False)


def is_broadcast(placed: Placed) -> bool:
    """Whether rows are said to lie along an axis that is broadcast."""
    return isinstance(placed.placement, Shard) and placed.variable.broadcastable[placed.placement.axis]


def typed(new: Any, variable: Any) -> Any:
    """A variable of the divided graph, of the type of the user's."""
    if new.type == variable.type:
        return new
    if isinstance(new.type, TensorType) and new.dtype == variable.dtype and new.ndim == variable.ndim:
        return with_broadcastable(new, variable.broadcastable)
    raise TypeError(f"{variable}: {new.type} in place of {variable.type}")
