"""Results compared with one Theano call: averages that would mix rows, ops that do not fit their outputs."""

import contextlib

import numpy as np
import pytest
from backend import MRG_RandomStreams, T, theano
from comparison import assert_close, close

import synkhronos as synk

POINTS = np.arange(48.0).reshape(12, 4)


#: A RuntimeWarning is a false alarm, and an error, except the one about more ranks than cores.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:synkhronos.fork")


# ---------------------------------------------------------------- rows that would be averaged


def refused(function, *args, **kwargs):
    with pytest.raises(ValueError, match=r"output \d of .* has a row for each data point.*gather") as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("form", ["array", "list", "data", "float32", "batch"])
def test_rows_that_would_be_averaged_are_refused(two, form):
    x, w = T.dmatrix("x"), T.dvector("w")
    function = synk.function([x], [x.mean(), T.dot(x, w)], bcast_inputs=[w], name="predict")
    w_data = [1.0] * 4
    given = {"list": POINTS.tolist(), "data": synk.data(POINTS), "float32": POINTS.astype("float32")}.get(form, POINTS)
    batch = [3, 1, 4, 1] if form == "batch" else None
    for _ in range(2):
        message = refused(function, given, w_data, batch=batch)
    assert message.startswith("output 1 of predict")
    assert function(given, w_data, batch=batch, output_subset=[0])[0] == POINTS[batch or slice(None)].mean()


def test_rows_are_refused_on_any_even_split(session):
    x = T.dmatrix("x")
    function = synk.function([x], x.sum(axis=1))
    n = 2 * session
    if session > 1:
        refused(function, POINTS[:n] if n <= 12 else np.resize(POINTS, (n, 4)))
        refused(function, np.ones((n + 1, 4)))
    else:  # nothing is averaged
        assert_close(function(POINTS), POINTS.sum(axis=1))
        refused(function, POINTS, num_slices=3)
        refused(function, POINTS, num_slices=2)
    assert_close(function(POINTS, batch=1), POINTS[:1].sum(axis=1))  # one rank has all of it


def test_rows_are_refused_before_updates_happen(two):
    x = T.dmatrix("x")
    calls = theano.shared(0, "calls")
    function = synk.function([x], x * 2, updates=[(calls, calls + 1)])
    refused(function, POINTS)
    assert synk.gather(calls).tolist() == [0, 0]


def test_outputs_as_long_as_the_shard_without_rows_are_averaged(session):
    """Outputs of length 4 are averaged if they have no rows, although each rank has 4 rows."""
    x, v = T.dmatrix("x"), T.dvector("v")
    w = theano.shared(np.arange(1.0, 5.0), "w")
    calls = theano.shared(0, "calls")
    cost = T.sqr(T.dot(x, w)).mean()
    outputs = [T.grad(cost, w), x.mean(axis=0), w * 1, T.dot(x.T, x) / x.shape[0], v + x.mean(axis=0), T.ones(4)]
    function = synk.function([x], outputs, bcast_inputs=[v], updates=[(calls, calls + 1)])
    points = np.random.RandomState(0).randn(4 * session, 4)
    for num_slices in (1, 2, 1):
        for batch in (None, slice(0, 2 * session), slice(0, 4)):
            picked = slice(None) if batch is None else batch
            expected = function.as_theano(points[picked], np.ones(4))
            got = function(points, np.ones(4), batch=batch, num_slices=num_slices)
            close(got, expected)
    square = synk.function([x], x.mean(axis=0))
    assert_close(square(np.resize(points, (4 * session, 4))), np.resize(points, (4 * session, 4)).mean(axis=0))


def test_rows_next_to_others_of_the_same_length(two):
    """An addend of fixed length does not hide that an output has a row for each data point."""
    x, v = T.dmatrix("x"), T.dvector("v")
    b = theano.shared(np.ones(6), "b")
    refused(synk.function([x], b + x.sum(axis=1)), POINTS)
    refused(synk.function([x], v + x.sum(axis=1), bcast_inputs=[v]), POINTS, np.ones(6))


