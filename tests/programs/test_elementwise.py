"""Elementwise operations by vector code: what Theano's own loop gives, but for products and sums that gcc fuses."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from engine import theano_only

pytestmark = theano_only("Theano's elementwise operations, in vector code")


@pytest.fixture
def vector_elementwise(monkeypatch):
    """Turn the vector code on or off for what is compiled from now on."""
    return lambda is_on: monkeypatch.setattr(theano.config.synkhronos, "vector_elementwise", is_on)


def expressions(dtype):
    """What update rules and activations compute: of three vectors, a number, and a matrix."""
    p, m, v = [T.TensorType(dtype, (False,))(name) for name in "pmv"]
    a, x = T.TensorType(dtype, ())("a"), T.TensorType(dtype, (False, False))("x")
    outputs = [p - a * m / (T.sqrt(v) + 1e-8), a * m + (1 - a) * p**2, x * p + a, T.maximum(x, 0) - a * x, T.neq(p, m)]
    return theano.function([p, m, v, a, x], outputs, allow_input_downcast=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_the_values_are_those_of_theanos_own_code(dtype, vector_elementwise):
    functions = []
    for is_on in (True, False):
        vector_elementwise(is_on)
        functions.append(expressions(dtype))
    ours, theanos = functions
    rng = np.random.RandomState(0)
    for n in (0, 1, 7, 16, 1003):
        vectors = [(rng.rand(2 * n) * 100).astype(dtype) for _ in range(3)]
        x = (rng.randn(5, n) * 100).astype(dtype)
        for step in (1, 2):
            p, m, v = [vector[: n * step : step] for vector in vectors]
            for rows in (x, np.asfortranarray(x), x[::-1]):
                got, expected = ours(p, m, v, 3, rows), theanos(p, m, v, 3, rows)
                for one, other in zip(got, expected):
                    assert one.dtype == other.dtype
                    eps = 0 if dtype == "int32" else np.finfo(dtype).eps
                    np.testing.assert_allclose(one, other, rtol=4 * eps, atol=4 * eps * 1e4)


def test_the_switch_gives_the_compiler_its_flag(vector_elementwise):
    op, flags = T.Elemwise(theano.scalar.add), []
    for is_on in (True, False):
        vector_elementwise(is_on)
        flags.append(op.c_compile_args())
    assert flags == [["-fno-guess-branch-probability"], []]
