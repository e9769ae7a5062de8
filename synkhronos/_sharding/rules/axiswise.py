"""Sharding rules of operations that each rank applies to its local shards unchanged.

These are views and checks, joins, sorts, reductions, products, softmax, convolution and pooling. Most rules list the
acceptable shardings of an Apply node; see `register_sharding`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from synkhronos._backends import ops, scalar
from synkhronos._sharding.lengths import constant_of, reduced_axes
from synkhronos._sharding.placements import Partial, Placed, Placement, Replicate, Shard, can_reduce, copied, placed
from synkhronos._sharding.propagate import RULES, AcceptableSharding, Propagation, Rule, ShardingRule, register_sharding
from synkhronos._sharding.rules.control_flow import inner_graph

__all__: list[str] = []


# -- one input keeps its placement


def _elementwise(node: Any, axes: Sequence[int], *, is_linear: bool = True) -> list[AcceptableSharding]:
    """Return shardings in which the first input and all outputs have one placement, and other inputs are replicated.

    The placement is ``Shard(axis)`` for one of ``axes``, or ``Partial()`` if the operation is linear in its first
    input.
    """
    placements: list[Placement] = [*[Partial()] * is_linear, *map(Shard, axes)]
    others = [Replicate()] * (len(node.inputs) - 1)
    return [([one] * len(node.outputs), [one, *others]) for one in placements]


def _n_axes(variable: Any) -> int:
    return int(getattr(variable, "ndim", 0))


@register_sharding(
    ops.ViewOp,
    ops.OutputGuard,
    ops.DeepCopyOp,
    ops.Rebroadcast,
    ops.CpuContiguous,
    ops.ConsiderConstant,
    ops.DisconnectedGrad,
    ops.GradClip,
    ops.GradScale,
    ops.UndefinedGrad,
    ops.ZeroGrad,
)
def _identity(node: Any) -> list[AcceptableSharding]:
    return _elementwise(node, range(_n_axes(node.inputs[0])))


@register_sharding(ops.Assert, ops.CheckAndRaise)
def _check(node: Any) -> list[AcceptableSharding]:
    """Reduce a partial value together with the conditions, rather than in a later meeting."""
    return _elementwise(node, range(_n_axes(node.inputs[0])), is_linear=False)


@register_sharding(ops.DimShuffle)
def _dimshuffle(node: Any) -> list[AcceptableSharding]:
    order = node.op.new_order
    axes = [axis for axis in order if axis != "x"]
    return [([Partial()], [Partial()]), *(([Shard(order.index(axis))], [Shard(axis)]) for axis in axes)]


@register_sharding(ops.ExtractDiag)
def _diagonals(node: Any) -> list[AcceptableSharding]:
    """Shard along the axes of which the diagonals have no part."""
    n_axes = node.inputs[0].ndim
    parts = {node.op.axis1 % n_axes, node.op.axis2 % n_axes}
    labels = ["inside" if axis in parts else str(axis) for axis in range(n_axes)]
    return _product(node, [labels], [[*(one for one in labels if one != "inside"), "inside"]])


def _other_axes(node: Any, variable: Any) -> list[int] | str:
    """Return all axes except that along which an operation works, or a reason if that axis is not known."""
    axis = ops.axis_of(node)
    axis = None if axis is None else constant_of(axis)
    if axis is None:
        return "the axis along which it works is not known"
    return [one for one in range(variable.ndim) if one != axis % variable.ndim]


@register_sharding(ops.Split, ops.RepeatOp, ops.SortOp, ops.ArgSortOp, ops.CumOp)
def _along_an_axis(node: Any) -> str | list[AcceptableSharding]:
    axes = _other_axes(node, node.inputs[0])
    return axes if isinstance(axes, str) else _elementwise(node, axes, is_linear=False)


@register_sharding(ops.Join)
def _join(node: Any) -> str | list[AcceptableSharding]:
    joined, (output,) = ops.parts_of(node), node.outputs
    first = [Replicate()] * (len(node.inputs) - len(joined))
    axes = _other_axes(node, output)
    placements: list[Placement] = [] if isinstance(axes, str) else list(map(Shard, axes))
    if all(one.dtype == output.dtype for one in joined):
        placements.append(Partial())
    return [([one], [*first, *[one] * len(joined)]) for one in placements]


# -- reductions


def _op_over_ranks(node: Any) -> str | None:
    """Return the op that reduces the ranks' results to the full result; ``None`` if there is none."""
    kind = node.op.scalar_op
    if node.outputs[0].dtype == "bool":
        return {scalar.AND: "min", scalar.OR: "max", scalar.Maximum: "max", scalar.Minimum: "min"}.get(type(kind))
    return {scalar.Add: "sum", scalar.Mul: "prod", scalar.Maximum: "max", scalar.Minimum: "min"}.get(type(kind))


