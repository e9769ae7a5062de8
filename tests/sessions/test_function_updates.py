"""Updates, sliceable shared variables and random states of `synk.function`."""

import functools

import numpy as np
import pytest
from backend import MRG_RandomStreams, T, theano
from comparison import assert_close, shares
from hypothesis import given
from hypothesis import strategies as st
from point_functions import WIDTH, draw_points

import synkhronos as synk

# ---------------------------------------------------------------- updates


class Updates:
    """A function with updates of every op."""

    def __init__(self):
        x = T.fmatrix("x")
        self.start = {
            "avg": np.zeros(WIDTH, "float32"),
            "sum": np.full(WIDTH, 0.5, "float32"),
            "max": np.full(WIDTH, -np.inf, "float32"),
            "min": np.float32(np.inf),
            "prod": np.float64(1.0),
            "count": np.int64(10),
            "default": np.float32(0),
        }
        self.vars = {name: theano.shared(value, name) for name, value in self.start.items()}
        v = self.vars
        v["default"].default_update = v["default"] + v["avg"].sum() + x.sum()
        updates = [
            (v["avg"], v["avg"] * 2 + x.mean(axis=0)),
            (v["sum"], x.sum(axis=0) + v["avg"], "sum"),
            (v["max"], T.maximum(v["max"], x.max(axis=0)), "max"),
            (v["min"], T.minimum(v["min"], x.min()), "min"),
            (v["prod"], T.cast((1 + x[:, 0] / 10).prod(), "float64") * v["prod"] ** 0, "prod"),
            (v["count"], v["count"] + 1),
        ]
        self.call = synk.function([x], [(x.sum() + v["default"], None), (x.sum(), "sum")], updates=updates)

    def new_values(self, old, x):
        """Return the new values for one slice of the data, computed with NumPy."""
        return {
            "avg": old["avg"] * 2 + x.mean(axis=0),
            "sum": x.sum(axis=0) + old["avg"],
            "max": np.maximum(old["max"], x.max(axis=0)),
            "min": min(old["min"], x.min()),
            "prod": (1 + x[:, 0].astype("float64") / 10).prod(),
            "count": old["count"] + 1,
            "default": old["default"] + old["avg"].sum() + x.sum(),
        }

    def emulate(self, old, x, num_slices):
        """Return the values of one rank after a call on its shard ``x``."""
        if not len(x):
            return old
        parts = [part for part in np.array_split(x, num_slices) if len(part)]
        each = [self.new_values(old, part) for part in parts]
        weights = [len(part) for part in parts]
        averaged = functools.partial(np.average, weights=weights)
        combine = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
        return {name: combine.get(name, averaged)([one[name] for one in each], axis=0) for name in old}


@functools.cache
def updating():
    return Updates()


@given(calls=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=3))
def test_updates_are_local_and_accumulate_over_slices(session, calls):
    function = updating()
    function.call(draw_points(1)[0])
    for name, var in function.vars.items():
        synk.broadcast(var, function.start[name])
    expected = [dict(function.start) for _ in range(session)]
    for n, num_slices in calls:
        x = draw_points(n)[0]
        total = function.call(x, num_slices=num_slices)[1]
        assert_close(total, x.sum(), rtol=1e-4, atol=1e-4)
        parts = shares(n, session)
        expected = [function.emulate(old, x[slice(*part)], num_slices) for old, part in zip(expected, parts)]
    for name, var in function.vars.items():
        assert var.dtype == np.asarray(function.start[name]).dtype
        for rank, values in enumerate(synk.gather(var)):
            np.testing.assert_allclose(values, expected[rank][name], rtol=1e-4, atol=1e-4, err_msg=f"{name}, {rank}")


def test_an_update_that_is_the_input_itself_is_copied(session):
    y = T.fvector("y")
    kept = theano.shared(np.zeros(4, "float32"), "kept")
    store = synk.function([], updates=[(kept, y)], bcast_inputs=[y])
    data = synk.data(np.ones(4, "float32"))
    store(data)
    data[:] = 2
    np.testing.assert_array_equal(synk.gather(kept), np.ones((session, 4)))
    store(np.full(4, 3, "float32"))
    store(np.full(4, 4, "float32"))
    np.testing.assert_array_equal(synk.gather(kept), np.full((session, 4), 4))


