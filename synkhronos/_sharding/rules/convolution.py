"""Sharding rules of convolution, pooling, softmax, cross-entropy and their gradients.

Images have the rows of convolutions and pooling; filters are replicated. Softmax and cross-entropy compute each row of
a matrix independently.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from synkhronos._backends import ops
from synkhronos._sharding.placements import Partial, Placed, Replicate, Shard, copied
from synkhronos._sharding.propagate import RULES, Propagation, Rule
from synkhronos._sharding.rules.identity import inner_graph
from synkhronos._sharding.rules.reductions import is_summed

__all__: list[str] = []


# -- softmax and cross-entropy


def _row_by_row(*whole: int, broadcasts: Collection[int] = ()) -> Rule:
    """Return the rule of an operation whose inputs and outputs have the rows along axis 0.

    Parameters
    ----------
    *whole : int
        Positions of inputs without rows.
    broadcasts : collection of int
        Positions of inputs that the operation broadcasts if they have length 1 at run time.
    """

    def rule(walk: Propagation, node: Any) -> str | Sequence[Placed]:
        shard = walk.shard_of(node.inputs)
        if shard is None:
            return walk.computed_whole(node)
        if shard.axis != 0 or any(not isinstance(walk.placement(node.inputs[i]), Replicate) for i in whole):
            return "its rows do not lie along axis 0"
        if any(one.ndim and one.broadcastable[0] for i, one in enumerate(node.inputs) if i not in whole):
            return "one of its inputs has a single row"
        inputs = [
            walk.new(one) if i in whole else walk.part(one, shard, broadcasts=i in broadcasts)
            for i, one in enumerate(node.inputs)
        ]
        return [Placed(output, shard) for output in copied(node, inputs)]

    return rule


def _softmax(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    """Keep the placement of a softmax; one that sums over rows is replaced by its inner graph, if it has one."""
    shard = walk.shard_of(node.inputs)
    if shard is None:
        return walk.computed_whole(node)
    if shard.axis not in ops.softmax_axes(node):
        return [Placed(copied(node, [walk.new(node.inputs[0])])[0], shard)]
    return inner_graph(walk, node) if ops.inner_outputs(node.op) else "its rows do not lie along axis 0"


RULES.update(
    {
        ops.Softmax: _softmax,
        ops.LogSoftmax: _softmax,
        ops.SoftmaxGrad: _row_by_row(),
        ops.SoftmaxWithBias: _row_by_row(1),
        ops.CrossentropyCategorical1Hot: _row_by_row(),
        ops.CrossentropyCategorical1HotGrad: _row_by_row(),
        ops.CrossentropySoftmaxArgmax1HotWithBias: _row_by_row(1),
        ops.CrossentropySoftmax1HotWithBiasDx: _row_by_row(broadcasts=(0,)),
    }
)


# -- convolution and pooling


def _of_any_batch(node: Any, inputs: Sequence[Any]) -> Any:
    """Apply a convolution to inputs with any number of images, which its ``imshp`` may fix."""
    op = node.op
    if op.imshp is not None:
        op = copy.copy(op)
        op.imshp = (None, *op.imshp[1:])
    return op.make_node(*inputs).outputs[0]


def _convolve(image: int, kernel: int) -> Rule:
    """Return the rule of a convolution, or of its gradient for images, with inputs at the given positions."""

    def rule(walk: Propagation, node: Any) -> str | Sequence[Placed]:
        shard = walk.placement(node.inputs[image])
        if not isinstance(shard, Shard) or shard.axis != 0 or walk.shard_of([node.inputs[kernel], *node.inputs[2:]]):
            return "it is not the images alone that have rows"
        inputs = [walk.new(one) if i == image else walk.whole(one) for i, one in enumerate(node.inputs)]
        return [Placed(_of_any_batch(node, inputs), shard)]

    return rule


def _weights(walk: Propagation, node: Any) -> str | Sequence[Placed]:
    images, gradient, *shape = node.inputs
    shard = walk.shard_of([images, gradient])
    if shard is None or shard.axis != 0 or walk.shard_of(shape) or not is_summed(node.outputs[0]):
        return "its rows are no images"
    if images.broadcastable[0] or gradient.broadcastable[0]:
        return "a single image"
    inputs = [walk.part(images, shard), walk.part(gradient, shard), *map(walk.whole, shape)]
    return [Placed(_of_any_batch(node, inputs), Partial())]


def _pool(n_images: int) -> Rule:
    """Return the rule of pooling or a gradient of it, whose first ``n_images`` inputs are images."""

    def rule(walk: Propagation, node: Any) -> str | Sequence[Placed]:
        images, others = node.inputs[:n_images], node.inputs[n_images:]
        shard = walk.shard_of(images)
        if shard is None or shard.axis >= images[0].ndim - node.op.ndim or walk.shard_of(others):
            return "its rows do not lie beside the images"
        if any(one.broadcastable[shard.axis] for one in images):
            return "a single image"
        inputs = [*(walk.part(one, shard) for one in images), *map(walk.whole, others)]
        return [Placed(output, shard) for output in node.clone_with_new_inputs(inputs).outputs]

    return rule


RULES.update(
    {
        **dict.fromkeys((ops.AbstractConv2d, ops.AbstractConv3d), _convolve(0, 1)),
        **dict.fromkeys((ops.AbstractConv2d_gradInputs, ops.AbstractConv3d_gradInputs), _convolve(1, 0)),
        **dict.fromkeys((ops.AbstractConv2d_gradWeights, ops.AbstractConv3d_gradWeights), _weights),
        ops.Pool: _pool(1),
        ops.AveragePoolGrad: _pool(2),
        ops.MaxPoolGrad: _pool(3),
        ops.DownsampleFactorMaxGradGrad: _pool(3),
        ops.MaxPoolRop: _pool(2),
    }
)
