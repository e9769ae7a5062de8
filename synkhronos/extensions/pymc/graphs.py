"""Rewrite graphs of PyMC so that they can be sharded, with equal results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._backends import T, TensorConstant, ancestors, clone, copied, io_toposort, ops, scalar
from synkhronos.extensions.pymc.rows import ModelData

__all__ = ["shardable"]


def shardable(expressions: Sequence[Any], data: ModelData) -> list[Any]:
    """Return equal expressions that need fewer collectives if they are sharded by the rows of the data."""
    return _positions_computed(_checks_after_sums(expressions), data)


def _checks_after_sums(expressions: Sequence[Any]) -> list[Any]:
    """Apply checks of parameters to sums, in place of their terms.

    The result of a check depends on all rows. So without this, the terms could be summed only after an all-reduce.
    """
    new: dict[Any, Any] = {}
    for node in io_toposort([], list(expressions)):
        inputs = [new.get(one, one) for one in node.inputs]
        check = inputs[0].owner if inputs else None
        if check is not None and isinstance(check.op, ops.CheckAndRaise):
            terms, *conditions = check.inputs
            if isinstance(node.op, ops.Sum):
                new[node.outputs[0]] = check.op(*copied(node, [terms]), *conditions)
                continue
            if _reads_shape_only(node.op):  # as gradients do
                inputs[0] = terms
        if inputs != node.inputs:
            new.update(zip(node.outputs, copied(node, inputs)))
    return [new.get(one, one) for one in expressions]


def _reads_shape_only(op: Any) -> bool:
    """Return whether an operation reads only the shape of its first input."""
    return isinstance(op, (ops.Shape, ops.Shape_i)) or isinstance(getattr(op, "scalar_op", None), scalar.Second)


def _positions_computed(expressions: Sequence[Any], data: ModelData) -> list[Any]:
    """Replace constants 0, 1, 2, … by the positions of the rows, which each rank computes.

    PyTensor makes such constants where it picks an element of each row. Sharding recognizes the positions.
    """
    arrays = [(one, data.axis(one)) for one in ancestors(list(expressions))]
    positions: list[tuple[Any, int]] = []
    others: list[tuple[Any, int]] = []
    for one, axis in arrays:
        if axis is not None:
            (positions if _is_positions(one) else others).append((one, axis))
    if not positions or not others:
        return list(expressions)
    first, of_first = others[0]
    replace = {}
    for one, axis in positions:
        order = [0 if i == axis else "x" for i in range(one.ndim)]
        replace[one] = T.arange(first.shape[of_first], dtype=one.dtype).dimshuffle(order)
    return list(clone(list(expressions), replace=replace))


def _is_positions(variable: Any) -> bool:
    if not isinstance(variable, TensorConstant) or variable.dtype not in ("int32", "int64"):
        return False
    values = variable.data.ravel()
    return values[-1] == len(values) - 1 and np.array_equal(values, np.arange(len(values)))
