"""Sums fused with elementwise operations: results equal NumPy's wherever Theano fuses."""

import itertools
import pickle
import types

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import theano_only
from theano.compile.debugmode import DebugMode

pytestmark = [theano_only("Theano's sums of elementwise operations, fused"), pytest.mark.usefixtures("optimized")]

SWITCH = "fused_sum"

FIXED = {  # broadcast pattern of each input
    "x": (False,) * 4,
    "y": (False,) * 4,
    "channel": (True, False, True, True),
    "row": (False, True, True, True),
    "image": (True, True, False, False),
    "number": (True,) * 4,
}
SHAPES = [(3, 2, 40, 37), (5, 4, 1, 3), (1, 1, 1, 1), (2, 3, 33, 1), (0, 2, 3, 4), (2, 0, 2, 2), (70, 1, 2, 9)]
EXPRESSIONS = [
    ("T.sqr(x)", None),
    ("T.exp(-abs(x))", (3,)),
    ("(x - channel) * y", (0, 2, 3)),
    ("T.sqr(x - channel)", (0, 2, 3)),
    ("x * row + 1", (0,)),
    ("T.tanh(x * image)", (0, 1)),
    ("x * y * number", (1, 2, 3)),
    ("row * image - channel", (2, 3)),
    ("T.switch(T.gt(x, y), x, channel)", (0, 1, 2)),
    ("T.maximum(x, 0) * y", (0, 3)),
    ("channel * channel", (1, 2, 3)),
]


def inputs_of(dtype):
    return {name: T.TensorType(dtype, fixed)(name) for name, fixed in FIXED.items()}


def fused(function):
    """Return the number of fused sums of a function."""
    return sum(isinstance(node.op, T.elemwise.SumOfElementwise) for node in function.maker.fgraph.toposort())


def sums(dtype):
    """Return a function that computes all sums."""
    inputs = inputs_of(dtype)
    outputs = [eval(text, {"T": T, **inputs}).sum(axis=axes) for text, axes in EXPRESSIONS]
    return theano.function(list(inputs.values()), outputs)


def arrays(shape, dtype, seed=0):
    rng = np.random.RandomState(seed)
    lengths = [[1 if one else n for one, n in zip(fixed, shape)] for fixed in FIXED.values()]
    return [rng.randn(*length).astype(dtype) for length in lengths]


def in_numpy(values):
    """Yield each sum computed by NumPy in float64, and the scale of its error."""
    names = dict(zip(FIXED, (value.astype("float64") for value in values)))
    functions = {"sqr": np.square, "exp": np.exp, "tanh": np.tanh, "maximum": np.maximum}
    numpy = types.SimpleNamespace(**functions, switch=np.where, gt=np.greater)
    results = [eval(text, {"T": numpy, **names}) for text, _ in EXPRESSIONS]
    for (_, axes), result in zip(EXPRESSIONS, results):
        yield result.sum(axis=axes), np.abs(result).sum(axis=axes) + result.size


@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_sums_are_numpys(dtype):
    function = sums(dtype)
    assert fused(function) == len(EXPRESSIONS)
    eps = 8 * np.finfo(dtype).eps
    for shape in SHAPES:
        values = arrays(shape, dtype)
        turned = [np.asfortranarray(value) for value in values]
        backwards = [np.ascontiguousarray(value[..., ::-1])[..., ::-1] for value in values]
        wide = [np.repeat(value, 2, axis=1)[:, ::2] for value in values]
        for given in (values, turned, backwards, wide):
            for got, (expected, scale) in zip(function(*given), in_numpy(values)):
                assert (got.dtype, got.shape) == (dtype, expected.shape)
                assert (np.abs(got - expected) <= eps * scale).all()


def test_accumulators_and_results_of_other_precision():
    x = T.fmatrix("x")
    outputs = [T.sqr(x).sum(0, acc_dtype="float32"), T.exp(x).sum(0, dtype="float64"), T.cast(x, "float64").sum(1)]
    function = theano.function([x], outputs)
    assert fused(function) == 3
    value = np.random.RandomState(0).rand(500, 7).astype("float32")
    exact = value.astype("float64")
    expected = [np.square(exact).sum(0), np.exp(exact).sum(0), exact.sum(1)]
    accuracies = [("float32", 1e-4), ("float64", 1e-6), ("float64", 1e-15)]
    for got, one, (dtype, tolerance) in zip(function(value), expected, accuracies):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, one, tolerance)
    ones = theano.function([x], T.cast(T.gt(x, 0.5), "float32").sum())(np.full((5000, 5000), 1, "float32"))
    assert ones == 25e6  # beyond 2**24, where adding 1 to a float32 has no effect