def test_values_without_a_sharding_rule_are_averaged_and_the_comparison_finds_them(two):
    x = T.dmatrix("x")
    for unknown in (x[::2], T.sort(x, axis=0), x[1:] - x[:-1]):
        function = synk.function([x], unknown)
        function(POINTS)
        with pytest.raises(ValueError, match="in one process"):
            function(POINTS, check_against_theano=True)
    fixed = synk.function([x], x.reshape((6, 4)).mean() + T.arange(6))
    assert_close(fixed(POINTS), POINTS.mean() + np.arange(6))


ON_OTHER_AXES = {
    "transposed": lambda x, w: T.dot(x, w).T,
    "a row of sums": lambda x, w: x.sum(axis=1).dimshuffle("x", 0),
    "on axis 1 of 3": lambda x, w: T.dot(x, w).dimshuffle(1, 0, "x"),
    "flat": lambda x, w: x.flatten(),
    "repeated": lambda x, w: T.repeat(x, 2, axis=0),
    "scanned": lambda x, w: theano.scan(lambda row: row.sum(), sequences=[x])[0],
    "products": lambda x, w: T.dot(x, x.T),
}


@pytest.mark.parametrize("form", ON_OTHER_AXES)
def test_data_points_on_any_axis_and_multiples_of_rows_are_refused(two, form):
    x = T.dmatrix("x")
    w = theano.shared(np.ones((4, 3)) + np.eye(4, 3), "w")
    function = synk.function([x], [x.sum(), ON_OTHER_AXES[form](x, w)])
    for _ in range(2):
        refused(function, POINTS)
    named = synk.function([x], [(ON_OTHER_AXES[form](x, w), "avg")])
    named(POINTS)


def test_updates_with_rows_on_their_second_axis_are_refused_over_slices(session):
    x = T.dmatrix("x")
    w = theano.shared(np.ones((4, 3)), "w")
    seen = theano.shared(np.zeros((3, 4)), "seen")
    function = synk.function([x], updates=[(seen, T.dot(x, w).T)])
    function(np.ones((4 * session, 4)))
    with pytest.raises(ValueError, match="the update of seen has a row"):
        function(np.ones((4 * session, 4)), num_slices=2)


def test_rows_outside_of_the_batch_are_not_read(two):
    """Rows outside of the batch are not computed: labels of -1, for unlabelled points, would fail."""
    x, y = T.dmatrix("x"), T.ivector("y")
    labels = np.array([-1, 0, 1, 2, 3, 0, 1, 2, 3, 3, 2, -1], dtype="int32")
    counts = T.extra_ops.bincount(y)
    per_class = T.dot(T.extra_ops.to_one_hot(y, 4).T, x) / y.shape[0]
    rows = np.flatnonzero(labels >= 0)[[0, 1, 2, 3, 4, 5, 6, 7]]
    function = synk.function([x, y], [counts, per_class, (x, "gather")])
    got = function(POINTS, labels, batch=rows)
    assert_close(got[0], np.full(4, 1.0))
    assert_close(got[1], np.eye(4)[labels[rows]].T @ POINTS[rows] / 8)
    got = function(POINTS, labels, batch=rows, num_slices=1)
    assert_close(got[2], POINTS[rows])
    assert_close(synk.function([y], counts)(labels, batch=slice(1, 9)), np.full(4, 1.0))


def test_scattered_variables_that_are_not_declared(two):
    """Each rank reads its own rows of an undeclared variable, and all ranks have the same weight."""
    x = theano.shared(POINTS, "x")
    mean, rows = synk.function([], x.mean()), synk.function([], x.sum(axis=1))
    named = synk.function([], [(x.mean(), "avg"), (x, "gather")])
    assert_close(mean(), POINTS.mean())  # all ranks have the full array
    assert_close(rows(), POINTS.sum(axis=1))
    synk.scatter(x, POINTS)
    assert_close(mean(), POINTS.mean())
    with pytest.raises(ValueError, match="has a row for each data point"):
        rows()
    synk.scatter(x, POINTS[:11])
    assert_close(named()[1], POINTS[:11])
    with pytest.warns(RuntimeWarning, match="6, 5 rows of x, which was scattered: name x in sliceable_shareds"):
        mean()
    assert_close(synk.function([], x.mean(), sliceable_shareds=[x])(), POINTS[:11].mean())
    synk.broadcast(x, POINTS)
    assert_close(rows(), POINTS.sum(axis=1))
    index = T.iscalar("index")
    picks = synk.function([], x[index * 2 : index * 2 + 2].sum(axis=0), bcast_inputs=[index])
    synk.scatter(x, POINTS[:11])
    assert_close(picks(1), (POINTS[2:4].sum(axis=0) + POINTS[8:10].sum(axis=0)) / 2)