def _kept_axes(node: Any) -> list[AcceptableSharding]:
    """Return the shardings along axes that are not reduced."""
    axes = reduced_axes(node)
    kept = [axis for axis in range(node.inputs[0].ndim) if axis not in axes]
    return [([Shard(place)] * len(node.outputs), [Shard(axis)]) for place, axis in enumerate(kept)]


@register_sharding(
    *(ops.CAReduce, ops.CAReduceDtype, ops.Sum, ops.Prod, ops.ProdWithoutZeros, ops.All, ops.AnyOp),
    *(ops.Max, ops.Min),
)
def _reduce(node: Any) -> list[AcceptableSharding]:
    found, op = _kept_axes(node), _op_over_ranks(node)
    if op is not None:
        found += [([Partial(op)], [Shard(axis)]) for axis in reduced_axes(node)]
    if isinstance(node.op.scalar_op, scalar.Add) and node.inputs[0].dtype == node.outputs[0].dtype:
        found.append(([Partial()], [Partial()]))
    return found


register_sharding(ops.Argmax)(_kept_axes)


def _max_and_argmax(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    (variable,), (largest, place) = node.inputs, node.outputs
    placement, axes = propagation.placement(variable), reduced_axes(node)
    if isinstance(placement, Partial):
        return propagation.computed_replicated(node)
    assert isinstance(placement, Shard)
    if placement.axis not in axes:
        shard = placement.moved(placement.axis - sum(axis < placement.axis for axis in axes))
        return placed(node, [propagation.new(variable)], shard)
    if propagation.is_used(place) or not can_reduce(largest, "max"):
        return "argmax over rows"
    here = copied(node, [propagation.new(variable)])
    return [Placed(here[0], Partial("max")), Placed(here[1], Replicate())]  # the second output is not used


RULES[ops.MaxAndArgmax] = _max_and_argmax


# -- products


def _product(node: Any, inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]) -> list[AcceptableSharding]:
    """Return the shardings of a product of arrays, whose axes have labels as in `numpy.einsum`.

    Axes with the same label have the same length in all inputs, or are broadcast. The label ``"k"`` is summed over.
    Shardings along an axis of the outputs come first, because they need no collective.
    """
    labels = [one for one in dict.fromkeys(label for each in inputs for label in each) if one[:6] != "inside"]
    labels.sort(key=lambda label: label == "k")
    found: list[AcceptableSharding] = []
    for label in labels:
        is_kept = all(label in each for each in outputs)
        if is_kept or label == "k":
            of_inputs = [_at(label, each, one, is_kept) for each, one in zip(inputs, node.inputs)]
            found.append(([Shard(each.index(label)) if is_kept else Partial() for each in outputs], of_inputs))
    return found


def _at(label: str, labels: Sequence[str], variable: Any, may_broadcast: bool) -> Placement:
    """Return an input's sharding along the axis with a label; ``Replicate`` if it is broadcast there."""
    if label not in labels or (may_broadcast and variable.broadcastable[labels.index(label)]):
        return Replicate()
    return Shard(labels.index(label))


