"""Distribution of functions: repeated, on first use, of deep graphs, and with a random stream for each rank."""

import functools
import gc
import sys

import numpy as np
import psutil
import pytest
from backend import MRG_RandomStreams, RandomStreams, T, theano
from comparison import assert_close
from deadline import wait_for
from multinode_sessions import one_machine
from process_state import worker_pids

import synkhronos as synk
from synkhronos._graph import graph as functions

# ---------------------------------------------------------------- repeated distribution


def test_replicas_are_kept_over_distributions(session):
    x = T.dvector("x")
    w, v = theano.shared(np.zeros(2), "w"), theano.shared(1.0, "v")
    add = synk.function([x], updates=[(w, w + x.sum())])
    synk.distribute()
    add(np.ones(session))
    read = synk.function([x], [(x * w.sum() * v, "gather")])
    assert read(np.ones(session))[0].tolist() == [2.0] * session  # `add` has updated w on each rank
    synk.set_value(session - 1, w, np.full(2, 10.0))
    double = synk.function([x], [(x * w[0], "gather")], updates=[(w, w * 2), (v, v + 1)])
    synk.distribute()
    synk.distribute()
    expected = [1.0] * (session - 1) + [10.0]
    assert double(np.ones(session))[0].tolist() == expected
    assert read(np.ones(session))[0].tolist() == [2 * 2 * 2 * value for value in expected]
    assert synk.gather(w)[:, 0].tolist() == [2 * value for value in expected]
    assert synk.gather(v).tolist() == [2.0] * session


def test_a_new_variable_starts_with_the_controllers_value(session):
    x, w = T.dvector("x"), theano.shared(np.zeros(3), "w")
    function = synk.function([x], (x.sum() * w.sum(), None))
    w.set_value(np.arange(3.0))
    function(np.ones(session))
    assert_close(synk.gather(w), [[0, 1, 2]] * session)


def test_variables_of_one_array_have_separate_replicas(session):
    value = np.zeros(3)
    one, two = theano.shared(value, "one"), theano.shared(value, "two")
    function = synk.function([], updates=[(one, one + 1)])
    other = synk.function([], updates=[(two, two + 2)])
    function()
    other()
    synk.all_reduce(one, op="sum")
    assert synk.gather(one).tolist() == [[session] * 3] * session
    assert synk.gather(two).tolist() == [[2] * 3] * session


def test_collectives_distribute_first(session):
    w = theano.shared(np.ones(3), "w")
    kept = synk.function([], updates=[(w, w + 1)])
    synk.all_reduce(w, op="sum")
    assert synk.gather(w).tolist() == [[session] * 3] * session
    assert kept() == []


# ---------------------------------------------------------------- compilations and memory


@pytest.fixture
def compilations(monkeypatch):
    """Return a list that records the name of each compiled function."""
    done = []
    compile_function = functions.compile_function

    def counting(*args, **kwargs):
        done.append(kwargs.get("name"))
        return compile_function(*args, **kwargs)

    monkeypatch.setattr(functions, "compile_function", counting)
    return done


def test_variants_are_compiled_when_they_are_first_needed(two, compilations):
    x, w, data = T.dvector("x"), theano.shared(0.0, "w"), theano.shared(np.arange(6.0), "data")
    plain = synk.function([x], x.sum(), updates=[(w, w + x.sum())])
    assert len(compilations) == 1
    for _ in range(2):
        plain(np.ones(6))
        synk.distribute()
    assert len(compilations) == 1
    for num_slices in (2, 3, 2):
        plain(np.ones(6), num_slices=num_slices)
    assert len(compilations) == 2
    without_updates = synk.function([x], (x.sum(), "sum"))
    assert without_updates(np.ones(6), num_slices=3) == 6
    assert len(compilations) == 3
    picking = synk.function([], (data.sum(), "sum"), sliceable_shareds=[data])
    assert picking() == 30
    assert len(compilations) == 4
    for batch_s in (slice(0, 2), [slice(0, 1)] * 2, None):
        picking(batch_s=batch_s, num_slices=1 if batch_s else 2)
    assert len(compilations) == 5
    for batch_s in ([0, 3], [[1], [2]], np.arange(6) < 3):
        picking(batch_s=batch_s)
    assert len(compilations) == 6
    plain.as_theano(np.ones(2))
    assert len(compilations) == 6


