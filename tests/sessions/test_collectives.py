"""Collectives: every op and dtype on every number of ranks, against NumPy on the values of all ranks."""

import functools
import gc
from fractions import Fraction

import numpy as np
import pytest
from backend import T, theano
from comparison import assert_close, shares
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_strategies import batches
from multinode_sessions import one_machine

import synkhronos as synk
from synkhronos._collectives import OPS
from synkhronos._core import native

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool", "complex64")
UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
TOLERANCES = {"float16": (4e-3, 4e-3), "float32": (1e-6, 1e-6), "complex64": (1e-6, 1e-6)}


_built = {}


def variable(dtype, ndim, name=""):
    """A shared variable that a function uses; one for each kind."""
    key = f"{dtype}_{ndim}{name}"
    if key not in _built:
        var = theano.shared(np.zeros((1,) * ndim, dtype), key)
        _built[key] = var, synk.function([], [(var, None)])
    synk.distribute()
    return _built[key][0]


@pytest.fixture
def var_of(session):
    """A function that gives a replicated variable of a dtype and number of dimensions."""
    return variable


def draw_values(dtype, shape, n_ranks, seed=0):
    """One array for each rank, with which no op overflows a floating dtype."""
    rng = np.random.RandomState(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return [rng.rand(*shape) > 0.4 for _ in range(n_ranks)]
    if dtype.kind in "iu":
        return [rng.randint(0 if dtype.kind == "u" else -20, 20, shape).astype(dtype) for _ in range(n_ranks)]
    values = [(0.5 + rng.rand(*shape)) * rng.choice([-1, 1], shape) for _ in range(n_ranks)]
    if dtype.kind == "c":
        values = [value + 1j * rng.rand(*shape) for value in values]
    return [np.asarray(value).astype(dtype) for value in values]


def put(var, values):
    for rank, value in enumerate(values):
        synk.set_value(rank, var, value)


def get(var, n_ranks):
    return [synk.get_value(rank, var) for rank in range(n_ranks)]


def expected_of(values, op, weights=None):
    """The reduction, computed another way, in the values' own dtype."""
    dtype = values[0].dtype
    if op != "avg":
        return functools.reduce(UFUNCS[op], values).astype(dtype)
    weights = [1.0] * len(values) if weights is None else weights
    present = [
        (value.astype("complex128" if dtype.kind == "c" else "float64"), w) for value, w in zip(values, weights) if w
    ]
    average = sum(value * weight for value, weight in present) / sum(weights)
    return np.asarray(np.rint(average) if dtype.kind in "iub" else average).astype(dtype)


def check_equal_on_all_ranks(var, expected, n_ranks):
    results = get(var, n_ranks)
    for result in results:
        assert result.dtype == expected.dtype
        close(result, expected)
        assert result.tobytes() == results[0].tobytes()


def close(result, expected):
    rtol, atol = TOLERANCES.get(str(expected.dtype), (1e-12, 1e-14))
    assert_close(result, expected, rtol=rtol, atol=atol)


# ---------------------------------------------------------------- reductions


@pytest.mark.parametrize("op", ["avg", "sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(session, var_of, dtype, op):
    ndim = 2
    var = var_of(dtype, ndim)
    for shape in ((0, 3), (1, 1), (7, 5), (211, 103)):
        values = draw_values(dtype, shape, session)
        put(var, values)
        assert synk.all_reduce(var, op=op) is None
        check_equal_on_all_ranks(var, expected_of(values, op), session)


@pytest.mark.parametrize("op", ["avg", "sum", "prod"])
def test_half_precision_is_rounded_once(session, var_of, op):
    """Small terms count next to a large one, and the sum may pass through values that float16 does not have."""
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
    for result in get(var, session):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("op", ["avg", "sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int64"])
def test_scalars_and_ranks_alone(session, var_of, dtype, op):
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
def test_all_reduce_of_more_than_fits_into_a_lane(session, var_of, dtype):
    var = var_of(dtype, 1)
    per_lane = native.LANE_BYTES // np.dtype(dtype).itemsize
    for length in (per_lane - 1, per_lane, per_lane + 1, 5 * per_lane + 17):
        values = draw_values(dtype, (length,), session, seed=length)
        for op in ("sum", "avg"):
            put(var, values)
            synk.all_reduce(var, op=op)
            check_equal_on_all_ranks(var, expected_of(values, op), session)


def extreme_values(dtype, length, n_ranks):
    """Values of all ranks whose sum overflows, and whose mean does not; and the mean."""
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


@pytest.mark.parametrize("way", ["lanes", "direct"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
def test_averages_whose_sum_overflows(session, var_of, dtype, way):
    var = var_of(dtype, 1)
    length = 1500 if way == "lanes" else (native.SMALLEST_BLOCK * 5 // np.dtype(dtype).itemsize) // 30 * 30 + 30
    values, expected = extreme_values(dtype, length, session)
    weights = [1e308] * session, [2] * session, None
    for each in weights if way == "lanes" else weights[:1]:
        put(var, values)
        synk.all_reduce(var, weights=each)
        results = get(var, session)
        for result in results:
            close_to(result[:30], expected)
            close_to(result[-30:], expected)  # the rank that reduced these is another
            assert result.tobytes() == results[0].tobytes()
    if way == "lanes":
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
    if dtype == "int32":  # halves may be rounded either way
        assert np.abs(synk.gather(var) - expected).max() <= 1
    else:
        check_equal_on_all_ranks(var, expected, session)


@pytest.mark.parametrize(
    ("weights", "op", "words"),
    [([1] * 9, "avg", "one for each rank"), (None, "avg", ""), ([-1], "avg", "weights"), ([0], "avg", "weights")],
)
def test_wrong_weights(session, var_of, weights, op, words):
    var = var_of("float32", 1)
    put(var, [np.full(3, rank, "float32") for rank in range(session)])
    if weights is None:
        with pytest.raises(ValueError, match="weights"):
            synk.all_reduce(var, op="sum", weights=[1] * session)
        with pytest.raises(ValueError, match="weights"):
            synk.all_reduce(var, weights=[float("nan")] * session)
    else:
        with pytest.raises(ValueError, match=words):
            synk.all_reduce(var, op=op, weights=weights * (session if len(weights) == 1 else 1))
    assert synk.gather(var)[:, 0].tolist() == list(range(session))


def test_integer_averages_that_are_whole_are_exact(session, var_of):
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
        for value in get(var, session):
            np.testing.assert_array_equal(value, mine)


def test_unequal_shapes_are_named_and_nothing_changes(synchronize):
    for n_ranks in (2, 3, 5):
        synchronize(n_ranks)
        one, two = variable("float32", 1), variable("float32", 2)
        for odd in range(n_ranks):
            ones = [np.full(3, rank, "float32") for rank in range(n_ranks)]
            twos = [np.full((2, 3 + (rank == odd)), rank, "float32") for rank in range(n_ranks)]
            put(one, ones)
            put(two, twos)
            calls = [(synk.all_reduce, {}), (synk.reduce, {}), (synk.reduce, {"in_place": False})]
            calls += [(synk.gather, {}), (synk.all_gather, {})]
            for call, options in calls * 3:
                with pytest.raises(ValueError, match=rf"float32_2.*\(2, {4 if odd == 0 else 3}\)"):
                    call([one, two], **options)
            for var, values in ((one, ones), (two, twos)):
                for value, expected in zip(get(var, n_ranks), values):
                    np.testing.assert_array_equal(value, expected)
            synk.all_reduce(one, op="sum")
            assert get(one, n_ranks)[odd].tolist() == [sum(range(n_ranks))] * 3


@pytest.mark.parametrize("op", ["avg", "sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce(session, var_of, dtype, op):
    var = var_of(dtype, 2)
    values = draw_values(dtype, (7, 5), session)
    put(var, values)
    returned = synk.reduce(var, op=op, in_place=False)
    for value, expected in zip(get(var, session), values):
        np.testing.assert_array_equal(value, expected)
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
    for value, unchanged in zip(results[1:], values[1:]):
        np.testing.assert_array_equal(value, unchanged)


# ---------------------------------------------------------------- moving values


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(session, var_of, dtype):
    var, other = var_of(dtype, 2), var_of(dtype, 1)
    value, more = draw_values(dtype, (3, 4), 1)[0], draw_values(dtype, (9,), 1)[0]
    put(var, draw_values(dtype, (2, 2), session, seed=1))
    var.set_value(value)
    other.set_value(more)
    assert synk.broadcast([var, other]) is None
    for on_rank, on_rank_too in zip(get(var, session), get(other, session)):
        np.testing.assert_array_equal(on_rank, value)
        np.testing.assert_array_equal(on_rank_too, more)
    synk.broadcast(var, value[::-1])
    synk.broadcast([other], [synk.data(more[::-1])])
    for on_rank, on_rank_too in zip(get(var, session), get(other, session)):
        np.testing.assert_array_equal(on_rank, value[::-1])
        np.testing.assert_array_equal(on_rank_too, more[::-1])


def test_values_are_cast_like_those_of_data(session, var_of):
    var = var_of("float32", 1)
    for value in ([1, 2], np.array([3, 4], "int8"), np.array([0.5, 1], ">f4"), (0.25, 1.5)):
        synk.broadcast(var, value)
        np.testing.assert_array_equal(synk.gather(var), np.tile(np.asarray(value, "float32"), (session, 1)))
    before = synk.gather(var)
    for wrong in (np.array([0.1, 2.0]), np.ones((2, 2), "float32"), "text", [[1], [1, 2]], 1j):
        with np.testing.suppress_warnings() as suppress, pytest.raises((TypeError, ValueError)):
            suppress.filter(Warning)
            synk.set_value(0, var, wrong)
    with pytest.raises(TypeError, match="float32_1"):
        synk.broadcast(var, synk.data(np.ones(2)))
    np.testing.assert_array_equal(synk.gather(var), before)


@pytest.mark.parametrize("nd_up", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(session, var_of, dtype, nd_up):
    var, other = var_of(dtype, 2), var_of(dtype, 1)
    values, more = draw_values(dtype, (3, 4), session), draw_values(dtype, (2,), session)
    put(var, values)
    put(other, more)
    join = np.stack if nd_up else np.concatenate
    gathered = synk.gather(var, nd_up=nd_up)
    assert gathered.dtype == dtype
    np.testing.assert_array_equal(gathered, join(values))
    one, two = synk.gather([other, var], nd_up=nd_up)
    np.testing.assert_array_equal(one, join(more))
    np.testing.assert_array_equal(two, join(values))
    synk.broadcast(var, np.zeros_like(values[0]))
    np.testing.assert_array_equal(gathered, join(values))  # it is a copy


def test_gather_and_all_gather_of_unequal_lengths(session, var_of):
    var, other = var_of("float64", 2), var_of("float64", 1)
    values = [np.full((rank % 3, 2), float(rank)) for rank in range(session)]
    more = [np.full(70_000 * (rank % 2) + 1, float(rank)) for rank in range(session)]
    put(var, values)
    put(other, more)
    np.testing.assert_array_equal(synk.gather(var, nd_up=0), np.concatenate(values))
    if session > 1:
        with pytest.raises(ValueError, match="float64_2"):
            synk.gather(var)
    assert synk.all_gather([var, other]) is None
    for _ in range(2):
        for on_rank, on_rank_too in zip(get(var, session), get(other, session)):
            np.testing.assert_array_equal(on_rank, np.concatenate(values))
            np.testing.assert_array_equal(on_rank_too, np.concatenate(more))
        put(var, values)
        synk.all_gather(var)


def test_what_cannot_be_concatenated(session, var_of):
    scalar = var_of("float64", 0)
    with pytest.raises(ValueError, match="float64_0"):
        synk.gather(scalar, nd_up=0)
    with pytest.raises(ValueError, match="float64_0"):
        synk.all_gather(scalar)
    assert synk.gather(scalar).shape == (session,)
    for nd_up in (2, -1, None, True):
        with pytest.raises((TypeError, ValueError), match="nd_up"):
            synk.gather(scalar, nd_up=nd_up)


def test_broadcastable_axes_keep_their_length(session):
    row = theano.shared(np.ones((1, 3)), "row", broadcastable=(True, False))
    used = synk.function([], [(row, None)])
    used()
    if session > 1:
        with pytest.raises(ValueError, match="row"):
            synk.all_gather(row)
        with pytest.raises(ValueError, match="row"):
            synk.scatter(row, np.ones((session, 3)))
    with pytest.raises(ValueError, match="row"):
        synk.broadcast(row, np.ones((2, 3)))
    synk.broadcast(row, np.full((1, 4), 2.0))
    assert synk.gather(row, nd_up=0).tolist() == [[2.0] * 4] * session
    synk.all_reduce(row, op="sum")
    assert synk.gather(row, nd_up=0).tolist() == [[2.0 * session] * 4] * session


@given(data=st.data(), n=st.integers(0, 20), as_data=st.booleans())
def test_scatter(session, var_of, data, n, as_data):
    var, other = var_of("float32", 2), var_of("int32", 1)
    x, y = np.random.RandomState(n).rand(n, 3).astype("float32"), np.arange(n, dtype="int32")
    batch, index = data.draw(batches(n))
    synk.scatter([var, other], [synk.data(x), synk.data(y)] if as_data else [x, y.tolist() if n else y], batch=batch)
    rows = np.arange(n)[index]
    for rank, (start, stop) in enumerate(shares(len(rows), session)):
        np.testing.assert_array_equal(synk.get_value(rank, var), x[rows[start:stop]])
        np.testing.assert_array_equal(synk.get_value(rank, other), y[rows[start:stop]])
    assert synk.get_lengths(other) == [stop - start for start, stop in shares(len(rows), session)]


def test_scattered_memory_is_the_variables_own(session, var_of):
    var = var_of("float32", 1)
    x = synk.data(np.arange(2.0 * session, dtype="float32"))
    synk.scatter(var, x)
    x[:] = -1
    assert synk.gather(var, nd_up=0).tolist() == list(range(2 * session))


@pytest.mark.parametrize(
    ("values", "batch", "error"),
    [
        (np.ones(3, "float32"), 4, ValueError),
        (np.ones(3, "float32"), [3], IndexError),
        (np.ones(3, "float32"), slice(0, 4), IndexError),
        (np.ones((3, 1), "float32"), None, TypeError),
        (np.ones(3), None, TypeError),
        (np.float32(3), None, (TypeError, ValueError)),
    ],
)
def test_a_wrong_scatter_changes_nothing(session, var_of, values, batch, error):
    var = var_of("float32", 1)
    put(var, [np.full(2, rank, "float32") for rank in range(session)])
    with pytest.raises(error):
        synk.scatter(var, values, batch=batch)
    assert synk.gather(var)[:, 0].tolist() == list(range(session))


def test_set_and_get_value(session, var_of):
    var, other = var_of("float32", 2), var_of("int64", 0)
    synk.broadcast([var, other], [np.zeros((1, 1), "float32"), 0])
    for rank in range(session):
        assert synk.set_value(rank, [var, other], [np.full((rank, 2), rank, "float32"), rank]) is None
    for rank in range(session):
        value, number = synk.get_value(rank, [var, other])
        np.testing.assert_array_equal(value, np.full((rank, 2), rank, "float32"))
        assert number == rank
    assert var.get_value().shape == (0, 2)
    rows = np.arange(12, dtype="float32").reshape(6, 2)
    synk.set_value(session - 1, var, rows, batch=[4, 0, 0])
    np.testing.assert_array_equal(synk.get_value(session - 1, var), rows[[4, 0, 0]])
    synk.set_value(session - 1, var, synk.data(rows), batch=slice(None, None, -2))
    np.testing.assert_array_equal(synk.get_value(session - 1, var), rows[::-2])
    own = synk.get_value(0, other)
    own[...] = 77
    assert synk.get_value(0, other) == 0
    for rank in (session, -1):
        with pytest.raises(ValueError, match="rank"):
            synk.get_value(rank, var)
        with pytest.raises(ValueError, match="rank"):
            synk.set_value(rank, var, rows)
    for rank in (0.0, "0", None, True):
        with pytest.raises(TypeError, match="rank"):
            synk.get_value(rank, var)


def test_shapes_and_lengths(session, var_of):
    var, other, scalar = var_of("float32", 2), var_of("float32", 1), var_of("float32", 0)
    put(var, [np.zeros((rank, 3), "float32") for rank in range(session)])
    put(other, [np.zeros(5, "float32")] * session)
    shapes = [(rank, 3) for rank in range(session)]
    assert synk.get_shapes(var) == shapes
    assert synk.get_shapes([other, var, scalar]) == [[(5,)] * session, shapes, [()] * session]
    assert synk.get_lengths(var) == list(range(session))
    assert synk.get_lengths([var, other]) == [list(range(session)), [5] * session]
    with pytest.raises(ValueError, match="float32_0"):
        synk.get_lengths(scalar)


CALLS = {
    "broadcast": lambda var: synk.broadcast(var),
    "scatter": lambda var: synk.scatter(var, [1.0]),
    "gather": lambda var: synk.gather(var),
    "all_gather": lambda var: synk.all_gather(var),
    "reduce": lambda var: synk.reduce(var),
    "all_reduce": lambda var: synk.all_reduce(var),
    "set_value": lambda var: synk.set_value(0, var, [1.0]),
    "get_value": lambda var: synk.get_value(0, var),
    "get_lengths": lambda var: synk.get_lengths(var),
    "get_shapes": lambda var: synk.get_shapes(var),
}


@pytest.mark.parametrize("name", CALLS)
def test_variables_that_no_function_uses(synchronize, name):
    synchronize(2)
    unknown = theano.shared(np.zeros(1), "unknown")
    if name in ("broadcast", "scatter", "set_value"):  # the ranks get it
        CALLS[name](unknown)
        assert len(synk.get_lengths(unknown)) == 2
    else:
        with pytest.raises(ValueError, match=rf"{name}.*unknown"):
            CALLS[name](unknown)
    for wrong in (T.dvector("symbol"), "text", None, 3, [], [theano.shared(object(), "generic")]):
        with pytest.raises((TypeError, ValueError)):
            CALLS[name](wrong)


def test_variables_are_set_before_between_and_after_functions_use_them(session):
    x, w = T.dvector("x"), theano.shared(np.zeros(2), "w")
    synk.broadcast(w, [1.0, 2.0])
    assert w.get_value().tolist() == [1, 2]
    assert synk.gather(w).tolist() == [[1, 2]] * session
    synk.set_value(session - 1, w, [3.0, 4.0])
    function = synk.function([x], [((x * w.sum()), "gather")])
    expected = [3.0] * (session - 1) + [7.0]
    assert function(np.ones(session))[0].tolist() == expected  # its replicas are those that were set before
    w.set_value(np.array([5.0, 6.0]))  # Theano's own, of the master alone
    assert function(np.ones(session))[0].tolist() == [11.0, *expected[1:]]
    synk.broadcast(w)
    between = synk.function([x], [(x * w[0], "gather")])
    synk.set_value(0, w, [0.0, 1.0])
    assert between(np.ones(session))[0].tolist() == [0.0, *[5.0] * (session - 1)]
    del function, between
    gc.collect()
    synk.broadcast(w, [7.0, 8.0])  # nothing uses it any more
    assert synk.gather(w).tolist() == [[7, 8]] * session


def test_known_and_new_variables_together(session):
    old, new = theano.shared(np.zeros(2), "old"), theano.shared(np.zeros(3, "float32"), "new")
    alias = theano.clone(new, share_inputs=False)
    kept = synk.function([], updates=[(old, old + 1)])
    synk.broadcast([new, old], [[1, 2, 3], [4.0, 5.0]])
    assert synk.gather(old).tolist() == [[4, 5]] * session
    assert synk.gather(alias).tolist() == [[1, 2, 3]] * session
    with pytest.raises(TypeError, match="another"):
        synk.broadcast(theano.shared(np.zeros(2), "another"), ["a", "b"])
    with pytest.raises(ValueError, match=f"rank {session} does not exist"):
        synk.set_value(session, theano.shared(np.zeros(2)), [1.0, 2.0])
    rows = theano.shared(np.zeros((1, 2)), "rows")
    values = np.arange(14.0).reshape(7, 2)
    synk.scatter(rows, values)
    assert np.array_equal(synk.gather(rows, nd_up=0), values)
    assert kept() == []


@pytest.mark.parametrize("name", CALLS)
def test_collectives_need_a_session(no_session, name):
    with pytest.raises(RuntimeError, match="fork"):
        CALLS[name](theano.shared(np.zeros(1)))


@pytest.mark.parametrize("name", ["reduce", "all_reduce"])
def test_unknown_ops(synchronize, name):
    synchronize(2)
    var = variable("float64", 1)
    for op in ("mean", "gather", None, 3, ["sum"]):
        with pytest.raises((TypeError, ValueError), match=name):
            getattr(synk, name)(var, op=op)


def test_wrong_numbers_of_values(session, var_of):
    one, two = var_of("float32", 1), var_of("float32", 2)
    for values in ([[1.0]], [1.0], np.ones(2, "float32"), [[1.0], [[1.0]], [1.0]]):
        with pytest.raises((TypeError, ValueError)):
            synk.broadcast([one, two], values)
    with pytest.raises(ValueError, match="twice"):
        synk.broadcast([one, one], [[1.0], [2.0]])


@pytest.mark.parametrize(
    "master_rank", [1, pytest.param(2, marks=one_machine("the master is a rank of the first one"))]
)
def test_another_master_rank(synchronize, master_rank):
    synchronize(3, master_rank=master_rank)
    var = variable("float64", 1)
    put(var, [np.full(2, float(rank)) for rank in range(3)])
    assert var.get_value().tolist() == [master_rank] * 2
    assert synk.gather(var).tolist() == [[0, 0], [1, 1], [2, 2]]
    synk.reduce(var, op="sum")
    assert synk.gather(var).tolist() == [[3.0 if rank == master_rank else rank] * 2 for rank in range(3)]
    synk.broadcast(var)
    assert synk.gather(var).tolist() == [[3, 3]] * 3
    synk.scatter(var, np.arange(7.0))
    assert [value.tolist() for value in get(var, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    synk.all_gather(var)
    assert synk.gather(var).tolist() == [list(range(7))] * 3
    put(var, [np.full(2, float(rank)) for rank in range(3)])
    synk.all_reduce(var, weights=[0, 1, 3])
    assert synk.gather(var).tolist() == [[1.75] * 2] * 3


def test_results_land_in_the_existing_array(session, var_of):
    var = var_of("float32", 1)
    var.set_value(np.ones(100, "float32"))
    synk.broadcast(var)
    array = var.get_value(borrow=True)
    synk.all_reduce(var, op="sum")
    synk.broadcast(var, np.full(100, 5, "float32"))
    assert (array == 5).all()
    synk.reduce(var, op="sum")
    assert (array == 5 * session).all()


def test_functions_see_what_collectives_wrote(session):
    w, x = theano.shared(np.zeros(3), "w"), T.dvector("x")
    function = synk.function([x], [(x.sum() * w.sum(), "gather")])
    function(np.ones(session))
    put(w, [np.full(3, float(rank)) for rank in range(session)])
    assert function(np.ones(session))[0].tolist() == [3.0 * rank for rank in range(session)]
    synk.all_reduce(w, op="sum")
    assert function(np.ones(session))[0].tolist() == [3.0 * sum(range(session))] * session


def test_docstrings_name_all_ops():
    for function in (synk.function, synk.reduce, synk.all_reduce):
        assert all(f'``"{op}"``' in function.__doc__ for op in OPS) and "{" not in function.__doc__


def test_variables_that_share_memory(session):
    values = np.arange(100_000.0)
    one, other = theano.shared(values.copy(), "one"), theano.shared(values.copy(), "other")
    synk.broadcast([one, other])
    one.set_value(values, borrow=True)
    other.set_value(values[: len(values)], borrow=True)
    synk.all_reduce([one, other], op="sum")
    for var in (one, other):
        assert (synk.gather(var) == session * np.arange(100_000.0)).all()


@functools.cache
def transposing():
    """A function that stores transposed, and so in Fortran's order, what it is given."""
    m, cube = T.dmatrix("m"), T.dtensor3("cube")
    transposed, turned = theano.shared(np.zeros((1, 1)), "transposed"), theano.shared(np.zeros((1, 1, 1)), "turned")
    updates = [(transposed, m.T), (turned, cube.dimshuffle(2, 1, 0))]
    return synk.function([], bcast_inputs=[m, cube], updates=updates), transposed, turned


@pytest.mark.parametrize("side", [2, 300])  # through lanes, and where they lie
def test_values_in_another_order_of_memory_are_reduced_where_they_lie(session, side):
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
            synk.set_value(session - 1, transposed, np.zeros((1, 1)))  # of another shape: there is a new array
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
        with pytest.raises(ValueError, match="the shapes of transposed differ"):
            synk.all_reduce([transposed, turned])
