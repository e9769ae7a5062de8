"""Elementwise operations by vector code: results equal those of Theano's loop, up to fused multiply-adds."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import cpp_codes, theano_only

pytestmark = [theano_only("Theano's elementwise operations, in vector code"), pytest.mark.usefixtures("optimized")]

SWITCH = "vector_elementwise"


def expressions(dtype):
    """Return a function of expressions from update rules and activations on vectors, a number and a matrix."""
    p, m, v = [T.TensorType(dtype, (False,))(name) for name in "pmv"]
    a, x = T.TensorType(dtype, ())("a"), T.TensorType(dtype, (False, False))("x")
    outputs = [p - a * m / (T.sqrt(v) + 1e-8), a * m + (1 - a) * p**2, x * p + a, T.maximum(x, 0) - a * x, T.neq(p, m)]
    return theano.function([p, m, v, a, x], outputs, allow_input_downcast=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_the_values_are_those_of_theanos_own_code(dtype, on_and_off):
    ours, theanos = on_and_off(lambda: expressions(dtype))
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


def test_the_switch_gives_the_compiler_its_flag(on_and_off):
    assert on_and_off(T.Elemwise(theano.scalar.add).c_compile_args) == (["-fno-guess-branch-probability"], [])


def broadcast(dtype):
    """Return functions with arrays that are broadcast along some axes, the second one in place."""
    kept = ((0, 1, 2, 3), (1,), (0,), (3,), ())  # they are broadcast along all other axes
    patterns = [[axis not in axes for axis in range(4)] for axes in kept]
    x, channel, row, column, number = [T.TensorType(dtype, pattern)(name) for name, pattern in zip("xcrdn", patterns)]
    outputs = [(x - channel) * channel + number, x * row + channel * column, x * column - number * row, channel * row]
    outputs.append(T.switch(T.gt(x, channel), row, x * number))
    in_place = theano.function([theano.In(x, mutable=True), channel], x * channel + channel)
    return theano.function([x, channel, row, column, number], outputs), in_place


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_arrays_that_are_broadcast(dtype, on_and_off, switch):
    (ours, ours_in_place), (theanos, _) = on_and_off(lambda: broadcast(dtype))
    for function, is_on in ((ours, True), (theanos, False)):
        switch(is_on)
        codes = cpp_codes(function, lambda node: isinstance(node.op, T.Elemwise))
        assert any("synkhronos::side_by_side(" in code for code in codes.values()) == is_on
    destroys = [node.op.destroy_map for node in ours_in_place.maker.fgraph.toposort()]
    assert {0: [0]} in destroys
    rng = np.random.RandomState(0)
    for shape in ((2, 3, 4, 5), (3, 2, 1, 70), (1, 1, 1, 1), (2, 3, 1, 2), (0, 2, 3, 4), (3, 0, 2, 2)):
        n, c, _, w = shape
        lengths = [shape, (1, c, 1, 1), (n, 1, 1, 1), (1, 1, 1, w), (1, 1, 1, 1)]
        given = [(rng.randn(*length) * 10).astype(dtype) for length in lengths]
        x = given[0]
        for rows in (x, np.asfortranarray(x), x[:, :, ::-1], np.repeat(x, 2, 3)[..., ::2], np.repeat(x, 2, 1)[:, ::2]):
            for got, expected in zip(ours(rows, *given[1:]), theanos(rows, *given[1:])):
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                eps = 0 if dtype == "int16" else np.finfo(dtype).eps
                np.testing.assert_allclose(got, expected, rtol=4 * eps, atol=4 * eps * 1e3)
            expected = rows * given[1] + given[1]
            np.testing.assert_allclose(ours_in_place(rows.copy("K"), given[1]), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="Input dimension mis-match"):
        ours(np.ones((2, 3, 4, 5), dtype), *[np.ones(one, dtype) for one in ((1, 2, 1, 1), (2, 1, 1, 1))], *given[3:])