def test_rows_of_sliceable_shared_variables(two):
    x = theano.shared(POINTS, "x")
    y = T.dmatrix("y")
    function = synk.function([], [x.sum(axis=1), x.mean(axis=0)], sliceable_shareds=[x])
    synk.scatter(x, POINTS)
    refused(function)
    refused(function, batch_s=[3, 1, 0])
    refused(function, batch_s=[[3, 1, 0], [0, 1, 2]])
    refused(function, batch_s=slice(0, 4), num_slices=2)
    assert_close(function(batch_s=slice(0, 4), output_subset=[1])[0], POINTS[[0, 1, 2, 3, 6, 7, 8, 9]].mean(axis=0))
    both = synk.function([y], [(x + y).sum(axis=1), (x * y).mean(axis=0)], sliceable_shareds=[x])
    refused(both, POINTS)
    assert_close(both(POINTS, output_subset=[1])[0], (POINTS**2).mean(axis=0))
    both = synk.function([y], [x.sum(axis=1), y.sum()], sliceable_shareds=[x])
    refused(both, np.ones((2, 4)), output_subset=[0], batch_s=slice(0, 4))
    refused(both, np.ones((3, 4)), output_subset=[0])
    same = synk.function([y], x.sum(axis=0) * y.sum(), sliceable_shareds=[x])  # of length 4, next to 4 rows
    assert_close(same(np.ones((2, 4)), batch_s=slice(0, 4)), POINTS[[0, 1, 2, 3, 6, 7, 8, 9]].sum(axis=0) * 2)


def test_rows_that_updates_and_local_outputs_would_average_over_slices(session):
    """With `num_slices`, each rank would average rows over its slices, in updates and in outputs with the op None."""
    x, w = T.dmatrix("x"), T.dvector("w")
    n = 4 * session
    points = np.random.RandomState(0).randn(n, 4)
    predictions = theano.shared(np.zeros(2), "predictions")
    product = T.dot(x, w)
    stores = synk.function([x], x.sum(), bcast_inputs=[w], updates=[(predictions, product)])
    stores(points, np.ones(4))
    assert_close(synk.gather(predictions).ravel(), points.sum(axis=1))
    for num_slices in (2, 4, 2):
        with pytest.raises(ValueError, match=r"the update of predictions has a row for each data point.*Do not slice"):
            stores(points, np.ones(4), num_slices=num_slices)
    named = synk.function([x], updates=[(predictions, product, "avg")], bcast_inputs=[w])
    named(points, np.ones(4), num_slices=2)
    means = [part.reshape(2, 2, 4).mean(axis=0).sum(axis=1) for part in np.split(points, session)]
    assert_close(synk.gather(predictions).ravel(), np.concatenate(means))
    own = synk.function([x], [(product, None), product.mean()], bcast_inputs=[w])
    assert_close(own(points, np.ones(4))[0], points[:4].sum(axis=1))
    with pytest.raises(ValueError, match=r"output 0 of .* has a row for each data point.*op None"):
        own(points, np.ones(4), num_slices=2)
    assert own(points, np.ones(4), num_slices=2, output_subset=[1])[0] == pytest.approx(points.sum() / n)


def test_rows_that_only_a_worker_would_average_over_slices(synchronize):
    synchronize(2, master_rank=1)
    x, rows = T.dvector("x"), theano.shared(np.zeros(1), "rows")
    stores = synk.function([x], x.sum(), updates=[(rows, 2 * x)])
    with pytest.raises(ValueError, match="the update of rows has a row for each data point"):
        stores(np.arange(3.0), num_slices=2)  # the controller has a single row


