"""Convolutions, pooling and their gradients: images are the rows, filters are whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from synkhronos._backends import ops
from synkhronos._exact.placements import Partial, Placed, Shard
from synkhronos._exact.rules.reductions import is_summed
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _of_any_batch(node: Any, inputs: Sequence[Any]) -> Any:
    """The output of a convolution's Op, which may have been told how many images there are."""
    op = node.op
    if op.imshp is not None:
        op = copy.copy(op)
        op.imshp = (None, *op.imshp[1:])
    return op.make_node(*inputs).outputs[0]


def _convolve(image: int, kernel: int) -> Rule:
    """The rule of a convolution, or of its gradient for images, of which the inputs have these places."""

    def rule(walk: Walk, node: Any) -> str | Sequence[Placed]:
        shard = walk.placement(node.inputs[image])
        if not isinstance(shard, Shard) or shard.axis != 0 or walk.shard_of([node.inputs[kernel], *node.inputs[2:]]):
            return "it is not the images alone that have rows"
        inputs = [walk.new(one) if i == image else walk.whole(one) for i, one in enumerate(node.inputs)]
        return [Placed(_of_any_batch(node, inputs), shard)]

    return rule


def _weights(walk: Walk, node: Any) -> str | Sequence[Placed]:
    images, gradient, *shape = node.inputs
    shard = walk.shard_of([images, gradient])
    if shard is None or shard.axis != 0 or walk.shard_of(shape) or not is_summed(node.outputs[0]):
        return "its rows are no images"
    if images.broadcastable[0] or gradient.broadcastable[0]:
        return "a single image"
    inputs = [walk.part(images, shard), walk.part(gradient, shard), *map(walk.whole, shape)]
    return [Placed(_of_any_batch(node, inputs), Partial())]


def _pool(n_images: int) -> Rule:
    """The rule of pooling and its gradients, of which the first inputs are images."""

    def rule(walk: Walk, node: Any) -> str | Sequence[Placed]:
        images, others = node.inputs[:n_images], node.inputs[n_images:]
        shard = walk.shard_of(images)
        if shard is None or shard.axis >= images[0].ndim - node.op.ndim or walk.shard_of(others):
            return "its rows do not lie beside the images"
        if any(one.broadcastable[shard.axis] for one in images):
            return "a single image"
        inputs = [*(walk.part(one, shard) for one in images), *map(walk.whole, others)]
        return [Placed(output, shard) for output in node.clone_with_new_inputs(inputs).outputs]

    return rule


RULES: dict[type, Rule] = {
    **dict.fromkeys((ops.AbstractConv2d, ops.AbstractConv3d), _convolve(0, 1)),
    **dict.fromkeys((ops.AbstractConv2d_gradInputs, ops.AbstractConv3d_gradInputs), _convolve(1, 0)),
    **dict.fromkeys((ops.AbstractConv2d_gradWeights, ops.AbstractConv3d_gradWeights), _weights),
    ops.Pool: _pool(1),
    ops.AveragePoolGrad: _pool(2),
    ops.MaxPoolGrad: _pool(3),
    ops.DownsampleFactorMaxGradGrad: _pool(3),
    ops.MaxPoolRop: _pool(2),
}
