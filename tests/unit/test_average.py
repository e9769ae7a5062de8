"""Averages by the compiled reductions, compared with exact fractions: correct wherever the result is representable."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synkhronos._collectives import Accumulator, combine
from synkhronos._native import native

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("bool", "int8", "uint8", "int32", "int64", "uint64")
WEIGHTS = ([1, 1, 1], [3, 1, 2], [0, 5, 2], [1e308] * 3, [1e308, 1.0, 0.0], [5e-324] * 3, [0.1, 0.7, 0.3], [0, 0, 0])
WEIGHTS += ([2**40 + 1, 2**41, 3], [1e-40, 1.0, 1e-320], [0, 0, 4], [0.5, 1.5, 2.0])


def average(weights, values, returned=None):
    """Return the weighted mean of arrays as a new array."""
    mean = np.empty(values[0].shape, returned or values[0].dtype)
    native.Reduction("avg", values[0].dtype, mean.dtype, weights)(values, [mean])
    return mean


def exact_mean(values, weights):
    """Return the mean of each element as a fraction."""
    weights = [Fraction(weight) for weight in (weights if any(weights) else [1] * len(weights))]
    total = sum(weights)
    return [
        sum(weight * Fraction(one.item() + 0) for weight, one in zip(weights, column) if weight) / total
        for column in zip(*values)
    ]


def check_floats(mean, values, weights):
    for got, wanted, column in zip(mean, exact_mean(values, weights), zip(*values)):
        used = [abs(one.item()) for one, weight in zip(column, weights) if weight or not any(weights)]
        tolerance = 4 * np.finfo(mean.dtype).eps * max(used) + np.finfo(mean.dtype).tiny * np.finfo(mean.dtype).eps
        assert np.isfinite(got)
        assert abs(Fraction(got.item()) - wanted) <= Fraction(float(tolerance))


def check_integers(mean, values, weights):
    whole = all(float(weight).is_integer() for weight in weights) and sum(weights) < 2**31
    for got, wanted, column in zip(mean, exact_mean(values, weights), zip(*values)):
        if mean.dtype.kind == "f":
            largest = abs(wanted) if whole else max(abs(int(one)) for one in column)
            assert abs(Fraction(got.item()) - wanted) <= largest * Fraction(2**-51)
        else:
            assert int(got) == (round(wanted) if mean.dtype.kind != "b" else bool(round(wanted)))


def extremes(dtype):
    """Return the extreme values of a dtype, and values between them."""
    if np.dtype(dtype).kind == "f":
        info = np.finfo(dtype)
        least = info.tiny * info.eps
        values = [0, 1, -1, 1 / 3, info.max, -info.max, info.max / 2, info.max * 0.75, info.tiny, least, -least]
    elif dtype == "bool":
        values = [0, 1]
    else:
        info = np.iinfo(dtype)
        values = [info.max, info.min, info.max - 1, info.min + 1, info.max // 2, info.max // 2 + 1, 0, 1, 2, 3]
    return np.array(values, dtype)


def triples(dtype):
    """Return three arrays with all combinations of three extreme values."""
    values = extremes(dtype)
    return [grid.reshape(-1) for grid in np.meshgrid(values, values, values)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_averages_of_floats_of_any_size(dtype, weights):
    values = triples(dtype)
    mean = average(weights, values)
    check_floats(mean, values, weights)


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_averages_of_integers_are_exact(dtype, weights, returned):
    values = triples(dtype)
    mean = average(weights, values, "float64" if returned else dtype)
    check_integers(mean, values, weights)


@given(st.data(), st.sampled_from(["int64", "uint64", "int16"]), st.integers(1, 6))
def test_averages_of_drawn_integers_are_exact(data, dtype, n):
    info = np.iinfo(dtype)
    values = data.draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=n, max_size=n))
    weights = data.draw(st.lists(st.integers(0, 2**31 // n - 1), min_size=n, max_size=n))
    values = [np.array([value], dtype) for value in values]
    for wanted in (dtype, "float64"):
        check_integers(average(weights, values, wanted), values, weights)


@pytest.mark.parametrize("dtype", FLOATS)
def test_not_finite_operands_give_what_they_should(dtype):
    largest, inf, nan = np.finfo(dtype).max, np.inf, np.nan
    columns = [
        ((largest, largest, -inf), -inf),
        ((inf, largest, largest), inf),
        ((inf, -inf, largest), nan),
        ((nan, largest, largest), nan),
        ((largest, largest, 0), largest / 3 * 2),
        ((1, 2, 3), 2),
    ]
    values = np.array([column for column, _ in columns], dtype).T.copy()
    wanted = np.array([mean for _, mean in columns], dtype)
    np.testing.assert_allclose(average([1, 1, 1], list(values)), wanted, rtol=2e-3)
    left_out = average([1, 1, 0], [values[0], values[0], np.full(6, nan, dtype)])
    np.testing.assert_array_equal(left_out, values[0])


def test_complex_numbers_are_averaged_by_their_parts():
    values = [np.array([3e38 + 1j, 1 - 3e38j], "complex64"), np.array([3e38 + 3j, 3 - 3e38j], "complex64")]
    np.testing.assert_allclose(average([1, 1], values), [3e38 + 2j, 2 - 3e38j])


@pytest.mark.parametrize("own", [0, 1, 2])
def test_an_overflow_in_place_starts_from_the_operands_again(own):
    values = [np.array([1, 3e38, 1.5], "float32"), np.array([3, 3.2e38, 2.5], "float32"), np.ones(3, "float32")]
    native.Reduction("avg", "float32", "float32", [1, 1, 1])(values, [values[own]])
    np.testing.assert_allclose(values[own], [5 / 3, 6.2e38 / 3, 5 / 3], rtol=1e-6)


@pytest.mark.parametrize("weights", [[1, 1, 1], [3, 1, 2]], ids=str)
def test_finite_elements_next_to_an_overflow_stay_the_same_to_the_bit(weights):
    random = np.random.RandomState(0)
    values = [random.randn(1000).astype("float32") for _ in range(3)]
    plain = average(weights, values)
    for value in values:
        value[500] = 3e38
    overflowing = average(weights, values)
    assert overflowing[500] == pytest.approx(3e38)
    np.testing.assert_array_equal(np.delete(overflowing, 500), np.delete(plain, 500))


@pytest.mark.parametrize("weights", [*WEIGHTS, [1e308, 1e-308], [7]], ids=str)
def test_normalized_weights_sum_to_one(weights):
    shares = native.normalized(weights)
    assert sum(shares) == pytest.approx(1)
    assert [share > 0 for share in shares] == [weight > 0 or not any(weights) for weight in weights]


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 1, 2], [70, 30, 1]], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_accumulated_slices_are_averaged_as_exactly(dtype, counts):
    values = triples(dtype)
    kept = None if np.dtype(dtype).kind != "i" else np.dtype(dtype)
    for wanted in {None, kept}:
        accumulator = Accumulator("avg", sum(counts), "it", wanted)
        for value, count in zip(values, counts):
            accumulator.add(value, count)
        mean = accumulator.result()
        assert mean.dtype == (wanted or ("float64" if np.dtype(dtype).kind in "iub" else dtype))
        (check_floats if np.dtype(dtype).kind == "f" else check_integers)(mean, values, counts)


@pytest.mark.parametrize("op", ["sum", "prod"])
def test_accumulated_slices_of_half_precision_are_rounded_once(op):
    values = [(np.random.RandomState(k).randn(500) * 3).astype("float16") for k in range(6)]
    accumulator = Accumulator(op, 6, "it")
    for value in values:
        accumulator.add(value, 1)
    expected = getattr(np.stack(values).astype("float32"), op)(0).astype("float16")
    np.testing.assert_array_equal(accumulator.result(), expected)
    np.testing.assert_array_equal(combine(values, op, (), "it"), expected)


@pytest.mark.parametrize("value", [np.float32(3e38), np.int64(2**62 + 1), np.float16(65504), np.uint64(2**64 - 1)])
def test_scalars_keep_their_shape(value):
    mean = combine([value, value], "avg", (1, 1), "it")
    accumulator = Accumulator("avg", 5, "it")
    accumulator.add(value, 3)
    accumulator.add(value, 2)
    for one in (mean, accumulator.result()):
        assert one.shape == ()
        assert one == pytest.approx(float(value), rel=1e-6)


def test_sums_of_shares_are_bounded_where_only_rounding_overflows():
    most = np.finfo("float32").max
    sums = np.array([most, -most, np.inf, 1], "float32")
    native.add_to_sums(sums, np.array([most, -most, 2, 2], "float32"), 0.5)
    np.testing.assert_array_equal(sums, np.array([most, -most, np.inf, 2], "float32"))
