"""Exact functions on real ranks, beside the serial program."""

import functools

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T
from support import assert_close
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk

N = 11


def close(actual, expected):
    assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def parameters(seed=0):
    rng = np.random.RandomState(seed)
    return [theano.shared(rng.randn(*shape) * 0.3) for shape in ((6, 5), (5,), (5, 3), (3,))]


def values(n, seed=1):
    rng = np.random.RandomState(seed)
    mask = (rng.rand(n) < 0.6) * 1.0
    mask[n // 2 :] = 0  # all of some ranks' rows
    mask[0] = 1
    return rng.randn(n, 6), rng.randint(0, 3, n).astype("int32"), mask


def network(params):
    """A net with batch normalisation, and a masked loss; returns inputs, outputs and updates."""
    x, y, mask = T.dmatrix("x"), T.ivector("y"), T.dvector("mask")
    w, b, v, c = params
    h = x.dot(w)
    h = T.nnet.relu((h - h.mean(0, keepdims=True)) / T.sqrt(h.var(0, keepdims=True) + 1e-4) + b)
    out = T.nnet.softmax(h.dot(v) + c)
    nll = -T.log(out[T.arange(y.shape[0]), y])
    loss = (mask * nll).sum() / mask.sum() + 1e-3 * sum((p**2).sum() for p in params) + 1e-3 * out.std()
    gradients = lasagne.updates.total_norm_constraint(T.grad(loss, params), 0.5)
    updates = lasagne.updates.adam(gradients, params, 0.01)
    return [x, y, mask], [loss, T.eq(out.argmax(1), y).mean(), out, out.max(0), nll, out.T], updates


@functools.cache
def networks():
    ours, theirs = parameters(), parameters()
    inputs, outputs, updates = network(ours)
    function = synk.function(inputs, outputs, updates=updates, exact=True)
    inputs, outputs, reference = network(theirs)
    return function, list(updates), theano.function(inputs, outputs, updates=reference), list(reference)


@pytest.mark.parametrize("n", [N, 37, 2, 1])
def test_a_net_trained_by_adam(session, n):
    function, ours, reference, theirs = networks()
    for mine, other in zip(ours, theirs):
        mine.set_value(other.get_value())
    synk.broadcast(ours)
    for seed in range(3):
        given = values(n, seed)
        for got, expected in zip(function(*given), reference(*given)):
            assert got.shape == expected.shape
            close(got, expected)
    for mine, other in zip(ours, theirs):
        close(mine.get_value(), other.get_value())
    assert not synk.check_replicas()


def draws(streams):
    x, w = T.dmatrix("x"), theano.shared(np.full((6, 2), 0.1))
    mask = streams.binomial(size=x.shape, p=0.5, dtype="float64")
    noise = streams.normal(size=(x.shape[0], 2), dtype="float64")
    rows = streams.uniform(size=(3,), dtype="float64")
    loss = ((x * mask).dot(w) + noise).mean() + rows.sum()
    return [x], [loss, mask, noise, rows], [(w, w - T.grad(loss, w))]


@functools.cache
def drawing(kind):
    make = {"shared": RandomStreams, "mrg": MRG_RandomStreams}[kind]
    ours, theirs = draws(make(5)), draws(make(5))
    return synk.function(*ours[:2], updates=ours[2], exact=True), theano.function(*theirs[:2], updates=theirs[2])


@pytest.mark.parametrize("kind", ["shared", "mrg"])
@pytest.mark.parametrize("n", [N, 2])
def test_draws_are_those_of_the_serial_program(session, kind, n):
    function, reference = drawing(kind)
    for seed in range(2):
        x = values(n, seed)[0]
        for got, expected in zip(function(x), reference(x)):
            close(got, expected)


def test_a_stream_is_for_exact_functions_or_for_others(session):
    x = T.dmatrix("x")
    for one, other in ((True, False), (False, True)):
        drawn = x * RandomStreams(3).uniform(x.shape)
        synk.function([x], drawn, exact=one)
        with pytest.raises(ValueError, match="make a RandomStreams for each kind"):
            synk.function([x], drawn, exact=other)
