"""Sharding rules of products of matrices, of stacks of matrices, and of a dense with a sparse matrix.

A product that contracts the rows gives a `Partial` result. Sparse matrices are replicated: only dense factors have
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from synkhronos._backends import ops
from synkhronos._sharding.placements import Partial, Placed, Replicate, Shard, copied
from synkhronos._sharding.propagate import RULES, Propagation
from synkhronos._sharding.rules.reductions import is_summed

__all__: list[str] = []


class _Axes(NamedTuple):
    """Labels of the axes of all inputs and outputs, as in `numpy.einsum`.

    Axes with the same label have the same length in all inputs, or length 1 and are broadcast.
    """

    inputs: Sequence[Sequence[str]]
    outputs: Sequence[Sequence[str]]
    summed: str | None = None  # the label that the operation sums over, if rows may be along it


def _multiply(walk: Propagation, node: Any, axes: _Axes) -> str | Sequence[Placed]:
    """Shard a product along one label, along which an input has its rows.

    A label of the outputs is preferred: the result then keeps its rows without a collective. Other inputs with this
    label are sharded along it, all others are made replicated.
    """
    found: list[tuple[str, Shard]] = []
    for one, labels in zip(node.inputs, axes.inputs):
        placement = walk.placement(one)
        if isinstance(placement, Shard):
            found.append((labels[placement.axis], placement))
    if not found:
        return walk.computed_whole(node)
    kept = [pair for pair in found if all(pair[0] in labels for labels in axes.outputs)]
    usable = kept or [pair for pair in found if pair[0] == axes.summed]
    if not usable:
        return "its rows do not lie along an axis that it treats place by place"
    label, shard = usable[0]
    holders = [(one, labels.index(label)) for one, labels in zip(node.inputs, axes.inputs) if label in labels]
    if not kept:
        if not is_summed(node.outputs[0]):
            return f"a product of {node.outputs[0].dtype} over rows"
        if any(one.broadcastable[axis] for one, axis in holders):
            return "rows that are contracted with an axis of length 1"
    reason = "both factors have rows, along different axes of the product"
    inputs = [
        # an operation that contracts axes compares their lengths itself
        walk.part(one, shard.moved(labels.index(label)), lenient=not kept)
        if label in labels
        else walk.whole(one, reason)
        for one, labels in zip(node.inputs, axes.inputs)
    ]
    outputs = copied(node, inputs)
    if not kept:
        return [Placed(output, Partial()) for output in outputs]
    return [Placed(output, shard.moved(labels.index(label))) for output, labels in zip(outputs, axes.outputs)]


def _dot(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    a, b = node.inputs
    if not (1 <= a.ndim <= 2 and 1 <= b.ndim <= 2):
        return "its factors are not vectors and matrices"
    of_a, of_b = ("k", "ik")[a.ndim - 1], ("k", "kj")[b.ndim - 1]
    return _multiply(walk, node, _Axes([of_a, of_b], [(of_a + of_b).replace("k", "")], "k"))


def _batched_dot(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    a, b = node.inputs
    if not (2 <= a.ndim <= 3 and 2 <= b.ndim <= 3) or a.broadcastable[0] != b.broadcastable[0]:
        return "its factors are not stacks of as many vectors and matrices"
    of_a, of_b = ("bk", "bik")[a.ndim - 2], ("bk", "bkj")[b.ndim - 2]
    return _multiply(walk, node, _Axes([of_a, of_b], ["b" + (of_a[1:] + of_b[1:]).replace("k", "")], "k"))


def _blockwise(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    """Shard a Blockwise along its batch axes, which come first and have numbers as labels, or as a product."""
    op, batch = node.op, list(map(str, range(node.op.batch_ndim(node))))
    if type(op.core_op) is ops.Dot:
        return _multiply(walk, node, _Axes([[*batch, "i", "k"], [*batch, "k", "j"]], [[*batch, "i", "j"]], "k"))
    inputs = [[*batch, *["inside"] * (one.ndim - len(batch))] for one in node.inputs]
    outputs = [[*batch, *["inside of an output"] * (one.ndim - len(batch))] for one in node.outputs]
    return _multiply(walk, node, _Axes(inputs, outputs))


RULES.update({ops.Dot: _dot, ops.BatchedDot: _batched_dot, ops.Blockwise: _blockwise})


def _sparse_dot(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    placements = [walk.placement(one) for one in node.inputs]
    for place, (dense, placement) in enumerate(zip(node.inputs, placements)):
        is_kept = isinstance(placement, Shard) and dense.ndim == 2 and placement.axis == place
        if is_kept and isinstance(placements[1 - place], Replicate):
            return [Placed(copied(node, list(map(walk.new, node.inputs)))[0], placement)]
    return "rows are contracted with a sparse matrix"


def _values(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    """Shard the gradient for the values of a sparse matrix, which sums over the columns of both factors."""
    *indices, dense, gradient = node.inputs
    shard = walk.shard_of([dense, gradient])
    if shard is None or shard.axis != 1 or walk.shard_of(indices) or not is_summed(node.outputs[0]):
        return "rows are contracted with a sparse matrix"
    if dense.broadcastable[1] or gradient.broadcastable[1]:
        return "a single column"
    inputs = [*map(walk.whole, indices), walk.part(dense, shard), walk.part(gradient, shard)]
    return [Placed(copied(node, inputs)[0], Partial())]


RULES.update(
    {
        **dict.fromkeys((ops.SparseDot, ops.StructuredDot), _sparse_dot),
        **dict.fromkeys((ops.StructuredDotGradCSC, ops.StructuredDotGradCSR), _values),
    }
)