@pytest.mark.numba
def test_update_forms(session):
    x = T.dvector("x")
    a, b = theano.shared(0.0, "a"), theano.shared(0.0, "b")
    by_dict = synk.function([x], updates={a: a + x.sum()})
    by_lists = synk.function([x], updates=[[a, a + x.sum()], (b, b + 2 * x.sum(), "sum")])
    assert by_dict.update_modes == ["avg"]
    assert by_lists.update_modes == ["avg", "sum"]
    by_dict(np.ones(10))
    by_lists(np.ones(10))
    assert synk.gather(a).sum() == 20
    assert synk.gather(b).sum() == 20


# ---------------------------------------------------------------- sliceable shared variables


class Sliceable:
    """A function of data in shared variables, which it uses directly, through givens, and in a default update."""

    def __init__(self):
        x, scale = T.fmatrix("x"), T.fscalar("scale")
        self.direct = theano.shared(np.zeros((1, WIDTH), "float32"), "direct")
        self.given = theano.shared(np.zeros((1, WIDTH), "float32"), "given")
        self.seen = theano.shared(np.float32(0), "seen")
        self.seen.default_update = self.seen + self.direct.sum() + self.given.sum()
        both = self.direct + x * scale
        self.call = synk.function(
            [],
            [both.mean(), (both, "gather"), (x.sum(axis=0), "sum"), (self.seen * 1, None)],
            bcast_inputs=[scale],
            givens={x: self.given},
            sliceable_shareds=[self.direct, self.given],
        )


@functools.cache
def sliceable():
    return Sliceable()


@st.composite
def batches_s(draw, lengths):
    """Draw a `batch_s`, and the NumPy index that it means on each rank."""
    shortest = min(lengths)
    masks = ["mask"] * (len(set(lengths)) == 1)
    kind = draw(st.sampled_from(["none", "slice", "list", "array", "slices", "lists", "arrays", *masks]))
    if kind == "none":
        return None, [slice(None)] * len(lengths)

    def a_slice(length):
        bound = st.none() | st.integers(-length, length)
        return slice(draw(bound), draw(bound), draw(st.none() | st.integers(-3, 3).filter(bool)))

    def a_list(length):
        return draw(st.lists(st.integers(-length, length - 1), max_size=12)) if length else []

    if kind == "slice":
        one = a_slice(shortest)
        return one, [one] * len(lengths)
    if kind in ("list", "array"):
        one = a_list(shortest)
        return (one if kind == "list" else np.array(one, int)), [np.array(one, int)] * len(lengths)
    if kind == "mask":
        mask = np.array(draw(st.lists(st.booleans(), min_size=shortest, max_size=shortest)), bool)
        return mask, [mask] * len(lengths)
    if kind == "slices":
        each = [a_slice(length) for length in lengths]
        return each, each
    each = [a_list(length) for length in lengths]
    indices = [np.array(one, int) for one in each]
    return (each if kind == "lists" else indices), indices


@given(data=st.data(), n=st.integers(1, 30), num_slices=st.integers(1, 4))
def test_batch_s_picks_on_each_rank(session, data, n, num_slices):
    function = sliceable()
    direct, x = draw_points(n)[0], draw_points(n, seed=1)[0]
    function.call(1.0)
    synk.scatter([function.direct, function.given], [direct, x])
    synk.broadcast(function.seen, np.float32(0))
    parts = shares(n, session)
    batch_s, indices = data.draw(batches_s([stop - start for start, stop in parts]))
    rows = [np.arange(*part)[index] for part, index in zip(parts, indices)]
    selected = np.concatenate(rows)
    mean, both, total, _ = function.call(np.float32(2), batch_s=batch_s, num_slices=num_slices)
    expected = direct[selected] + 2 * x[selected]
    assert list(function.call.counts) == [len(one) for one in rows]
    assert_close(mean, expected.mean(dtype="float64") if len(selected) else np.nan, rtol=1e-4, atol=1e-5)
    assert_close(both, expected, rtol=1e-5)
    assert_close(total, x[selected].sum(axis=0), rtol=1e-4, atol=1e-5)
    for mine, seen in zip(rows, synk.gather(function.seen)):
        parts = np.array_split(mine, min(num_slices, len(mine)) or 1)
        sums = [direct[part].sum() + x[part].sum() for part in parts]
        average = np.average(sums, weights=[len(part) for part in parts]) if len(mine) else 0
        np.testing.assert_allclose(seen, average, rtol=1e-4, atol=1e-4)


