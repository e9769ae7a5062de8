"""Sums by vector code: bitwise equal to Theano's over rows, equal up to rounding over contiguous elements."""

import itertools

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import cpp_codes, theano_only

pytestmark = [theano_only("Theano's sums, in vector code"), pytest.mark.usefixtures("optimized")]

SWITCH = "vector_sum"

AXES = [axes for n in range(1, 5) for axes in itertools.combinations(range(4), n)]


def all_sums(dtype, **options):
    """Return a function of the sums over each subset of axes."""
    x = T.TensorType(dtype, (False,) * 4)("x")
    return theano.function([x], [x.sum(axis=axes, **options) for axes in AXES])


def codes_of(function):
    """Return the C++ code of each sum of a function, by its axes."""
    codes = cpp_codes(function, lambda node: isinstance(node.op, T.elemwise.Sum))
    return {node.op.axis: code for node, code in codes.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_sums_are_those_of_theanos_own_code(dtype, on_and_off):
    ours, theanos = on_and_off(lambda: all_sums(dtype))
    rng = np.random.RandomState(0)
    empty = [(0, 2, 3, 1), (2, 0, 2, 2)]
    for shape in [(2, 3, 4, 5), (40, 1, 1, 7), (1, 1, 1, 1), (3, 20, 17, 16), (7, 1, 33, 2), *empty]:
        whole, wide = rng.randint(-99, 99, shape).astype(dtype), rng.randn(*shape).astype(dtype) * 1e3
        for turn, x in enumerate((whole, wide, np.asfortranarray(wide), wide[:, :, ::-1])):
            for axes, got, expected in zip(AXES, ours(x), theanos(x)):
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                over_rows = axes == tuple(range(len(axes))) and axes[-1] < 3
                if turn == 0 or over_rows:
                    assert got.tobytes() == expected.tobytes()
                else:
                    error = np.sqrt(x.size) * np.finfo(dtype).eps * np.abs(x).astype("float64").sum(axis=axes)
                    assert (np.abs(got.astype("float64") - expected) <= error).all()


def test_values_that_are_not_finite():
    x = np.ones((2, 3, 4, 40), "float32")
    x[0, 1, 2, 39], x[1, 2, 3, 3] = np.nan, -np.inf
    for axes, got in zip(AXES, all_sums("float32")(x)):
        assert np.array_equal(got, x.sum(axis=axes), equal_nan=True)


def test_neighbouring_axes_of_floats_take_the_vector_code(switch):
    for function in (all_sums("float32"), all_sums("float64"), all_sums("float32", acc_dtype="float32")):
        for axes, code in codes_of(function).items():
            kept = [axis for axis in range(4) if axes is not None and axis not in axes]
            suits = kept == list(range(kept[0], kept[-1] + 1)) if kept else True
            assert ("synkhronos::Sums<" in code) == suits
    assert not any("synkhronos::Sums<" in code for code in codes_of(all_sums("int32")).values())
    switch(False)
    assert not any("synkhronos::Sums" in code for code in codes_of(all_sums("float32")).values())