@register_sharding(ops.Dot)
def _dot(node: Any) -> str | list[AcceptableSharding]:
    a, b = node.inputs
    if not (1 <= a.ndim <= 2 and 1 <= b.ndim <= 2):
        return "its factors are not vectors and matrices"
    of_a, of_b = ("k", "ik")[a.ndim - 1], ("k", "kj")[b.ndim - 1]
    return _product(node, [of_a, of_b], [(of_a + of_b).replace("k", "")])


@register_sharding(ops.BatchedDot)
def _batched_dot(node: Any) -> str | list[AcceptableSharding]:
    a, b = node.inputs
    if not (2 <= a.ndim <= 3 and 2 <= b.ndim <= 3) or a.broadcastable[0] != b.broadcastable[0]:
        return "its factors are not stacks of as many vectors and matrices"
    of_a, of_b = ("bk", "bik")[a.ndim - 2], ("bk", "bkj")[b.ndim - 2]
    return _product(node, [of_a, of_b], ["b" + (of_a[1:] + of_b[1:]).replace("k", "")])


@register_sharding(ops.Blockwise)
def _blockwise(node: Any) -> list[AcceptableSharding]:
    """Shard a Blockwise along its batch axes, which are labelled by numbers.

    A Blockwise of a matrix product can also be sharded along the axes of the matrices, as other products. Equations
    with several right-hand sides can be solved for each of them.
    """
    op, batch = node.op, list(map(str, range(node.op.batch_ndim(node))))
    if type(op.core_op) is ops.Dot:
        return _product(node, [[*batch, "i", "k"], [*batch, "k", "j"]], [[*batch, "i", "j"]])
    if isinstance(op.core_op, ops.SolveBase) and op.core_op.b_ndim == 2:
        sides = [*batch, "inside", "side"]
        return _product(node, [[*batch, "inside", "inside"], sides], [sides])
    inside = [[*batch, *["inside"] * (one.ndim - len(batch))] for one in (*node.inputs, *node.outputs)]
    return _product(node, inside[: len(node.inputs)], inside[len(node.inputs) :])


@register_sharding(ops.SparseDot, ops.StructuredDot)
def _sparse_dot(node: Any) -> list[AcceptableSharding]:
    """Shard the dense factor along its outer axis; sparse matrices are replicated."""
    found: list[AcceptableSharding] = []
    for place, dense in enumerate(node.inputs):
        if _n_axes(dense) == 2:
            of_inputs: list[Placement] = [Replicate(), Replicate()]
            of_inputs[place] = Shard(place)
            found.append(([Shard(place)], of_inputs))
    return found


@register_sharding(ops.StructuredDotGradCSC, ops.StructuredDotGradCSR)
def _sparse_values(node: Any) -> list[AcceptableSharding]:
    """Shard the gradient for the values of a sparse matrix, which sums over the columns of both factors."""
    return [([Partial()], [*[Replicate()] * (len(node.inputs) - 2), Shard(1), Shard(1)])]


# -- softmax and cross-entropy