@pytest.mark.numba
def test_sliceable_shareds_with_scattered_inputs(session):
    x = T.fmatrix("x")
    stored = theano.shared(np.zeros((1, WIDTH), "float32"), "stored")
    function = synk.function([x], [(x * stored, "gather")], sliceable_shareds=[stored])
    n = 4 * session + 1
    left, right = draw_points(n)[0], draw_points(n, seed=3)[0]
    function.as_theano(left[:1])
    synk.distribute()
    synk.scatter(stored, right)
    for num_slices in (1, 3):
        assert_close(function(left, num_slices=num_slices)[0], left * right)
    taken = [3, 0]
    picked = np.concatenate([np.arange(*part)[taken] for part in shares(n, session)])
    other = draw_points(2 * session, seed=5)[0]
    for num_slices in (1, 2):
        assert_close(function(other, batch_s=taken, num_slices=num_slices)[0], other * right[picked])
    if session > 1:
        with pytest.raises(ValueError, match="num_slices"):
            function(left, batch_s=[0], num_slices=2)


def test_a_sliceable_shared_that_is_itself_an_output(session):
    stored = theano.shared(np.arange(6.0).reshape(3, 2), "stored")
    function = synk.function([], [(stored, "gather")], sliceable_shareds=[stored])
    assert_close(function(batch_s=[2, 0])[0], np.tile([[4.0, 5.0], [0.0, 1.0]], (session, 1)))
    assert_close(function(num_slices=2)[0], np.tile(stored.get_value(), (session, 1)))


def test_sliceable_shareds_must_be_used_and_be_data(session):
    x = T.dvector("x")
    unused, scalar = theano.shared(np.zeros(3), "unused"), theano.shared(0.0, "scalar")
    with pytest.raises(ValueError, match="unused"):
        synk.function([x], x.sum(), sliceable_shareds=[unused])
    with pytest.raises(TypeError, match="sliceable_shareds"):
        synk.function([x], x.sum() + scalar, sliceable_shareds=[scalar])
    with pytest.raises(TypeError, match="sliceable_shareds"):
        synk.function([x], x.sum(), sliceable_shareds=[x])


# ---------------------------------------------------------------- random streams


@functools.cache
def drawing():
    x = T.fvector("x")
    streams = MRG_RandomStreams(7)
    drawn = theano.shared(np.float32(0), "drawn")
    noise = streams.uniform(x.shape, dtype="float32")
    function = synk.function([x], [(noise, "gather"), (x, "gather")], updates=[(drawn, noise.mean())])
    return function, drawn


@pytest.mark.parametrize("num_slices", [1, 3])
def test_random_states_advance_under_slicing(session, num_slices):
    function, drawn = drawing()
    x = np.arange(6 * session, dtype="float32")
    draws = [function(x, num_slices=num_slices)[0] for _ in range(3)]
    both = np.concatenate(draws)
    assert len(both) == 3 * len(x)
    assert len(np.unique(both)) == len(both)  # no draw is repeated on any rank or in any slice
    assert ((both > 0) & (both < 1)).all()
    for rank, (start, stop) in enumerate(shares(len(x), session)):
        assert_close(synk.get_value(rank, drawn), draws[-1][start:stop].mean(), rtol=1e-5)
