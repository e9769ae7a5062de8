"""Batch normalisation in exact functions: serial values, few collectives, and Theano's precision or better."""

import functools

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import theano_only
from comparison import close
from theano.tensor.nnet import bn

import synkhronos as synk
from synkhronos._backends.theano import batchnorm as normalization

pytestmark = theano_only("batch normalisation as one operation")

N = 13
SHAPES = {"per-activation": (N, 6), "spatial": (N, 3, 4, 5)}


def parts(kind, dtype="float64"):
    """Return the inputs, and all outputs and gradients of batch normalisation."""
    shape = SHAPES[kind]
    x, weights = [T.TensorType(dtype, (False,) * len(shape))(name) for name in ("x", "weights")]
    axes = (0,) if kind == "per-activation" else (0, 2, 3)
    own = [n for axis, n in enumerate(shape) if axis not in axes]
    scale, bias, mean, variance = (
        theano.shared(np.random.RandomState(place).rand(*own).astype(dtype) + 0.5, name)
        for place, name in enumerate(("scale", "bias", "mean", "variance"))
    )
    found = bn.batch_normalization_train(x, scale, bias, kind, 1e-4, 0.1, mean, variance)
    loss = (T.tanh(found[0]) * weights).sum()
    return [x, weights], [loss, *found, *T.grad(loss, [x, scale, bias])]


@functools.cache
def made(kind):
    """Return an exact function and a serial one."""
    inputs, outputs = parts(kind)
    return synk.function(inputs, outputs, exact=True), theano.function(inputs, outputs)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_numbers_are_those_of_serial_theano(session, kind):
    exact, serial = made(kind)
    rng = np.random.RandomState(1)
    shape = SHAPES[kind][1:]
    for n in (N, 1, 2):
        for mean in (0, 1e4):
            x, weights = mean + rng.randn(n, *shape), rng.randn(n, *shape)
            tolerance = 1e-9 if mean == 0 else 1e-7
            close(exact(x, weights), serial(x, weights), tolerance, tolerance)


def test_a_layer_needs_two_exchanges_forward_and_one_back(two):
    for kind in SHAPES:
        inputs, (_, y, *_, dx, dscale, dbias) = parts(kind)
        for outputs, n in ((y, 2), ([dx, dscale, dbias], 3)):
            mode = theano.Mode("py", "fast_run")
            partition = synk.function(inputs, outputs, exact=True, mode=mode, on_unused_input="ignore").partition
            assert {one.collective for one in partition} == {"all-reduce (sum)"}
            assert len({one.meeting for one in partition}) == n


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_large_mean_costs_no_more_precision_than_in_theano(kind, dtype):
    """Errors are measured against a computation in long double."""
    shape = (200, *SHAPES[kind][1:])
    rng = np.random.RandomState(2)
    x, dy = (rng.randn(*shape) + 1e4).astype(dtype), (rng.randn(*shape) + 0.3).astype(dtype)
    axes = (0,) if kind == "per-activation" else (0, 2, 3)
    own = [1 if axis in axes else n for axis, n in enumerate(shape)]
    scale, bias = (rng.rand(*own).astype(dtype) + 0.5 for _ in range(2))
    variables = [T.TensorType(dtype, (False,) * len(shape))(name) for name in ("x", "dy")]
    fixed = [T.TensorType(dtype, tuple(n == 1 for n in own))(name) for name in ("scale", "bias")]
    forward = bn.AbstractBatchNormTrain(axes)(variables[0], *fixed, 1e-4)
    backward = bn.AbstractBatchNormTrainGrad(axes)(*variables, fixed[0], *forward[1:], 1e-4)
    theanos = [
        *bn.local_abstract_batch_norm_train.transform(forward[0].owner),
        *bn.local_abstract_batch_norm_train_grad.transform(backward[0].owner),
    ]
    ours = [*normalization.outputs(forward[0].owner), *normalization.gradients(backward[0].owner)]
    assert [one.type for one in ours] == [one.type for one in (*forward, *backward)]
    function = theano.function([*variables, *fixed], [*ours, *theanos])
    results = function(x, dy, scale, bias)
    for ours, theanos, exact in zip(results, results[6:], in_long_double(x, dy, scale, bias, axes)):
        errors = [np.abs(one - exact).max() for one in (ours, theanos)]
        assert errors[0] <= 2 * errors[1] + 10 * np.finfo(dtype).eps * np.abs(exact).max(), errors


def in_long_double(*arguments):
    """Compute batch normalisation and its gradient with NumPy, in long double."""
    *arrays, axes = arguments
    x, dy, scale, bias = (one.astype(np.longdouble) for one in arrays)
    mean = x.mean(axes, keepdims=True)
    d = x - mean
    inverse = 1 / np.sqrt((d**2).mean(axes, keepdims=True) + np.longdouble(np.asarray(1e-4, arrays[0].dtype)))
    slope = (dy * d).mean(axes, keepdims=True) * inverse**2
    dx = scale * inverse * (dy - dy.mean(axes, keepdims=True) - d * slope)
    sums = (dy * d * inverse).sum(axes, keepdims=True), dy.sum(axes, keepdims=True)
    return [d * inverse * scale + bias, mean, inverse, dx, *sums]


def test_a_gradient_with_another_mean_is_theanos():
    x, dy = T.dmatrices("x", "dy")
    row = T.drow("row")
    own = bn.AbstractBatchNormTrainGrad((0,))(x, dy, row, row, row, 1e-4)
    function = theano.function([x, dy, row], normalization.gradients(own[0].owner))
    rng = np.random.RandomState(3)
    x, dy, row = rng.randn(7, 3), rng.randn(7, 3), rng.rand(1, 3)
    c = dy * row - (x - row) * (dy * (x - row)).mean(0) * row**3
    np.testing.assert_allclose(function(x, dy, row)[0], row * (c - c.mean(0)))