def test_a_new_session_compiles_nothing(no_session, compilations):
    synk.fork(2)
    x = T.dvector("x")
    function = synk.function([x], (x.sum(), "sum"))
    assert function(np.ones(4), num_slices=2) == 4
    synk.close()
    synk.fork(3)
    before = len(compilations)
    assert function(np.ones(4), num_slices=2) == 4
    assert len(compilations) == before
    assert before <= 2


@one_machine("the test inspects workers of one node")
def test_dropped_functions_and_variables_are_released_on_the_workers(two):
    (memory,) = [psutil.Process(pid).memory_info for pid in worker_pids()]
    x = T.dvector("x")
    tick = synk.function([x], (x.sum(), "sum"))
    tick(np.ones(4))

    def use_and_drop():
        big = theano.shared(np.ones(6_000_000), "big")  # 48 MB
        function = synk.function([x], ((x * big[0]).sum(), "sum"), updates=[(big, big * 1)], mode="FAST_COMPILE")
        assert function(np.ones(4)) == 4
        assert memory().rss > before + 40e6

    before = memory().rss
    for _ in range(4):
        use_and_drop()
        gc.collect()
        tick(np.ones(4))
    # the heap keeps one block of the controller, which the worker viewed, and one of the worker's own
    wait_for(lambda: tick(np.ones(4)) == 4 and memory().rss < before + 110e6, "freed memory")


def test_a_variable_that_lives_on_keeps_its_replicas(two):
    x, w = T.dvector("x"), theano.shared(np.zeros(1), "w")

    def round_of(value):
        function = synk.function([x], updates=[(w, w + x.sum())])
        function(np.full(2, value))

    round_of(1.0)
    gc.collect()
    round_of(2.0)
    gc.collect()
    round_of(3.0)
    assert synk.gather(w).ravel().tolist() == [6.0, 6.0]


# ---------------------------------------------------------------- graphs


def test_deep_graphs(two):
    x, w = T.dvector("x"), theano.shared(1.0, "w")
    deep = x
    for i in range(3000):
        deep = T.sin(deep) if i % 2 else T.cos(deep)
    mode = theano.compile.Mode(linker="py", optimizer=None)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(30_000)  # Theano needs it to compile a graph of this depth
    try:
        function = synk.function([x], [(deep * w, "gather")], mode=mode)
    finally:
        sys.setrecursionlimit(limit)
    synk.distribute()
    assert sys.getrecursionlimit() == limit
    expected = values = np.linspace(0, 1, 5)
    for i in range(3000):
        expected = np.sin(expected) if i % 2 else np.cos(expected)
    assert_close(function(values)[0], expected)
    assert_close(function(values, num_slices=2)[0], expected)


@functools.cache
def scanned():
    """Return a function with a loop and its gradient, and the variable that holds the gradient."""
    x, steps = T.dmatrix("x"), T.lscalar("steps")
    w = theano.shared(np.array([0.5, 0.25]), "w")
    states, updates = theano.scan(lambda state: T.tanh(state * w + 1), outputs_info=x, n_steps=steps)
    loss = states[-1].mean()
    gradient = theano.shared(np.zeros(2), "gradient")
    updates = [*updates.items(), (gradient, T.grad(loss, w))]
    return synk.function([x], [loss, (states[-1], "gather")], bcast_inputs=[steps], updates=updates), gradient


@pytest.mark.numba
def test_scan(session):
    function, gradient = scanned()
    values = np.random.RandomState(0).randn(7, 2)
    expected = function.as_theano(values, 5)
    expected_gradient = gradient.get_value()
    for num_slices in (1, 2):
        mean, last = function(values, 5, num_slices=num_slices)
        assert mean == pytest.approx(float(expected[0]))
        assert_close(last, expected[1])
        synk.all_reduce(gradient, weights=function.counts)
        assert_close(gradient.get_value(), expected_gradient)


def test_inputs_and_outputs_of_many_kinds(session):
    x, mask, scale = T.tensor4("x", dtype="float32"), T.bmatrix("mask"), T.zscalar("scale")
    sums, doubled = x.sum(axis=(1, 2, 3)) * mask.sum(axis=1), T.cast(scale, "complex128") * 2
    outputs = [(sums, "gather"), (doubled, None), (mask, "gather")]
    function = synk.function([x, mask], outputs, bcast_inputs=[scale])
    values = np.random.RandomState(0).rand(9, 2, 3, 2).astype("float32")
    flags = np.arange(36, dtype="int8").reshape(9, 4)
    sums, doubled, gathered = function(values, flags, 1 + 2j, num_slices=1)
    assert_close(sums, values.sum(axis=(1, 2, 3)) * flags.sum(axis=1), rtol=1e-4)
    assert doubled == 2 + 4j
    assert gathered.dtype == np.int8
    np.testing.assert_array_equal(gathered, flags)