@pytest.mark.parametrize("mode", [None, theano.Mode("py", None)], ids=["c", "py"])  # py: no output_subset
def test_updates_and_local_outputs_as_long_as_the_slices_without_rows(session, mode):
    x = T.dmatrix("x")
    w = theano.shared(np.arange(1.0, 5.0), "w")
    cost = T.sqr(T.dot(x, w)).mean()
    gradient = T.grad(cost, w)
    seen = theano.shared(np.zeros(4), "seen")
    function = synk.function([x], [cost, (gradient, None)], updates=[(seen, seen + gradient), (w, w * 1)], mode=mode)
    points = np.random.RandomState(0).randn(8 * session, 4)
    serial = theano.function([x], gradient)
    for num_slices in (2, 4, 2):
        seen.set_value(np.zeros(4))
        synk.broadcast(seen)
        _, own = function(points, num_slices=num_slices)
        assert_close(own, serial(points[:8]))
        synk.all_reduce(seen)
        assert_close(seen.get_value(), serial(points))


def test_updates_of_sliceable_rows(two):
    x = theano.shared(POINTS, "x")
    sums = theano.shared(np.zeros(2), "sums")
    function = synk.function([], updates=[(sums, x.sum(axis=1))], sliceable_shareds=[x])
    synk.scatter(x, POINTS)
    function(batch_s=slice(0, 4))
    assert_close(synk.gather(sums).ravel(), POINTS[[0, 1, 2, 3, 6, 7, 8, 9]].sum(axis=1))
    with pytest.raises(ValueError, match="the update of sums has a row"):
        function(batch_s=slice(0, 4), num_slices=2)


# ---------------------------------------------------------------- the comparison


def test_the_documented_deviation_is_found(session):
    x = T.dvector("x")
    spread = synk.function([x], [x.std(), x.mean()], name="spread")
    points = np.arange(12.0)
    parts = np.array_split(points, session)
    wrong = np.average([part.std() for part in parts], weights=[len(part) for part in parts])
    assert_close(spread(points), [wrong, 5.5])
    if session == 1:
        assert_close(spread(points, check_against_theano=True), [points.std(), 5.5])
    else:
        with pytest.raises(ValueError, match=r"output 0 of spread, op 'avg'.*by up to") as caught:
            spread(points, check_against_theano=True)
        assert f"{points.std() - wrong:.6g}" in str(caught.value)
        assert f"expected {points.std():.9g}" in str(caught.value)
    right = synk.function([x], [x.mean(), (x**2).mean()])
    mean, square = right(points, check_against_theano=True)
    assert_close(np.sqrt(square - mean**2), points.std())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_correct_results_pass(session, dtype):
    x, s = T.matrix("x", dtype=dtype), T.scalar("s", dtype=dtype)
    v = T.ivector("v")
    y = T.exp(x * s / 50)
    outputs = [y.mean(), (y.sum(), "sum"), (y, "gather"), (y.max(axis=0), "max"), (y.min(), "min"), (v.sum(), None)]
    outputs += [(y.sum(), "gather"), (v, "gather"), (v.sum(), "sum"), T.eq(v, 3).mean(), (y.prod() * 0 + 1, "prod")]
    calls = theano.shared(0, "calls")
    function = synk.function([x, v], outputs, bcast_inputs=[s], updates=[(calls, calls + 1)])
    points = np.random.RandomState(1).randn(17, 3).astype(dtype)
    labels = np.arange(17, dtype="int32")
    data, minibatch = synk.data(points), synk.data(points[3:9], minibatch=True)
    picked = [(points, None), (data, [3, 1, -1]), (data, slice(0, 17, 3)), (minibatch, slice(3, 9))]
    for num_slices in (1, 3):
        for given, batch in picked:
            function(given, labels, 2.0, batch=batch, num_slices=num_slices, check_against_theano=True)
            function(given, labels, 2.0, batch=batch, output_subset=[4, 0], check_against_theano=True)
        function(points, labels, 2.0, batch=[], output_subset=[1, 2, 5], check_against_theano=True)
    assert synk.gather(calls)[0] == 18  # updates are applied once


