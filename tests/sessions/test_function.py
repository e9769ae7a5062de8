"""`synk.function`: any split, batch, slices and number of ranks give the results of one serial Theano call."""

import concurrent.futures
import copy as copying
import functools
import itertools
import pickle
import re

import numpy as np
import pytest
from backend import T, theano
from comparison import assert_close, close, shares
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_strategies import batches
from multinode_sessions import one_machine
from point_functions import WIDTH, draw_points

import synkhronos as synk
from synkhronos import _session

MODES = ("avg", "avg", "sum", "sum", "max", "min", "prod", "gather", "gather", "gather", None)
NEED_POINTS = (4, 5)  # Theano raises an error for the maximum of an empty array


@functools.cache
def reductions():
    """Return a function with every kind of output, which all sessions use."""
    x, y, scale = T.fmatrix("x"), T.fvector("y"), T.fscalar("scale")
    predicted = T.dot(x, theano.shared(np.arange(1, WIDTH + 1, dtype="float32"), "w")) * scale
    product = x.dimshuffle(0, 1, "x") * y.dimshuffle(0, "x", "x")
    numbers = [x.mean(axis=0), x.sum(axis=0), T.sqr(y).sum(), x.max(axis=0), y.min(), (1 + y / 10).prod()]
    outputs = [T.sqr(predicted - y).mean(), *zip([*numbers, predicted, product, x, y.sum()], MODES[1:])]
    return synk.function([x, y], outputs, bcast_inputs=[scale], name="reductions")


@given(
    data=st.data(),
    n=st.integers(0, 40),
    num_slices=st.integers(1, 6),
    kinds=st.tuples(*[st.sampled_from([np.asarray, synk.data, np.asfortranarray])] * 2),
)
def test_outputs_are_those_of_one_serial_call(session, data, n, num_slices, kinds):
    function = reductions()
    x, y = draw_points(n)
    batch, index = data.draw(batches(n))
    subset = None
    rows = np.arange(n)[index]
    if not len(rows):
        subset = [i for i in range(len(function.output_modes)) if i not in NEED_POINTS]
    elif data.draw(st.booleans()):
        subset = data.draw(st.lists(st.integers(0, len(function.output_modes) - 1), unique=True, min_size=1))
    given_x, given_y = (kind(value) for value, kind in zip((x, y), kinds))
    actual = function(given_x, given_y, np.float32(2), batch=batch, num_slices=num_slices, output_subset=subset)

    expected = function.as_theano(x[rows], y[rows], np.float32(2), output_subset=subset)
    counts = [stop - start for start, stop in shares(len(rows), session)]
    assert list(function.counts) == counts
    wanted = range(len(function.output_modes)) if subset is None else subset
    assert len(actual) == len(wanted)
    for i, one, other in zip(wanted, actual, expected):
        if MODES[i] is None:
            if num_slices == 1:  # the controller has the first shard
                assert_close(one, y[rows[: counts[0]]].sum(dtype="float32"), rtol=1e-4, atol=1e-5)
        else:
            assert one.dtype == other.dtype
            assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.numba
def test_a_single_output_is_returned_without_a_list(session):
    x = T.dvector("x")
    function = synk.function([x], (x.sum(), "sum"))
    total = function([1.0, 2.0, 4.0])
    assert isinstance(total, np.ndarray)
    assert total == 7.0
    assert function(np.ones(3), output_subset=[0]) == [3.0]
    assert function.as_theano(np.ones(3)) == 3.0
    (mean,) = synk.function([x], [x.mean()])([1.0, 2.0, 6.0])  # a list of one output gives a list
    assert mean == pytest.approx(3.0)


def test_names_of_ops_of_2017(session):
    x = T.dvector("x")
    function = synk.function([x], [(x.mean(), "c_avg"), (x.sum(), "c_sum"), (x.max(), "c_max"), (x, "c_gather")])
    mean, total, largest, full = function([4.0, 1.0, 1.0])
    assert (mean, total, largest) == (pytest.approx(2.0), pytest.approx(6.0), 4.0)
    assert full.tolist() == [4.0, 1.0, 1.0]


