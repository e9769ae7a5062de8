"""Batch normalisation as expressions that go over the large arrays as seldom as can be.

What is subtracted from an array is subtracted again wherever the difference is needed, inside of the operation that
needs it: that costs less than to write an array of differences and to read it. Theano's own expressions are taken
where the types are others than those of networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import theano.tensor as T
from theano import config, scalar
from theano.tensor.elemwise import Elemwise
from theano.tensor.nnet import bn

__all__ = ["gradients", "outputs"]


def outputs(node: Any) -> Any:
    """The outputs of an AbstractBatchNormTrain, of two sums over rows: the mean, and the variance around it."""
    if not _is_usual(node):
        return bn.local_abstract_batch_norm_train.transform(node)
    x, scale, bias, epsilon, factor, *running = node.inputs
    axes = node.op.axes
    mean = _per_place(T.sum(x, axes, keepdims=True), x, axes)
    variance = _per_place(T.sum(_in_one_pass(_square, x, mean), axes, keepdims=True), x, axes)
    inverse = T.inv(T.sqrt(variance + T.cast(epsilon, x.dtype)))
    found = [_in_one_pass(_scaled, x, mean, scale * inverse, bias), mean, inverse]
    if running:
        n = T.cast(T.prod(x.shape) / T.prod(scale.shape), x.dtype)
        parts = (mean, n / (n - 1) * variance)
        factor = T.cast(factor, x.dtype)
        found += [old * (1.0 - factor) + part * factor for old, part in zip(running, parts)]
    return _typed(found, node)


def gradients(node: Any) -> Any:
    """The outputs of an AbstractBatchNormTrainGrad, of two sums over rows that are met for at once.

    With d = x - mean, s = 1 / std and means over n places, Theano's expression is

        dx = scale * (c - mean(c)),  c = dy * s - d * s^3 * mean(dy * d)

    The mean of d is 0, so that mean(c) = s * mean(dy): no sum is needed for it.
    """
    if not _is_usual(node) or not _is_mean(node):
        return bn.local_abstract_batch_norm_train_grad.transform(node)
    x, dy, scale, mean, inverse, _ = node.inputs
    axes = node.op.axes
    bias_gradient = T.sum(dy, axes, keepdims=True)
    product = T.sum(_in_one_pass(_product, x, mean, dy), axes, keepdims=True)
    means = _per_place(bias_gradient, x, axes), _per_place(product, x, axes)
    dx = _in_one_pass(_gradient, x, mean, dy, scale * inverse, means[0], means[1] * T.sqr(inverse))
    return _typed([dx, product * inverse, bias_gradient], node)


def _square(x: Any, mean: Any) -> Any:
    return scalar.sqr(x - mean)


def _scaled(x: Any, mean: Any, scale: Any, bias: Any) -> Any:
    return (x - mean) * scale + bias


def _product(x: Any, mean: Any, dy: Any) -> Any:
    return dy * (x - mean)


def _gradient(x: Any, mean: Any, dy: Any, scale: Any, mean_dy: Any, slope: Any) -> Any:
    return scale * (dy - mean_dy - (x - mean) * slope)


def _in_one_pass(expression: Callable[..., Any], *arrays: Any) -> Any:
    """One elementwise operation, which Theano's rewrites leave as it is."""
    inputs = [scalar.get_scalar_type(one.dtype)() for one in arrays]
    return Elemwise(scalar.Composite(inputs, [expression(*inputs)]))(*arrays)


def _per_place(sum_: Any, x: Any, axes: Sequence[int]) -> Any:
    """A sum by the lengths that it is over, one after the other, as Theano's means are made."""
    lengths = T.cast(x.shape, x.dtype)
    for axis in axes:
        sum_ = T.true_div(sum_, lengths[axis])
    return sum_


def _is_usual(node: Any) -> bool:
    """Whether all are arrays in memory of a dtype that networks have, axes are counted from 0, and there is g++.

    In Python, Theano computes what is made of several operations element by element.
    """
    dtypes = {one.dtype for one in node.inputs if one.ndim}
    return (
        bool(config.cxx)
        and all(type(one.type) is T.TensorType for one in node.inputs)
        and dtypes in ({"float32"}, {"float64"})
        and set(node.op.axes) <= set(range(node.inputs[0].ndim))
    )


def _is_mean(node: Any) -> bool:
    """Whether the mean that a gradient is given is that of its ``x``, as it is wherever Theano takes gradients."""
    x, _, _, mean, *_ = node.inputs
    forward = mean.owner
    return (
        forward is not None
        and isinstance(forward.op, bn.AbstractBatchNormTrain)
        and forward.inputs[0] is x
        and forward.outputs[1] is mean
        and forward.op.axes == node.op.axes
    )


def _typed(found: Sequence[Any], node: Any) -> list[Any]:
    """With the broadcastable axes of a node's outputs."""
    return [T.patternbroadcast(one, output.broadcastable) for one, output in zip(found, node.outputs)]
