"""The hyperbolic tangent without branches: how far from the true values, and at the ends of the number line."""

import numpy as np
import pytest
import theano
import theano.tensor as T

LARGEST = {"float32": 0.51, "float64": 3.0}  # errors, in units in the last place


@pytest.fixture
def vector_tanh(monkeypatch):
    """Turn the code on or off for what is compiled from now on."""
    return lambda is_on: monkeypatch.setattr(theano.config.synkhronos, "vector_tanh", is_on)


def all_magnitudes(dtype):
    """Numbers of all magnitudes, and many about those where the result is neither its argument nor 1."""
    rng = np.random.RandomState(0)
    lowest = np.finfo(dtype).minexp
    spread = np.ldexp(1 + rng.rand(100_000), rng.randint(lowest - 10, 6, 100_000))
    values = np.concatenate([spread, 10 * rng.rand(300_000), 1e-2 * rng.rand(100_000)])
    return (values * rng.choice([-1, 1], values.size)).astype(dtype)


@pytest.mark.parametrize("dtype", LARGEST)
def test_it_is_the_tangent_to_the_last_place(dtype, vector_tanh):
    vector_tanh(True)
    x = T.vector("x", dtype)
    f = theano.function([x], T.tanh(x))
    values = all_magnitudes(dtype)
    expected = np.tanh(values.astype(np.longdouble))
    got = f(values)
    assert got.dtype == dtype
    errors = np.abs(got - expected) / np.spacing(np.abs(expected).astype(dtype)).astype(np.longdouble)
    assert errors.max() <= LARGEST[dtype]
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, np.finfo(dtype).tiny / 4], dtype)
    assert np.array_equal(f(ends), np.tanh(ends), equal_nan=True)
    assert np.array_equal(np.signbit(f(ends[:4])), [False, True, False, True])


def test_in_larger_expressions_of_other_types_and_strides(vector_tanh):
    vector_tanh(True)
    x, n = T.matrix("x", "float32"), T.ivector("n")
    y = T.tanh(x[:, ::2]) * T.tanh(2 * x[:, 1::2]) + T.tanh(x[:, ::2] + 1)
    function = theano.function([x, n], [y, T.tanh(n), T.grad(y.sum(), x)])
    values = np.random.RandomState(0).randn(50, 24).astype("float32")
    even, odd = values[:, ::2].astype("float64"), values[:, 1::2].astype("float64")
    got, of_integers, gradient = function(values, np.arange(-4, 4, dtype="int32"))
    assert np.allclose(got, np.tanh(even) * np.tanh(2 * odd) + np.tanh(even + 1), rtol=1e-5, atol=1e-6)
    assert np.allclose(of_integers, np.tanh(np.arange(-4, 4)), rtol=1e-14)
    slopes = (1 - np.tanh(even) ** 2) * np.tanh(2 * odd) + 1 - np.tanh(even + 1) ** 2
    assert np.allclose(gradient[:, ::2], slopes, rtol=1e-4, atol=1e-5)


def test_what_takes_it(vector_tanh):
    def code(dtype):
        x = T.vector("x", dtype)
        (node,) = theano.function([x], T.tanh(x)).maker.fgraph.toposort()
        return theano.gof.CLinker().accept(theano.gof.FunctionGraph(node.inputs, node.outputs)).get_src_code()

    vector_tanh(True)
    assert all("synkhronos::tanh_of((npy_" in code(dtype) for dtype in ("float32", "float64", "int64"))
    vector_tanh(False)
    assert "synkhronos::" not in code("float32")