@functools.cache
def integers():
    x, flags = T.lvector("x"), T.vector("flags", dtype="bool")
    outputs = list(itertools.product([x.sum(), T.cast(x.sum(), "int8"), x.max()], ["avg", "sum", "max", "min"]))
    outputs += [(flags, "gather"), (T.any(flags), "max"), (T.all(flags), "min"), (T.any(flags), "sum")]
    return synk.function([x, flags], outputs)


@pytest.mark.parametrize("num_slices", [1, 2])
def test_integer_and_boolean_outputs(session, num_slices):
    n = 7
    x, flags = np.arange(n), np.arange(n) % 3 == 0
    pieces = []
    for start, stop in shares(n, session):
        pieces += np.array_split(np.arange(start, stop), max(1, min(stop - start, num_slices)))
    sums, largest = [part.sum() for part in pieces], [part.max() for part in pieces]
    expected = []
    for values, dtype in ((sums, "int64"), (sums, "int8"), (largest, "int64")):
        expected += [np.average(values, weights=[len(part) for part in pieces]), np.int64(sum(values))]
        expected += [np.array(values, dtype).max(), np.array(values, dtype).min()]
    expected += [flags, np.bool_(True), np.bool_(False), np.int64(sum(bool(flags[part].any()) for part in pieces))]
    outputs = integers()(x, flags, num_slices=num_slices)
    close(outputs, expected, rtol=1e-12, atol=0)
    assert [one.dtype for one in outputs] == [one.dtype for one in expected]


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
def test_averages_of_outputs_whose_sum_overflows(session, dtype, num_slices):
    x = T.vector("x", dtype=dtype)
    kept = theano.shared(np.zeros((), dtype), "kept")
    function = synk.function([x], [x[0], x[:1]], updates=[(kept, x[0])])
    largest = 2**62 + 1 if dtype == "int64" else np.finfo(dtype).max
    for value in np.array([largest, largest // 4 * 3], dtype):
        for got in function(np.full(session * 4 + 1, value), num_slices=num_slices):
            np.testing.assert_allclose(got.astype("longdouble"), value.astype("longdouble"), rtol=2e-3)
        synk.all_reduce(kept)
        assert kept.get_value() == (value if dtype == "int64" else pytest.approx(value, rel=2e-3))


def test_an_output_without_a_reduction_may_be_of_any_type(session):
    x = T.dmatrix("x")
    matrix, total = synk.function([x], [(theano.sparse.csr_from_dense(x), None), (x.sum(), "sum")])(np.eye(6))
    assert matrix.format == "csr"
    assert matrix.shape[1] == 6
    assert total == 6


def test_results_do_not_change_with_the_next_call(session):
    x, y = draw_points(9)
    first = reductions()(x, y, 1.0)
    copies = copying.deepcopy(first)
    reductions()(x + 1, y + 1, 2.0)
    np.testing.assert_equal(first, copies)


def test_calls_in_a_row_see_what_changes(session):
    """Calls that differ only in the contents of arrays share a plan, and use the current contents."""
    function = reductions()
    scale = np.array(2, "float32")

    def check(x, y, batch=None, **options):
        rows = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
        expected = function.as_theano(np.asarray(x)[rows], np.asarray(y)[rows], scale, **options)
        actual = function(x, y, scale, batch=batch, **options)
        close(actual[:10], expected[:10], rtol=1e-4, atol=1e-5)  # the last output is the controller's shard

    def check_all(x, y):
        for _ in range(2):
            check(x, y)
        for batch in (5, 5, 6, slice(1, 7), slice(1, 7), slice(1, 8), None):
            check(x, y, batch)
        for subset in ([0, 7], [0, 7], [7], None):
            check(x, y, output_subset=subset)

    for seed in range(2):  # other contents
        x, y = draw_points(9, seed)
        check_all(x, y)
        check_all(np.asfortranarray(x), y[::-1])
    x, y = synk.data(x), synk.data(y)
    check_all(x, y)
    x[:] += 1
    check_all(x, y)
    for one in (x, y):
        one.set_length(8)
    check_all(x, y)
    for more in range(3):  # the same Data next to arrays
        check(x, y[:8] + more)
    check_all(*draw_points(11))
    many = draw_points(200_000)  # larger than the staging memory, which must grow
    for seed in range(3):
        check(*draw_points(3, seed))
        function(*many, scale, output_subset=[0])
        check(*draw_points(3, seed))
    scale[...] = 3
    check(*draw_points(3, 2))


def test_a_cached_plan_survives_commands_that_stage_arrays(session):
    """Index lists are in staging memory, which each command with arrays overwrites."""
    x, y = T.fmatrix("x"), T.fvector("y")
    rows_of = synk.function([x], [(x, "gather")])
    both = synk.function([x, y], [(x.sum(axis=1) + y, "gather")])
    other = synk.function([y], [(y, "gather")])
    var = theano.shared(np.zeros(3), "var")
    keeper = synk.function([], [(var, None)])
    points, targets = draw_points(100)
    data, minibatch, full = synk.data(points), synk.data(points[:50], minibatch=True), synk.data(targets)
    intruders = [
        lambda: other(targets[::-1].copy()),
        lambda: rows_of(data, batch=[99] * 80),
        lambda: other(np.zeros(300_000, "float32")),  # larger than the staging memory, which grows
        lambda: synk.broadcast(var, np.full(3, 7.0)),
        lambda: synk.scatter(var, np.arange(300.0), batch=slice(0, 300, 3)),
        lambda: synk.set_value(session - 1, var, np.full(40_000, -1.0)),
        lambda: rows_of(data, batch=slice(99, None, -1)),
        keeper,
    ]
    start, step = np.array(0), np.array(2)
    for intrude in intruders:
        for batch in (slice(0, 100, 2), slice(None, None, -3), slice(10, 20), 30, None):
            part = targets if batch is None else targets[batch] if isinstance(batch, slice) else targets[:batch]
            chosen = points if batch is None else points[batch] if isinstance(batch, slice) else points[:batch]
            rows_of(data, batch=batch)
            both(points, full, batch=batch)
            intrude()
            np.testing.assert_array_equal(rows_of(data, batch=batch)[0], chosen)
            intrude()
            assert_close(both(points, full, batch=batch)[0], chosen.sum(axis=1) + part)
        both(minibatch, full, batch=slice(20, 70, 7))
        intrude()
        expected = points[0:50:7].sum(axis=1) + targets[20:70:7]
        assert_close(both(minibatch, full, batch=slice(20, 70, 7))[0], expected)
        for start[...], step[...] in ((0, 2), (4, 1), (5, 1)):  # bounds that change in place
            np.testing.assert_array_equal(rows_of(data, batch=slice(start, 90, step))[0], points[start:90:step])


def test_cached_plans_of_several_threads(two):
    x, y = T.fmatrix("x"), T.fvector("y")
    functions = [synk.function([x, y], [(x.sum(axis=1) * y, "gather")]) for _ in range(2)]
    points, targets = draw_points(60)
    data = synk.data(points)
    batches = [None, slice(0, 60, 2), slice(59, None, -1), 60]

    def work(which):
        random = np.random.RandomState(which)
        for turn in range(60):
            batch = batches[random.randint(4)]
            mine = targets + which
            got = functions[(which + turn // 5) % 2](data, mine, batch=batch)[0]
            rows = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
            np.testing.assert_allclose(got, points[rows].sum(axis=1) * mine[rows], rtol=1e-4, atol=1e-5)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert [*pool.map(work, range(3))] == [None] * 3


def test_shapes_that_cannot_be_reduced_are_named(two):
    x = T.dmatrix("x")
    function = synk.function([x], [(x.sum(axis=1), "avg")])
    assert_close(function(np.ones((4, 2))), [np.full(2, 2.0)])
    with pytest.raises(ValueError, match=r"output 0.*\(2,\).*\(1,\).*gather"):
        function(np.ones((3, 2)))
    assert_close(function(np.ones((2, 2))), [[2.0]])


def test_build_inputs(session):
    x, y, scale = T.fmatrix("x"), T.fvector("y"), T.fscalar("scale")
    function = synk.function([x, y], [(T.dot(x, T.ones(WIDTH, "float32")) * y * scale, "gather")], bcast_inputs=[scale])
    points, targets = draw_points(11)
    inputs = function.build_inputs(points, scale=np.float32(2), y=targets, oversize=1.5)
    assert [one.name for one in inputs] == ["x", "y", "scale"]
    assert [one.dtype for one in inputs] == ["float32"] * 3
    assert inputs[0].alloc_size == 1.5 * 11 * WIDTH // 1
    assert_close(function(*inputs)[0], points.sum(1) * targets * 2)
    with pytest.raises(TypeError, match="float32"):
        function.build_inputs(points.astype("float64"), targets, 1.0)
    cast = function.build_inputs(points.astype("float64"), targets, 2.0, force_cast=True, minibatch=True)
    assert all(one.minibatch for one in cast)
    assert_close(function(*cast)[0], points.sum(1) * targets * 2)
    only = synk.function([y], y.sum()).build_inputs(targets)
    assert isinstance(only, synk.Data)


def test_minibatch_data_begin_at_the_batch(session):
    x, y = T.fmatrix("x"), T.fvector("y")
    function = synk.function([x, y], [(x * y.dimshuffle(0, "x"), "gather")])
    points, targets = draw_points(30)
    full = synk.data(targets)
    for batch in (slice(10, 20), slice(3, 20, 4), 6):
        rows = np.arange(30)[:batch] if isinstance(batch, int) else np.arange(30)[batch]
        small = synk.data(points[rows.min() : rows.max() + 1], minibatch=True)
        assert_close(function(small, full, batch=batch)[0], points[rows] * targets[rows][:, None])
    short = synk.data(points[:5], minibatch=True)
    with pytest.raises(IndexError, match="minibatch"):
        function(short, full, batch=slice(10, 20))


def test_row_i_of_minibatch_data_belongs_to_the_ith_index(session):
    """Minibatch data match a random list of indices row by row, as in programs of 2017."""
    x, y = T.fmatrix("x"), T.fvector("y")
    function = synk.function([x, y], [(x * y.dimshuffle(0, "x"), "gather")])
    points, targets = draw_points(30)
    full = synk.data(targets)
    order = np.random.RandomState(3).permutation(30)
    for batch in (order[:12], order[:12].tolist(), [14, 12, -1, 12], np.arange(30) % 7 == 4, [], [7]):
        rows = np.arange(30)[np.asarray(batch, None if len(batch) else int)]
        small = synk.data(points[rows], minibatch=True)
        for num_slices in (1, 3):
            got = function(small, full, batch=batch, num_slices=num_slices)[0]
            assert_close(got, points[rows] * targets[rows][:, None])
        for wrong in (synk.data(points[: len(rows) + 1], minibatch=True), synk.data(points, minibatch=True)):
            with pytest.raises(IndexError, match=f"input x: batch has {len(rows)} indices"):
                function(wrong, full, batch=batch)


def test_a_rank_without_points_computes_nothing(synchronize):
    synchronize(5)
    x = T.dvector("x")
    calls = theano.shared(0, "calls")
    function = synk.function([x], [(x.mean(), "avg"), (T.ones(1) * calls, "gather")], updates=[(calls, calls + 1)])
    mean, gathered = function([4.0, 6.0])
    assert mean == 5.0
    assert len(gathered) == 2
    assert synk.gather(calls).tolist() == [1, 1, 0, 0, 0]


@one_machine("the controller is a rank of the first node")
def test_the_controller_may_have_no_points(synchronize):
    synchronize(3, master_rank=2)
    x = T.dvector("x")
    function = synk.function([x], [x.mean(), (x.sum(), None), (x, "gather")])
    mean, own, full = function([4.0, 6.0])
    assert (mean, own, full.tolist()) == (5.0, None, [4.0, 6.0])
    assert function([1.0, 2.0, 4.0])[1] == 4.0


@one_machine("names of devices include the node")
def test_description(two):
    function = reductions()
    assert function.name == "reductions"
    assert tuple(function.output_modes) == MODES
    assert function.update_modes == []
    assert re.fullmatch(r"<synkhronos\.Function reductions\(.*\) -> .*; 2 ranks>", repr(function))
    x, w, y = T.dmatrix("x"), T.dvector("w"), T.dvector()
    product = T.dot(x, w)
    product.name = "product"
    several = synk.function([x, y], [product.mean(), (product, "gather"), (y.sum(), None)], bcast_inputs=[w])
    expected = f"<synkhronos.Function (x, <{y.type}>; w) -> mean (avg), product (gather), Sum"
    assert repr(several).startswith(expected), repr(several)
    assert repr(several).endswith(".0 (None); 2 ranks>")
    assert repr(synk.function([], [], name="nothing")) == "<synkhronos.Function nothing() -> nothing; 2 ranks>"
    session = _session.current()
    assert repr(session) == "<synkhronos session of 2 ranks on cpu, master rank 0>"


def test_description_without_a_session(no_session):
    synk.fork(2)
    x = T.dvector("x")
    total = x.sum()
    function = synk.function([x], (total, "sum"), name="total")
    synk.close()
    assert repr(function) == f"<synkhronos.Function total(x) -> {total} (sum); no session>"


@pytest.mark.parametrize(
    "copied", [copying.copy, copying.deepcopy, pickle.dumps, lambda one: copying.deepcopy({"f": [one]})]
)
def test_functions_are_not_copied(two, copied):
    with pytest.raises(TypeError, match=r"reductions.*synkhronos\.function.*checkpoint"):
        copied(reductions())


def test_keywords_go_to_theano(two):
    x, unused = T.dvector("x"), T.dvector("unused")
    with pytest.raises(theano.compile.UnusedInputError):
        synk.function([x, unused], x.sum())
    keywords = {"on_unused_input": "ignore", "mode": "FAST_COMPILE", "profile": False}
    function = synk.function([x, unused], (x.sum(), "sum"), **keywords)
    assert function(np.ones(3), np.ones(3), num_slices=2) == 3.0
    downcasting = synk.function([T.fvector("y")], [], on_unused_input="ignore", allow_input_downcast=True)
    assert downcasting(np.ones(3)) == []


def test_givens_replace_inputs_and_shared_variables(session):
    x, factor = T.dvector("x"), T.dscalar("factor")
    stored, other = theano.shared(2.0, "stored"), theano.shared(5.0, "other")
    givens = [(factor, other * 10), (stored, other)]
    function = synk.function([x], [(x * factor + stored, "gather")], givens=givens, updates=[(other, other + 1)])
    values = np.arange(7.0)
    for num_slices, added in ((1, 5), (3, 6)):
        synk.broadcast(other, float(added))
        assert_close(function(values, num_slices=num_slices)[0], values * 10 * added + added)
        assert_close(synk.gather(other), [added + (stop > start) for start, stop in shares(7, session)])


def test_a_dict_of_outputs_returns_dicts(session):
    x, w = T.dvector("x"), theano.shared(2.0, "w")
    points = np.arange(9.0)
    plain = synk.function([x], {"total": (x.sum(), "sum"), "mean": x.mean()})
    exact = synk.function([x], {"b": (w * x).sum(), "a": x.max()}, updates=[(w, w + 1)], exact=True)
    backend = theano.function([x], [x.max(), (w * x).sum()])  # PyTensor's function takes no dict
    assert plain(points) == plain.as_theano(points) == {"mean": 4, "total": 36}
    assert plain(points, output_subset=["total"]) == {"total": 36}
    for _ in range(3):
        expected = dict(zip("ab", backend(points)))
        assert exact(points) == expected
    copied = exact.copy(swap={w: theano.shared(5.0)})
    assert [one(points, output_subset=["a", "b"]) for one in (exact.copy(), copied)] == [
        {"a": 8, "b": 5 * 36},
        {"a": 8, "b": 5 * 36},
    ]
    with synk.sequence():
        future = plain(points)
    assert future.result() == {"mean": 4, "total": 36}
    assert (exact.output_keys, plain.output_keys) == (["a", "b"], ["mean", "total"])
    with pytest.raises(ValueError, match="output_subset has the key 'c'; expected some of "):
        plain(points, output_subset=["c"])
    with pytest.raises(TypeError, match="outputs has the key 1; expected strings"):
        synk.function([x], {1: x.sum()})