def test_values_that_are_not_finite():
    x = T.fmatrix("x")
    function = theano.function([x], [(2 * x).sum(0), T.sqr(x).sum(1), (x + 1).sum()])
    value = np.ones((3, 2000), "float32")
    value[0, 3], value[2, 1999] = np.nan, np.inf
    for got, expected in zip(function(value), [(2 * value).sum(0), (value**2).sum(1), (value + 1).sum()]):
        np.testing.assert_array_equal(got, expected)


def test_lengths_that_differ_are_theanos_error(switch):
    messages = []
    x, y = T.fmatrix("x"), T.fmatrix("y")
    for is_on in (True, False):
        switch(is_on)
        function = theano.function([x, y], (x * y).sum(0))
        assert fused(function) == is_on
        with pytest.raises(ValueError, match="Input dimension mis-match") as caught:
            function(np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))
        messages.append(str(caught.value).split("\n")[0])
    assert messages[0] == messages[1]


def test_unsupported_cases_are_left_to_theano(switch, monkeypatch):
    x, y, z = T.fmatrix("x"), T.imatrix("y"), T.TensorType("float16", (False, False))("z")
    square = T.sqr(x)
    mode = theano.Mode("py", "fast_run")
    for inputs, outputs in (
        ([x], [square, square.sum(0)]),  # the squares are an output, too
        ([x], [T.exp(x).sum(0), T.exp(x).sum(1)]),
        ([y], [(y * y).sum(0)]),
        ([z], [(z * z).sum(0)]),
        ([x], [T.cast(T.cast(x, "float16") * 2, "float32").sum(0)]),
        ([x], [T.exp(x).prod(0)]),
        ([x], [x.sum(0)]),
    ):
        assert fused(theano.function(inputs, outputs, mode=mode)) == 0
    assert fused(theano.function([x], square.sum(), mode="FAST_COMPILE")) == 0
    assert fused(theano.function([x], square.sum(), mode=mode.excluding("fusion"))) == 0
    assert fused(theano.function([x], square.sum(), mode=mode)) == 1
    switch(False)
    assert fused(theano.function([x], square.sum(), mode=mode)) == 0
    switch(True)
    monkeypatch.setattr(theano.config, "cxx", "")
    assert fused(theano.function([x], square.sum(), mode=mode)) == 0


def test_shapes_need_no_sums_and_loops_and_gradients_have_them():
    x = T.dmatrix("x")
    total = T.sqr(x).sum(0)
    assert theano.function([x], total.shape)(np.ones((2, 3))).tolist() == [3]
    assert fused(theano.function([x], total.shape)) == 0
    results, _ = theano.scan(lambda row: T.exp(row).sum(), [x])
    value = np.random.RandomState(0).randn(4, 3)
    got, slope = theano.function([x], [results, T.grad(T.sqr(T.tanh(x) + 1).sum(), x)])(value)
    np.testing.assert_allclose(got, np.exp(value).sum(1))
    np.testing.assert_allclose(slope, 2 * (np.tanh(value) + 1) * (1 - np.tanh(value) ** 2))


def test_functions_are_pickled_debugged_and_computed_in_python():
    x, c = T.dmatrix("x"), T.drow("c")
    output = T.sqr(x - c).sum(1)
    value, row = np.random.RandomState(0).randn(4, 3), np.ones((1, 3))
    expected = np.square(value - row).sum(1)
    function = theano.function([x, c], output)
    assert fused(function) == 1
    (node,) = function.maker.fgraph.toposort()[-1:]
    assert str(node.op).startswith("Sum{axis=[1], acc_dtype=float64} of Elemwise{")
    again = pickle.loads(pickle.dumps(function))
    assert fused(again) == 1
    in_python = theano.function([x, c], output, mode=theano.Mode("py", "fast_run"))
    debugged = theano.function([x, c], output, mode=DebugMode(stability_patience=1))
    for one in (function, again, in_python, debugged):
        np.testing.assert_allclose(one(value, row), expected)


def test_memory_of_results_is_used_again_and_rows_are_counted_for_any_lengths():
    x = T.dtensor3("x")
    axes = [axes for n in (1, 2, 3) for axes in itertools.combinations(range(3), n)]
    function = theano.function([x], [(x + place).sum(axis) for place, axis in enumerate(axes)])
    for shape in ((2, 3, 4), (2, 3, 4), (1024, 1, 1), (1, 1025, 2), (2, 1, 2048), (1, 5, 409), (3, 1, 1)):
        value = np.random.RandomState(0).randn(*shape)
        for place, (got, axis) in enumerate(zip(function(value), axes)):
            np.testing.assert_allclose(got, (value + place).sum(axis), 1e-12, 1e-10)