def _softmax(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    """Keep the placement of the input; replace a softmax that sums over rows by its inner graph, if it has one."""
    shard = propagation.shard_of(node.inputs)
    if shard is None:
        return propagation.computed_replicated(node)
    if shard.axis not in ops.softmax_axes(node):
        return placed(node, [propagation.new(node.inputs[0])], shard)
    return inner_graph(propagation, node) if ops.inner_outputs(node.op) else "it sums over rows"


RULES.update({ops.Softmax: _softmax, ops.LogSoftmax: _softmax})


@register_sharding(ops.SoftmaxGrad, ops.CrossentropyCategorical1Hot, ops.CrossentropyCategorical1HotGrad)
def _row_by_row(node: Any) -> list[AcceptableSharding]:
    return [([Shard(0)] * len(node.outputs), [Shard(0)] * len(node.inputs))]


@register_sharding(ops.SoftmaxWithBias, ops.CrossentropySoftmaxArgmax1HotWithBias)
def _row_by_row_with_bias(node: Any) -> list[AcceptableSharding]:
    return [([Shard(0)] * len(node.outputs), [Shard(0), Replicate(), *[Shard(0)] * (len(node.inputs) - 2)])]


def _gradient_with_bias(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    """Shard the gradient of a cross-entropy. At run time it broadcasts its first input if that has length 1."""
    shard = propagation.shard_of(node.inputs)
    if shard is None:
        return propagation.computed_replicated(node)
    if shard.axis != 0 or any(one.ndim and one.broadcastable[0] for one in node.inputs):
        return "it is not sharded along axis 0, or an input has a single row"
    inputs = [propagation.sharded(one, shard, broadcasts=i == 0) for i, one in enumerate(node.inputs)]
    return placed(node, inputs, shard)


RULES[ops.CrossentropySoftmax1HotWithBiasDx] = _gradient_with_bias


# -- convolution and pooling


def _of_any_batch(node: Any, inputs: Sequence[Any]) -> Any:
    """Apply a convolution to a shard of the images, ignoring the number of images that its ``imshp`` may state."""
    op = node.op
    if op.imshp is not None:
        op = copy.copy(op)
        op.imshp = (None, *op.imshp[1:])
    return op.make_node(*inputs).outputs[0]


def _convolve(image: int) -> Rule:
    """Return the rule of a convolution, or of its gradient for images; the images are the input at a position."""

    def rule(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
        images, others = node.inputs[image], [*node.inputs[:image], *node.inputs[image + 1 :]]
        shard = propagation.placement(images)
        if not isinstance(shard, Shard) or shard.axis != 0 or propagation.shard_of(others):
            return "an input other than the images is sharded"
        inputs = list(map(propagation.replicated, others))
        inputs.insert(image, propagation.new(images))
        return [Placed(_of_any_batch(node, inputs), shard)]

    return rule


def _weights(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    images, gradient, *shape = node.inputs
    shard = propagation.shard_of([images, gradient])
    if shard is None or shard.axis != 0 or propagation.shard_of(shape) or not can_reduce(node.outputs[0]):
        return "it is sharded along another axis than that of the images"
    if images.broadcastable[0] or gradient.broadcastable[0]:
        return "a single image"
    here = [propagation.sharded(one, shard) for one in (images, gradient)]
    return [Placed(_of_any_batch(node, [*here, *map(propagation.replicated, shape)]), Partial())]


def _pool(n_images: int) -> ShardingRule:
    """Return the rule of pooling or a gradient of it, whose first ``n_images`` inputs are images."""

    def rule(node: Any) -> list[AcceptableSharding]:
        others = [Replicate()] * (len(node.inputs) - n_images)
        axes = range(node.inputs[0].ndim - node.op.ndim)  # the batch axes, before the pooled axes
        return [([Shard(axis)] * len(node.outputs), [*[Shard(axis)] * n_images, *others]) for axis in axes]

    return rule


RULES.update(
    {
        **dict.fromkeys((ops.AbstractConv2d, ops.AbstractConv3d), _convolve(0)),
        **dict.fromkeys((ops.AbstractConv2d_gradInputs, ops.AbstractConv3d_gradInputs), _convolve(1)),
        **dict.fromkeys((ops.AbstractConv2d_gradWeights, ops.AbstractConv3d_gradWeights), _weights),
    }
)
register_sharding(ops.Pool)(_pool(1))
register_sharding(ops.AveragePoolGrad, ops.MaxPoolRop)(_pool(2))
register_sharding(ops.MaxPoolGrad, ops.DownsampleFactorMaxGradGrad)(_pool(3))
