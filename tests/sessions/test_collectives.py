"""Collectives that copy values of shared variables between ranks, and their arguments, on every number of ranks."""

import gc

import numpy as np
import pytest
from backend import T, theano
from collective_values import DTYPES, draw_values, get, put, variable
from comparison import shares
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_strategies import batches
from multinode_sessions import one_machine

import synkhronos as synk
from synkhronos._collectives import OPS


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(session, var_of, dtype):
    var, other = var_of(dtype, 2), var_of(dtype, 1)
    value, more = draw_values(dtype, (3, 4), 1)[0], draw_values(dtype, (9,), 1)[0]
    put(var, draw_values(dtype, (2, 2), session, seed=1))
    var.set_value(value)
    other.set_value(more)
    assert synk.broadcast([var, other]) is None
    np.testing.assert_equal(get(var, session) + get(other, session), [value] * session + [more] * session)
    synk.broadcast(var, value[::-1])
    synk.broadcast([other], [synk.data(more[::-1])])
    np.testing.assert_equal(get(var, session) + get(other, session), [value[::-1]] * session + [more[::-1]] * session)


def test_values_are_cast_as_by_data(session, var_of):
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
    np.testing.assert_equal(synk.gather([other, var], nd_up=nd_up), [join(more), join(values)])
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
        np.testing.assert_equal(get(var, session), [np.concatenate(values)] * session)
        np.testing.assert_equal(get(other, session), [np.concatenate(more)] * session)
        put(var, values)
        synk.all_gather(var)


def test_scalars_cannot_be_concatenated(session, var_of):
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
        np.testing.assert_equal(synk.get_value(rank, [var, other]), [np.full((rank, 2), rank, "float32"), rank])
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


NAMES = ["broadcast", "gather", "all_gather", "reduce", "all_reduce", "get_lengths", "get_shapes"]
CALLS = {
    **{name: getattr(synk, name) for name in NAMES},
    "scatter": lambda var: synk.scatter(var, [1.0]),
    "set_value": lambda var: synk.set_value(0, var, [1.0]),
    "get_value": lambda var: synk.get_value(0, var),
}


@pytest.mark.parametrize("name", CALLS)
def test_variables_that_no_function_uses(two, name):
    unknown = theano.shared(np.zeros(1), "unknown")
    if name in ("broadcast", "scatter", "set_value"):  # these send the variable to the ranks
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
    assert function(np.ones(session))[0].tolist() == expected  # the replicas keep their values
    w.set_value(np.array([5.0, 6.0]))  # sets the controller's value only
    assert function(np.ones(session))[0].tolist() == [11.0, *expected[1:]]
    synk.broadcast(w)
    between = synk.function([x], [(x * w[0], "gather")])
    synk.set_value(0, w, [0.0, 1.0])
    assert between(np.ones(session))[0].tolist() == [0.0, *[5.0] * (session - 1)]
    del function, between
    gc.collect()
    synk.broadcast(w, [7.0, 8.0])  # no function uses it any more
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
    with pytest.raises(ValueError, match=f"rank is {session}; expected 0 to {session - 1}"):
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


@pytest.mark.parametrize("op", ["mean", "gather", None, 3, ["sum"]], ids=str)
@pytest.mark.parametrize("name", ["reduce", "all_reduce"])
def test_unknown_ops_are_refused(two, name, op):
    with pytest.raises((TypeError, ValueError), match=name):
        getattr(synk, name)(variable("float64", 1), op=op)


@pytest.mark.parametrize("values", [[[1.0]], [1.0], np.ones(2, "float32"), [[1.0], [[1.0]], [1.0]]])
def test_wrong_numbers_of_values_are_refused(session, var_of, values):
    with pytest.raises((TypeError, ValueError)):
        synk.broadcast([var_of("float32", 1), var_of("float32", 2)], values)


def test_a_variable_that_is_named_twice_is_refused(session, var_of):
    with pytest.raises(ValueError, match="twice"):
        synk.broadcast([var_of("float32", 1)] * 2, [[1.0], [2.0]])


@pytest.mark.parametrize("master_rank", [1, pytest.param(2, marks=one_machine("the controller is on the first node"))])
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


def test_results_are_written_to_the_existing_array(session, var_of):
    var = var_of("float32", 1)
    var.set_value(np.ones(100, "float32"))
    synk.broadcast(var)
    array = var.get_value(borrow=True)
    synk.all_reduce(var, op="sum")
    synk.broadcast(var, np.full(100, 5, "float32"))
    assert (array == 5).all()
    synk.reduce(var, op="sum")
    assert (array == 5 * session).all()


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