# ---------------------------------------------------------------- random streams


def draws(kind):
    streams = kind(123)
    return [streams.normal((500,), dtype="float64"), streams.uniform((500,), dtype="float64")]


def drawing(kind):
    """Return a function without inputs that gathers random draws."""
    return synk.function([], [(one.dimshuffle("x", 0), "gather") for one in draws(kind)])


def serial_draws(kind, calls):
    function = theano.function([], draws(kind))
    return [function() for _ in range(calls)]


@pytest.mark.numba
@pytest.mark.parametrize("kind", [MRG_RandomStreams, RandomStreams])
def test_ranks_draw_from_streams_of_their_own(session, kind):
    function = drawing(kind)
    drawn = [function() for _ in range(3)]
    together = np.concatenate([np.stack(one) for one in drawn], axis=1)  # (2, 3 * ranks, 500)
    assert together.shape == (2, 3 * session, 500)
    for one in together:
        assert len(np.unique(one)) == one.size
        correlations = np.corrcoef(one) - np.eye(len(one))
        assert np.abs(correlations).max() < 0.25
    assert abs(together[0].mean()) < 0.15
    assert abs(together[1].mean() - 0.5) < 0.05
    first = [[one[0] for one in call] for call in drawn]
    np.testing.assert_equal(first, serial_draws(kind, 3))  # the controller draws from the user's stream


@pytest.mark.parametrize("kind", [MRG_RandomStreams, RandomStreams])
def test_replicated_streams(synchronize, kind):
    synchronize(3, replicate_rng=True)
    function = drawing(kind)
    for expected in serial_draws(kind, 2):
        np.testing.assert_equal(list(map(list, function())), [[serial] * 3 for serial in expected])


@one_machine("the controller is a rank of the first node")
@pytest.mark.parametrize("kind", [MRG_RandomStreams, RandomStreams])
def test_the_controller_keeps_its_stream_at_any_rank(synchronize, kind):
    synchronize(3, master_rank=2)
    function = drawing(kind)
    drawn = function()[1]
    np.testing.assert_array_equal(drawn[2], serial_draws(kind, 1)[0][1])
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("kind", [MRG_RandomStreams, RandomStreams])
def test_streams_are_moved_once_and_shared_by_functions(synchronize, kind):
    synchronize(3)
    streams = kind(5)
    noise = streams.uniform((50,), dtype="float64")
    first = synk.function([], [(noise.dimshuffle("x", 0), "gather")])
    one = first()[0]
    second = synk.function([], [(noise.dimshuffle("x", 0) * 1, "gather")])
    two, three = second()[0], first()[0]
    drawn = np.concatenate([one, two, three])
    assert len(np.unique(drawn)) == drawn.size  # `second` continues where `first` stopped
    streams = kind(5)
    noise = streams.uniform((50,), dtype="float64")
    serial = theano.function([], noise)
    for draw in (one, two, three):
        np.testing.assert_array_equal(draw[0], serial())


def test_variables_of_one_container_share_a_replica_until_the_last_is_dropped(two):
    """Variables that share a container, as in Lasagne's batch normalisation, share a replica on each rank."""
    x, mean = T.dvector("x"), theano.shared(np.zeros(()), "mean")
    alias = theano.clone(mean, share_inputs=False)
    alias.default_update = 0.5 * alias + x.mean()
    train = synk.function([x], (x.sum() + 0 * alias, "sum"))
    before = synk.function([x], (x * 0 + mean, "gather"))
    assert train([1.0, 3.0]) == 4
    assert synk.gather(mean).tolist() == [1, 3]
    after = synk.function([x], (x * 0 + mean, "gather"))
    assert before([0, 0]).tolist() == after([0, 0]).tolist() == [1, 3]
    del train, before
    gc.collect()
    synk.distribute()
    assert synk.gather(mean).tolist() == [1, 3]
    synk.broadcast(mean, np.asarray(7.0))
    assert after([0, 0]).tolist() == [7, 7]
    later = synk.function([x], (x * 0 + 2 * mean, "gather"))
    assert later([0, 0]).tolist() == [14, 14]
