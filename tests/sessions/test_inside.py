"""Collectives inside a function: what comes of them, and their gradients, beside the serial program."""

import functools

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import assert_close, shares

import synkhronos as synk

N = 11
OPS = {"avg": np.mean, "sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


def rows(n=N):
    rng = np.random.RandomState(3)
    return rng.randn(n, 3), rng.randn(n)


def close(actual, expected):
    assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@functools.lru_cache(maxsize=None)
def each_op(ndim):
    """A function of one input whose outputs are the reductions of its sum over rows, as each rank has them."""
    x = T.TensorType("float64", (False,) * ndim)("x")
    value = x.sum(axis=0)
    return synk.function([x], [(synk.reduced(value, op).dimshuffle("x", *range(ndim - 1)), "gather") for op in OPS])


@pytest.mark.parametrize("ndim", [1, 3])
def test_reductions(session, ndim):
    data = np.random.RandomState(0).randn(*(N, 2, 3)[:ndim])
    values = [data[start:stop].sum(axis=0) for start, stop in shares(N, session)]
    weights = [stop - start for start, stop in shares(N, session)]
    for (op, reduce), found in zip(OPS.items(), each_op(ndim)(data)):
        expected = np.average(values, axis=0, weights=weights) if op == "avg" else reduce(values, axis=0)
        assert found.shape == (session, *expected.shape)
        assert all(np.array_equal(one, found[0]) for one in found)
        close(found[0], expected)
