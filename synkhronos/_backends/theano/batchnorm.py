"""Expressions for batch normalization with few passes over the large arrays.

Differences from the mean are not stored. Each operation that needs them subtracts again, which costs less than to write
and read an array of differences. For types that networks do not use, Theano's own expressions are returned.
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
    """Express the outputs of an AbstractBatchNormTrain by two sums over rows, for the mean and the variance."""
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
    """Express the outputs of an AbstractBatchNormTrainGrad by two sums over rows, which one collective can reduce.

    With d = x - mean, s = 1 / std and means over the normalized axes, Theano's expression is

        dx = scale * (c - mean(c)),  c = dy * s - d * s^3 * mean(dy * d)

    The mean of d is 0, so mean(c) = s * mean(dy), which needs no sum of its own.
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
    """Apply a scalar expression to arrays as one elementwise operation, which Theano's rewrites do not change."""
    inputs = [scalar.get_scalar_type(one.dtype)() for one in arrays]
    return Elemwise(scalar.Composite(inputs, [expression(*inputs)]))(*arrays)


def _per_place(sum_: Any, x: Any, axes: Sequence[int]) -> Any:
    """Divide a sum by the lengths of the summed axes, one after the other, as Theano computes means."""
    lengths = T.cast(x.shape, x.dtype)
    for axis in axes:
        sum_ = T.true_div(sum_, lengths[axis])
    return sum_


def _is_usual(node: Any) -> bool:
    """Return whether this module's expressions can be used: for CPU arrays of one float dtype and non-negative axes.

    They also need g++, because without it Theano computes fused operations element by element in Python.
    """
    dtypes = {one.dtype for one in node.inputs if one.ndim}
    return (
        bool(config.cxx)
        and all(type(one.type) is T.TensorType for one in node.inputs)
        and dtypes in ({"float32"}, {"float64"})
        and set(node.op.axes) <= set(range(node.inputs[0].ndim))
    )


def _is_mean(node: Any) -> bool:
    """Return whether the mean passed to a gradient is the mean of its ``x``, as in gradients that Theano derives."""
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
    """Return the expressions with the broadcast patterns of an Apply node's outputs."""
    return [T.patternbroadcast(one, output.broadcastable) for one, output in zip(found, node.outputs)]
