"""Reductions of shared variables: every op and dtype on every number of ranks, compared with NumPy."""

import functools
from fractions import Fraction

import numpy as np
import pytest
from backend import T, theano
from collective_values import DTYPES, check_equal_on_all_ranks, close, draw_values, expected_of, get, put
from hypothesis import given
from hypothesis import strategies as st

import synkhronos as synk
from synkhronos._native import native


@pytest.mark.parametrize("op", ["avg", "sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(session, var_of, dtype, op):
    var = var_of(dtype, 2)
    for shape in ((0, 3), (1, 1), (7, 5), (211, 103)):
        values = draw_values(dtype, shape, session)
        put(var, values)
        assert synk.all_reduce(var, op=op) is None
        check_equal_on_all_ranks(var, expected_of(values, op), session)


@pytest.mark.parametrize("op", ["avg", "sum", "prod"])
def test_half_precision_is_rounded_once(session, var_of, op):
    """Sums of float16 are computed in float32: small terms count, and partial sums may exceed float16's range."""
    var = var_of("float16", 1)
    values = [(np.random.RandomState(rank).randn(1000) * 5).astype("float16") for rank in range(session)]
    values[0][:2], values[-1][:2] = 60_000, [-60_000, 1]
    for value in values[1:-1]:
        value[:2] = [60_000, 1 / 3]
    wide = np.stack(values).astype("float32")
    expected = {"sum": wide.sum, "avg": wide.mean, "prod": wide.prod}[op](0).astype("float16")
    put(var, values)
    np.testing.assert_array_equal(synk.reduce(var, op=op, in_place=False), expected)
    synk.all_reduce(var, op=op)
    np.testing.assert_equal(get(var, session), [expected] * session)


@pytest.mark.parametrize("op", ["avg", "sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int64"])
def test_reductions_of_scalars(session, var_of, dtype, op):
    var = var_of(dtype, 0)
    values = draw_values(dtype, (), session)
    put(var, values)
    expected = expected_of(values, op)
    assert synk.reduce(var, op=op, in_place=False) == pytest.approx(
        np.mean(values) if op == "avg" else getattr(np, op)(values), rel=1e-6
    )
    synk.all_reduce(var, op=op)
    check_equal_on_all_ranks(var, expected, session)
    put(var, values)
    synk.reduce(var, op=op)
    assert var.get_value() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int8"])
def test_all_reduce_of_more_than_fits_into_a_staging_buffer(session, var_of, dtype):
    var = var_of(dtype, 1)
    capacity = native.STAGING_BYTES // np.dtype(dtype).itemsize
    for length in (capacity - 1, capacity, capacity + 1, 5 * capacity + 17):
        values = draw_values(dtype, (length,), session, seed=length)
        for op in ("sum", "avg"):
            put(var, values)
            synk.all_reduce(var, op=op)
            check_equal_on_all_ranks(var, expected_of(values, op), session)


def extreme_values(dtype, length, n_ranks):
    """Return values of all ranks whose sum overflows but whose mean does not, and the mean of the first 30."""
    if dtype == "int64":
        values = [np.full(length, 2**62 + rank) for rank in range(n_ranks)]
        values[0][::3] = -(2**62)
        total = sum(value.astype(object) for value in values)
        return values, np.array([round(Fraction(int(one), n_ranks)) for one in total[:30]], dtype)
    largest = np.finfo(dtype).max
    values = [np.full(length, largest * (0.9 if rank % 2 else 0.7), dtype) for rank in range(n_ranks)]
    for rank, value in enumerate(values):
        value[::3] = rank
    return values, (sum(value[:30].astype("longdouble") / n_ranks for value in values)).astype(dtype)


@pytest.mark.parametrize("way", ["staged", "direct"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
def test_averages_whose_sum_overflows(session, var_of, dtype, way):
    var = var_of(dtype, 1)
    length = 1500 if way == "staged" else (native.SMALLEST_BLOCK * 5 // np.dtype(dtype).itemsize) // 30 * 30 + 30
    values, expected = extreme_values(dtype, length, session)
    weights = [1e308] * session, [2] * session, None
    for each in weights if way == "staged" else weights[:1]:
        put(var, values)
        synk.all_reduce(var, weights=each)
        results = get(var, session)
        for result in results:
            close_to(result[:30], expected)
            close_to(result[-30:], expected)  # another rank reduced these
            assert result.tobytes() == results[0].tobytes()
    if way == "staged":
        put(var, values)
        close_to(synk.reduce(var, in_place=False)[:30], expected)
        put(var, values)
        synk.reduce(var)
        close_to(var.get_value()[:30], expected)


def close_to(result, expected):
    if result.dtype.kind == "i":
        np.testing.assert_array_equal(result, expected)
    else:
        rtol = 4e-3 if result.dtype == "float16" else 1e-6
        np.testing.assert_allclose(result, expected, rtol=rtol, atol=0.5 * (expected.dtype.kind == "i"))


@given(
    lengths=st.lists(st.sampled_from([0, 1, 3, 1000, 33_000, 66_000, 140_001]), min_size=1, max_size=6),
    op=st.sampled_from(["avg", "sum", "max"]),
)
def test_lists_of_variables_of_any_size(session, var_of, lengths, op):
    dtypes = ["float64", "float32", "int8"]
    variables = [var_of(dtypes[i % 3], 1, f"_{i}") for i in range(len(lengths))]
    each = [draw_values(dtypes[i % 3], (length,), session, seed=i) for i, length in enumerate(lengths)]
    for var, values in zip(variables, each):
        put(var, values)
    synk.all_reduce(variables, op=op)
    for var, values in zip(variables, each):
        check_equal_on_all_ranks(var, expected_of(values, op), session)


@pytest.mark.parametrize("op", ["avg", "sum", "max", "min"])
def test_nan_and_infinity_go_through(session, var_of, op):
    var = var_of("float32", 1)
    values = draw_values("float32", (50,), session)
    values[0][:3] = [np.nan, np.inf, -np.inf]
    values[-1][3:6] = [np.inf, np.nan, -np.inf]
    values[0][6] = np.inf
    values[-1][6] = -np.inf
    put(var, values)
    synk.all_reduce(var, op=op)
    with np.errstate(invalid="ignore"):
        expected = expected_of(values, op)
    check_equal_on_all_ranks(var, expected, session)


@given(data=st.data())
def test_weights(session, var_of, data):
    weight = st.sampled_from([0, 0, 1, 2, 0.5, 7])
    weights = data.draw(st.lists(weight, min_size=session, max_size=session).filter(any))
    dtype = data.draw(st.sampled_from(["float32", "float64", "int32"]))
    length = data.draw(st.sampled_from([1, 5, 40_001]))
    var = var_of(dtype, 1)
    values = draw_values(dtype, (length,), session)
    if dtype != "int32":
        for value, weight in zip(values, weights):
            if not weight:
                value[:] = np.nan
    put(var, values)
    synk.all_reduce(var, weights=data.draw(st.sampled_from([tuple, list, np.array]))(weights))
    expected = expected_of(values, "avg", weights)
    if dtype == "int32":  # halves may be rounded up or down
        assert np.abs(synk.gather(var) - expected).max() <= 1
    else:
        check_equal_on_all_ranks(var, expected, session)


FOR_EACH = "one for each rank"


@pytest.mark.parametrize(
    ("weights", "op", "words"),
    [([1] * 9, "avg", FOR_EACH), ([1], "sum", ""), ([np.nan], "avg", ""), ([-1], "avg", ""), ([0], "avg", "")],
)
def test_wrong_weights(session, var_of, weights, op, words):
    var = var_of("float32", 1)
    put(var, [np.full(3, rank, "float32") for rank in range(session)])
    with pytest.raises(ValueError, match=words or "weights"):
        synk.all_reduce(var, op=op, weights=weights * (session if len(weights) == 1 else 1))
    assert synk.gather(var)[:, 0].tolist() == list(range(session))


def test_integer_averages_without_a_fraction_are_exact(session, var_of):
    var = var_of("int64", 1)
    value = np.array([2**63 - 1, -(2**63), 2**53 + 1, -(2**53) - 1])
    put(var, [value] * session)
    synk.all_reduce(var)
    check_equal_on_all_ranks(var, value, session)


@pytest.mark.parametrize("layout", ["fortran", "strided", "read-only"])
def test_values_of_other_memory_layouts(session, var_of, layout):
    var = var_of("float32", 2)
    values = draw_values("float32", (60, 41), session)
    put(var, values)
    mine = {
        "fortran": np.asfortranarray(values[0]),
        "strided": np.repeat(values[0], 2, axis=1)[:, ::2],
        "read-only": values[0].copy(),
    }[layout]
    mine.flags.writeable = layout != "read-only"
    for op in ("sum", "avg"):
        put(var, values)
        var.set_value(mine, borrow=True)
        synk.all_reduce(var, op=op)
        check_equal_on_all_ranks(var, expected_of(values, op), session)
    np.testing.assert_array_equal(synk.reduce(var, op="max", in_place=False), get(var, session)[0])
    if layout != "read-only":
        put(var, values)
        var.set_value(mine, borrow=True)
        synk.broadcast(var)
        np.testing.assert_equal(get(var, session), [mine] * session)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_unequal_shapes_are_named_and_nothing_changes(session, var_of):
    one, two = var_of("float32", 1), var_of("float32", 2)
    for odd in range(session):
        ones = [np.full(3, rank, "float32") for rank in range(session)]
        twos = [np.full((2, 3 + (rank == odd)), rank, "float32") for rank in range(session)]
        put(one, ones)
        put(two, twos)
        calls = [(synk.all_reduce, {}), (synk.reduce, {}), (synk.reduce, {"in_place": False})]
        for call, options in [*calls, (synk.gather, {}), (synk.all_gather, {})] * 3:
            with pytest.raises(ValueError, match=rf"float32_2.*\(2, {4 if odd == 0 else 3}\)"):
                call([one, two], **options)
        np.testing.assert_equal([get(one, session), get(two, session)], [ones, twos])
        synk.all_reduce(one, op="sum")
        assert get(one, session)[odd].tolist() == [sum(range(session))] * 3


@pytest.mark.parametrize("op", ["avg", "sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce(session, var_of, dtype, op):
    var = var_of(dtype, 2)
    values = draw_values(dtype, (7, 5), session)
    put(var, values)
    returned = synk.reduce(var, op=op, in_place=False)
    np.testing.assert_equal(get(var, session), values)
    if op == "avg":
        wide = np.mean(np.stack(values), axis=0, dtype="complex128" if dtype == "complex64" else "float64")
    elif np.dtype(dtype).kind in "iub" and op in ("sum", "prod"):
        wide = getattr(np, op)(np.stack(values), axis=0)
    else:
        wide = expected_of(values, op)
    assert returned.dtype == (wide.dtype if np.dtype(dtype).kind in "iub" else np.dtype(dtype))
    close(returned, wide.astype(returned.dtype))

    assert synk.reduce([var], op=op) is None
    results = get(var, session)
    expected = np.rint(wide).astype(dtype) if np.dtype(dtype).kind in "iub" and op == "avg" else wide.astype(dtype)
    assert results[0].dtype == dtype
    close(results[0], expected)
    np.testing.assert_equal(results[1:], values[1:])


@functools.cache
def transposing():
    """Return a function that stores its inputs transposed, in Fortran order, and the variables that hold them."""
    m, cube = T.dmatrix("m"), T.dtensor3("cube")
    transposed, turned = theano.shared(np.zeros((1, 1)), "transposed"), theano.shared(np.zeros((1, 1, 1)), "turned")
    updates = [(transposed, m.T), (turned, cube.dimshuffle(2, 1, 0))]
    return synk.function([], bcast_inputs=[m, cube], updates=updates), transposed, turned


@pytest.mark.parametrize("side", [2, 300])  # through staging buffers, and in place
def test_values_in_another_order_of_memory_are_reduced_in_place(session, side):
    store, transposed, turned = transposing()
    synk.distribute()
    rng = np.random.RandomState(side)
    matrix, cube = rng.randint(0, 9, (side, side)) * 1.0, rng.randint(0, 9, (side, side, 2)) * 1.0
    expected = [matrix.T * session, cube.T * session]
    for others in ("alike", "in C's order", "in part"):
        store(matrix, cube)
        values = [var.get_value(borrow=True, return_internal_type=True) for var in (transposed, turned)]
        assert not any(value.flags.c_contiguous for value in values)
        if others != "alike" and session > 1:
            synk.set_value(session - 1, transposed, np.zeros((1, 1)))  # another shape needs a new array
            synk.set_value(session - 1, transposed, matrix.T)
            if others == "in C's order":
                synk.set_value(session - 1, turned, np.zeros((1, 1, 1)))
                synk.set_value(session - 1, turned, cube.T)
        synk.all_reduce([transposed, turned], op="sum")
        for var, value, right in zip((transposed, turned), values, expected):
            np.testing.assert_array_equal(synk.gather(var), [right] * session)
            assert var.get_value(borrow=True, return_internal_type=True) is value
            np.testing.assert_array_equal(value, right)
    if session > 1:
        synk.set_value(1, transposed, np.zeros((side, side + 1)))
        with pytest.raises(ValueError, match="transposed has the shapes"):
            synk.all_reduce([transposed, turned])