def test_updates_do_not_disturb_the_comparison(two):
    x = T.dvector("x")
    w = theano.shared(np.float64(1), "w")
    function = synk.function([x], (x * w).mean(), updates=[(w, w * 2)])
    for power in range(4):
        assert function(np.ones(4), check_against_theano=True) == 2**power
    synk.set_value(1, w, 7.0)
    with pytest.raises(ValueError, match=r"expected 16.*check_replicas"):
        function(np.ones(4), check_against_theano=True)
    assert synk.gather(w).tolist() == [32, 14]


def test_sliceable_shared_variables_are_compared_in_full(three):
    x, y = theano.shared(POINTS, "x"), T.dmatrix("y")
    function = synk.function([], [x.mean(), (x, "gather")], sliceable_shareds=[x])
    both = synk.function([y], [(x * y).mean(), (x + y, "gather")], sliceable_shareds=[x])
    spread = synk.function([], x.std(), sliceable_shareds=[x])
    synk.scatter(x, POINTS[:11])
    for batch_s in (None, slice(0, 2), [2, 0], [[0], [1, 2], slice(0, 3)]):
        for num_slices in (1, 2):
            function(batch_s=batch_s, num_slices=num_slices, check_against_theano=True)
    both(POINTS[:11], check_against_theano=True)
    both(POINTS[:11], check_against_theano=True, num_slices=2)
    with pytest.raises(ValueError, match="differs"):
        spread(check_against_theano=True)


def test_replicas_that_differ_are_found_in_exact_functions(two):
    x, w = T.dvector("x"), theano.shared(1.0, "w")
    exact = synk.function([x], (x * w).sum(), exact=True)
    own = synk.function([x], [], updates=[(w, x.sum())])
    own([1.0, 5.0])  # each rank stores the sum of its rows
    with pytest.raises(ValueError, match=r"^output 0 of [^,]* differs from .* expected 9\. .*check_replicas"):
        exact([4.0, 5.0], check_against_theano=True)


@pytest.mark.parametrize("op", ["avg", "sum", "max", "gather"])
def test_wrong_ops_are_found(two, op):
    x = T.dvector("x")
    points = np.array([1.0, 2.0, 4.0])
    wrong = {"avg": x.sum(), "sum": x.mean(), "max": x.min(), "gather": x.sum(keepdims=True)}[op]
    function = synk.function([x], (wrong, op))
    with pytest.raises(ValueError, match=f"op '{op}'"):
        function(points, check_against_theano=True)
    function(points, check_against_theano=False)


@pytest.mark.numba
def test_the_environment_asks_for_the_comparison(two, monkeypatch):
    x = T.dvector("x")
    for value, asked in (("0", False), ("", False), ("1", True)):
        monkeypatch.setenv("SYNKHRONOS_CHECK", value)  # read when a function is built
        spread = synk.function([x], x.std())
        noise = synk.function([x], (x + MRG_RandomStreams(3).normal(x.shape)).mean())
        noise(np.ones(4))  # cannot be compared
        with pytest.raises(ValueError, match="differs") if asked else contextlib.nullcontext():
            spread(np.arange(4.0))
        spread(np.arange(4.0), check_against_theano=False)
    with pytest.raises(ValueError, match="random"):
        noise(np.ones(4), check_against_theano=True)
    with pytest.raises(TypeError, match="check_against_theano"):
        spread(np.ones(4), check_against_theano=1)


def test_graphs_that_fail_in_one_process_are_reported(two):
    x = T.dvector("x")
    fixed = synk.function([x], x.reshape((2, 1)).mean())
    assert fixed(np.ones(4)) == 1
    with pytest.raises(ValueError, match="in one process"):
        fixed(np.ones(4), check_against_theano=True)
    assert fixed(np.ones(4)) == 1


def test_not_a_number_is_compared_too(two):
    x = T.dvector("x")
    function = synk.function([x], [(T.log(x), "gather"), (x.sum(), "sum")])
    wrong = synk.function([x], T.switch(T.eq(x.shape[0], 3), x.sum(), np.nan))
    with np.errstate(all="ignore"):
        function([-1.0, 0.0, 1.0], check_against_theano=True)
        with pytest.raises(ValueError, match="by up to inf"):
            wrong([1.0, 2.0, 3.0], check_against_theano=True)
