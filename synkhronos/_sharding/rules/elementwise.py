"""Sharding rules of elementwise operations, which compute each element from the same element of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import constant_value, ops, scalar
from synkhronos._sharding.lengths import constant_of
from synkhronos._sharding.placements import Partial, Placed, Replicate, is_zero, placed
from synkhronos._sharding.propagate import REPLICATED_RULES, RULES, Propagation

__all__: list[str] = []


def _elementwise(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    shard = propagation.shard_of(node.inputs)
    if shard is None:
        return _of_partial(propagation, node)
    # Elemwise compares the lengths of axes that are not broadcastable
    inputs = [propagation.sharded(one, shard, lenient=True) for one in node.inputs]
    return placed(node, inputs, shard)


def _of_partial(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Apply an operation to partial and replicated inputs: before the all-reduce if it is linear, else after it.

    Linear are sums of partial inputs only, constant factors, and division by a constant or by the number of rows. A sum
    of a partial and a replicated input, such as ``w - rate * gradient``, is not: each rank would add ``w``. Other
    factors must follow the all-reduce, because 0 × inf on one rank could give NaN where the serial program gives inf.
    """
    placements = list(map(propagation.placement, node.inputs))
    if not set(placements) <= {Replicate(), Partial()}:  # an input is a partial maximum, minimum or product
        return propagation.computed_replicated(node)
    partial = [one == Partial() for one in placements]
    inputs, kind = list(map(propagation.new, node.inputs)), node.op.scalar_op
    # integers overflow as in the serial program only if the dtype does not change
    same = all(one.dtype == node.outputs[0].dtype for one, is_sum in zip(node.inputs, partial) if is_sum)
    is_linear = False
    if isinstance(kind, (scalar.Add, scalar.Sub)):
        is_linear = same and all(is_sum or is_zero(one) for one, is_sum in zip(node.inputs, partial))
    elif isinstance(kind, (scalar.Neg, scalar.Identity)):
        is_linear = same
    elif isinstance(kind, scalar.Cast):
        is_linear = node.inputs[0].dtype == "float32" and node.outputs[0].dtype == "float64"
    elif isinstance(kind, scalar.Mul):
        factors = [one for one, is_sum in zip(node.inputs, partial) if not is_sum]
        is_linear = same and len(factors) == len(partial) - 1 and all(map(_scales, factors))
    elif isinstance(kind, scalar.TrueDiv):
        is_linear = (
            same and partial == [True, False] and (_scales(node.inputs[1]) or _counts(propagation, node.inputs[1]))
        )
    elif isinstance(kind, scalar.Second) and not partial[1]:  # only the shape of the first input matters
        return placed(node, inputs, Replicate())
    if not is_linear:
        return propagation.computed_replicated(node)
    return placed(node, inputs, Partial())


def _scales(variable: Any) -> bool:
    """Return whether a variable is a finite constant other than zero."""
    value = constant_value(variable)
    return value is not None and 0 < abs(value) < float("inf")


def _counts(propagation: Propagation, variable: Any) -> bool:
    """Return whether a variable is the number of all rows × a positive constant, like the divisor of a mean.

    A partial sum may be divided by it before the all-reduce, although it is not a constant. It is 0 only if there are
    no rows; sums are then 0, and both orders give 0 / 0 = NaN.
    """
    node = variable.owner
    if node is not None and isinstance(node.op, ops.DimShuffle):
        return _counts(propagation, node.inputs[0])
    length = None
    if _is_cast(node) and variable.ndim == 0:
        length = propagation.lengths.scalar(node.inputs[0])
    elif node is not None and isinstance(node.op, ops.Subtensor) and _is_cast(node.inputs[0].owner):
        # T.mean casts the vector of all lengths, and selects one afterwards
        numbers = propagation.lengths.vector(node.inputs[0].owner.inputs[0])
        place = constant_of(ops.basic_index(node.inputs, node.op)[0])
        length = numbers[place] if numbers is not None and place is not None else None
    return length is not None and length.constant > 0 and set(length.symbols) == {0}


def _is_cast(node: Any) -> bool:
    return node is not None and isinstance(node.op, ops.Elemwise) and isinstance(node.op.scalar_op, scalar.Cast)


def _fill(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Replace ``fill(a, b)`` of scalars by ``b``.

    A gradient begins with such a fill of the cost, and computing ``a`` might need a collective.
    """
    value = node.inputs[-1]
    if isinstance(node.op.scalar_op, scalar.Second) and value.ndim == 0 and value.type == node.outputs[0].type:
        return [Placed(propagation.new(value), Replicate())]
    return propagation.computed_replicated(node)


RULES.update({ops.Elemwise: _elementwise})

#: Rules for Apply nodes with replicated inputs only.
REPLICATED_RULES.update({ops.Elemwise: _fill})
