"""Pooling by vector code: bitwise equal to Theano's own code, which is used in other cases."""

import itertools
import re

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import cpp_codes, theano_only
from theano.tensor.signal import pool

pytestmark = [theano_only("Theano's pooling, in vector code"), pytest.mark.usefixtures("optimized")]

SWITCH = "vector_pooling"

MODES = ("max", "sum", "average_inc_pad", "average_exc_pad")
FLOATS = ("float32", "float64")

#: For each dtype: windows, values of ``ignore_border``, and modes.
CASES = {
    "float32": ([(2, 2)], [True, False], MODES),
    "float64": ([(1, 2, 3)], [True, False], ["max", "average_exc_pad"]),
    "int8": ([(3, 2)], [False], ["max", "sum", "average_inc_pad"]),
    "uint64": ([(3,)], [True, False], ["max", "average_inc_pad"]),
}


def pooled(x, window, ignore_border, mode, **options):
    return pool.Pool(ndim=len(window), ignore_border=ignore_border, mode=mode)(x, window, **options)


def everything(dtype):
    """Return a function of all cases; for floats, with gradients and second derivatives."""
    x, u, outputs = T.TensorType(dtype, (False,) * 4)("x"), T.TensorType(dtype, (False,) * 4)("u"), []
    for window, ignore_border, mode in itertools.product(*CASES[dtype]):
        y = pooled(x, window, ignore_border, mode)
        outputs.append(y)
        if dtype in FLOATS:
            gradient = T.grad((y * T.sin(y)).sum(), x)
            outputs += [gradient, T.grad((gradient * u).sum(), x)]
    return theano.function([x, u], outputs, on_unused_input="ignore")


def values(rng, shape, dtype):
    """Draw few distinct values, so that windows have ties; for floats also NaN and zeros of both signs."""
    array = rng.randint(0, 3, shape).astype(dtype) if dtype.startswith("u") else rng.randint(-3, 3, shape).astype(dtype)
    if dtype in FLOATS:
        array[rng.rand(*shape) < 0.3] *= 0.37
        array[rng.rand(*shape) < 0.2] = -0.0
        array[rng.rand(*shape) < 0.05] = np.nan
    return array


@pytest.mark.parametrize("dtype", CASES)
def test_the_bits_are_those_of_theanos_own_code(dtype, on_and_off):
    ours, theanos = on_and_off(lambda: everything(dtype))
    rng = np.random.RandomState(0)
    for turn in range(60):
        n, c, h, w = rng.randint(1, 4), rng.randint(1, 4), rng.randint(3, 20), rng.randint(5, 40)
        x, u = values(rng, (n, c, h, w), dtype), values(rng, (n, c, h, w), dtype)
        if turn % 3 == 1:  # other strides
            x, u = (np.asfortranarray(array) for array in (x, u))
        for got, expected in zip(ours(x, u), theanos(x, u)):
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize(("ignore_border", "mode"), [(True, "max"), (False, "average_exc_pad")])
def test_small_and_empty_images(on_and_off, ignore_border, mode):
    x = T.tensor4("x", "float64")
    y = pooled(x, (2, 3), ignore_border, mode)
    functions = on_and_off(lambda: theano.function([x], [y, T.grad(y.sum(), x)]))
    for shape in ((2, 2, 1, 1), (1, 1, 2, 2), (2, 1, 1, 7), (0, 2, 4, 6), (2, 0, 4, 6)):
        for got, expected in zip(*(function(np.ones(shape)) for function in functions)):
            assert np.array_equal(got, expected)


def code_of(function):
    """Return the C++ code of each pooling operation of a function."""
    names = ("Pool", "MaxPoolGrad", "AveragePoolGrad", "DownsampleFactorMaxGradGrad")
    return list(cpp_codes(function, lambda node: type(node.op).__name__ in names).values())


CALL = re.compile(r"synkhronos::Pooling<dtype_V\d+, \d+, \d+, \d+>::(\w+)")


def test_supported_windows_use_the_vector_code():
    x = T.tensor4("x")
    y = pool.pool_2d(x, (2, 2), ignore_border=True)
    gradient = T.grad((y**2).sum(), x)
    function = theano.function([x], [y, gradient, T.grad((gradient * x).sum(), x)])
    assert {CALL.search(code)[1] for code in code_of(function)} == {"max", "max_grad", "max_grad_grad"}


@pytest.mark.parametrize("what", ["stride", "padding", "variable", "half", "off", "large"])
def test_unsupported_cases_use_theanos_code(what, switch):
    switch(what != "off")
    x = T.tensor4("x") if what != "half" else T.TensorType("float16", (False,) * 4)("x")
    options = {"stride": {"stride": (1, 1)}, "padding": {"pad": (1, 1)}}.get(what, {})
    window = {"variable": T.lvector("window"), "large": (20, 20)}.get(what, (2, 2))
    inputs = [window] if what == "variable" else []
    y = pool.Pool(ndim=2, ignore_border=True, mode="max")(x, window, **options)
    function = theano.function([x, *inputs], [y, T.grad(y.sum(), x)], mode=theano.Mode("cvm", None))
    if what != "half":  # Theano has no C code for float16
        assert not any(CALL.search(code) for code in code_of(function))
    given = np.random.RandomState(0).rand(2, 3, 20, 40).astype(x.dtype)
    got, gradient = function(given, *([[2, 2]] * len(inputs)))
    step = 1 if what == "stride" else 2
    if what not in ("padding", "large"):
        corners = [given[:, :, i : 19 + i : step, j : 39 + j : step] for i in (0, 1) for j in (0, 1)]
        assert np.array_equal(got, np.maximum.reduce(corners))
    assert gradient.sum() >= got.size
