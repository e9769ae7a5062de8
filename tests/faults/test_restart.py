"""`fork(restart_workers=True)`: a dead worker is replaced, its rank has all that it had, and the user is told."""

import functools
import logging
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from backend import MRG_RandomStreams, RandomStreams, T, theano
from comparison import assert_close
from fault_op import KILL, LEAVE, LONG_SLEEP, NOTHING, RAISE, SEGFAULT, Fault
from process_state import is_running, wait_until, worker_pids

import synkhronos as synk

_built = {}


def build():
    """Functions of every kind, shared variables of every kind; all ranks as they should be."""
    if not _built:
        x, m = T.dvector("x"), T.dmatrix("m")
        fault, w = theano.shared(np.int64(NOTHING), "fault"), theano.shared(np.zeros(3), "w")
        rows, count = theano.shared(np.zeros((1, 2)), "rows"), theano.shared(np.int64(0), "count")
        mrg = MRG_RandomStreams(7).uniform((4,))
        twister = RandomStreams(7).uniform((4,))
        _built.update(
            fault=fault,
            w=w,
            rows=rows,
            count=count,
            f=synk.function([x], (Fault()(x, fault).sum(), "sum"), updates=[(count, count + 1)]),
            step=synk.function([m], [(m.sum(), "sum"), (m * 2, "gather")], updates=[(w, w + m.sum())]),
            picked=synk.function([], (rows, "gather"), sliceable_shareds=[rows]),
            random=synk.function([], [(mrg, "gather"), (twister, "gather")]),
        )
    synk.distribute()
    synk.broadcast([_built["fault"], _built["w"]], [NOTHING, np.zeros(3)])
    return _built["f"], _built["fault"]


def check_everything(n_ranks):
    """Every function in every variant, and every collective, give the right results on every rank."""
    f, step, picked, w, rows = (_built[name] for name in ("f", "step", "picked", "w", "rows"))
    values = np.arange(22.0).reshape(11, 2)
    assert f(np.ones(10)) == 10
    assert f(np.arange(10.0), batch=[9, 0, 9], num_slices=2) == 18
    for arguments in ({}, {"num_slices": 3}, {"batch": slice(2, 9)}, {"batch": [8, 1, 1], "num_slices": 2}):
        synk.broadcast(w, np.zeros(3))
        total, doubled = step(values, **arguments)
        chosen = values if "batch" not in arguments else values[arguments["batch"]]
        assert total == chosen.sum()
        np.testing.assert_array_equal(doubled, 2 * chosen)
        if arguments == {}:
            shares = [part.sum() for part in np.array_split(values, n_ranks)]
            np.testing.assert_array_equal(synk.gather(w)[:, 0], shares)
    synk.scatter(rows, values)
    np.testing.assert_array_equal(picked(), values)
    parts = np.array_split(values, n_ranks)
    np.testing.assert_array_equal(picked(batch_s=slice(0, 2)), np.concatenate([part[:2] for part in parts]))
    np.testing.assert_array_equal(picked(batch_s=[1, 0, 1]), np.concatenate([part[[1, 0, 1]] for part in parts]))
    synk.all_gather(rows)
    np.testing.assert_array_equal(synk.gather(rows), [values] * n_ranks)
    for rank in range(n_ranks):
        synk.set_value(rank, w, np.full(3, rank + 1.0))
    synk.all_reduce(w, op="sum")
    np.testing.assert_array_equal(synk.gather(w), np.full((n_ranks, 3), n_ranks * (n_ranks + 1) / 2))


@pytest.fixture
def restarting(synchronize):
    """A session of three ranks that replaces its workers."""
    synchronize(3, restart_workers=True)
    return build()


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_running, pids)), 2)


@pytest.mark.parametrize("rank", [1, 2])
def test_an_idle_worker_dies(restarting, rank, caplog):
    function, _ = restarting
    by_rank = worker_pids()[rank - 1]
    kill(by_rank)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "synkhronos"), pytest.raises(synk.WorkerRestarted) as caught:
        function(np.ones(6))
    assert time.monotonic() - began < 3
    assert isinstance(caught.value.__cause__, synk.WorkerDied)
    died = caught.value.__cause__
    assert caught.value.ranks == (died.rank,)
    assert (died.pid, died.exitcode) == (by_rank, -signal.SIGKILL)
    assert "broadcast" in str(caught.value)
    assert f"rank {died.rank}" in str(caught.value)
    assert [one for one in caplog.records if one.name == "synkhronos" and "replaced" in one.getMessage()]
    fresh = worker_pids()
    assert len(fresh) == 2
    assert by_rank not in fresh
    check_everything(3)


@pytest.mark.parametrize("kind", [KILL, SEGFAULT, LEAVE])
def test_a_worker_dies_while_it_computes(restarting, kind):
    function, fault = restarting
    synk.set_value(1, fault, kind)
    with pytest.raises(synk.WorkerRestarted) as caught:
        function(np.ones(6))
    assert caught.value.ranks == (1,)
    assert function(np.ones(6)) == 6  # the new rank has the master's value of the variable
    check_everything(3)


def test_a_computing_worker_is_killed(restarting):
    function, fault = restarting
    synk.set_value(2, fault, LONG_SLEEP)
    before = worker_pids()
    killed = []

    def act():
        killed.append(time.monotonic())
        for pid in before:
            if psutil.Process(pid).status() == psutil.STATUS_SLEEPING:
                os.kill(pid, signal.SIGKILL)

    threading.Timer(0.3, act).start()
    with pytest.raises(synk.WorkerRestarted):
        function(np.ones(6))
    assert time.monotonic() - killed[0] < 3
    check_everything(3)


def test_both_workers_die_at_once(restarting):
    function, _ = restarting
    kill(*worker_pids())
    with pytest.raises(synk.WorkerRestarted) as caught:
        function(np.ones(6))
    assert sorted(caught.value.ranks) == [1, 2]
    check_everything(3)


def test_a_worker_dies_in_a_collective(restarting):
    w = _built["w"]
    synk.broadcast(w, np.ones(4_000_000))
    pids = worker_pids()
    threading.Timer(0.05, os.kill, (pids[0], signal.SIGKILL)).start()
    with pytest.raises(synk.WorkerRestarted):
        while True:
            synk.all_reduce(w, op="max")
    assert not is_running(pids[0])
    assert synk.gather(w).shape == (3, 4_000_000)
    synk.broadcast(w, np.ones(3))
    check_everything(3)


class LoadedOnce(theano.Op):
    """An op whose first unpickling in any other process than the master ends that process."""

    __props__ = ("file", "pid")

    def __init__(self, file):
        self.file = file
        self.pid = os.getpid()

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.getpid() != self.pid:
            try:
                os.close(os.open(self.file, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0].copy()


def test_a_worker_dies_while_functions_are_distributed(restarting, tmp_path):
    function, _ = restarting
    x, v = T.dvector("x"), theano.shared(np.full(2, 3.0), "v")
    deadly = synk.function([x], ((LoadedOnce(str(tmp_path / "once"))(x) * v.sum()).sum(), "sum"))
    also = synk.function([x], ((x * v.sum()).sum(), "sum"))
    with pytest.raises(synk.WorkerRestarted):
        synk.distribute()
    assert deadly(np.ones(6)) == 36
    assert also(np.ones(6)) == 36
    synk.broadcast(v, np.ones(2))
    assert deadly(np.ones(6)) == also(np.ones(6)) == 12
    assert function(np.ones(6)) == 6
    check_everything(3)


def test_data_of_every_kind_are_there(restarting, tmp_path):
    function, _ = restarting
    np.arange(1000.0).tofile(tmp_path / "file")
    file = np.memmap(tmp_path / "file", "float64", "r")
    data = [synk.data(np.arange(10.0)), synk.data(file), synk.data(np.arange(5000.0), oversize=2)]
    expected = [45.0, 499500.0, 12497500.0]
    assert [function(each) for each in data] == expected
    grown = synk.data(np.arange(3.0))
    grown.set_length(100_000)
    unseen = synk.data(np.full(4, 2.0))
    kill(worker_pids()[1])
    with pytest.raises(synk.WorkerRestarted):
        function(unseen)
    data[0][0] = 5
    data[2].set_length(9000)
    assert [function(each) for each in data] == [50, *expected[1:]]
    assert (function(grown), function(unseen)) == (3, 8)
    after = synk.data(np.ones(77))
    assert function(after) == 77
    assert function(data[1], batch=[999, 0, 1]) == 1000
    del grown, data
    assert function(after) == 77


def test_shared_variables_have_the_values_of_the_master(restarting):
    w = _built["w"]
    for rank in range(3):
        synk.set_value(rank, w, np.full(3, rank + 10.0))
    kill(worker_pids()[0])
    with pytest.raises(synk.WorkerRestarted) as caught:
        synk.get_shapes(w)
    (dead,) = caught.value.ranks
    expected = [10.0, 11.0, 12.0]
    expected[dead] = 10.0
    assert caught.value.lost == []
    assert synk.gather(w)[:, 0].tolist() == expected


def replace_worker(rank=1):
    """Have a worker die and be replaced; returns the error."""
    synk.set_value(rank, _built["fault"], KILL)
    with pytest.raises(synk.WorkerRestarted) as caught:
        _built["f"](np.ones(6))
    assert caught.value.ranks == (rank,)
    return caught.value


@functools.cache
def using_rows(exact):
    """A function of a scattered variable, and the variable; float32 holds the integers that are scattered."""
    rows = theano.shared(np.zeros((1, 3), "float32"), f"rows of {'exact' if exact else 'plain'}")
    total = rows.sum(axis=0) if exact else (rows.sum(axis=0), "sum")
    return synk.function([], total, sliceable_shareds=[rows], exact=exact), rows


X = np.arange(45, dtype="float32").reshape(15, 3)
COLUMNS, INTEGERS = np.asfortranarray(X), X.astype("int16")
SCATTERED = {
    "an array": (lambda: (X, {}), X),
    "a view": (lambda: (X[2:13:2], {}), X[2:13:2]),
    "a view in another order": (lambda: (COLUMNS[1:, ::-1], {}), X[1:, ::-1]),
    "an array of another dtype": (lambda: (INTEGERS, {}), X),
    "a slice of an array": (lambda: (X, {"batch": slice(3, 12)}), X[3:12]),
    "rows that a list picks": (lambda: (X, {"batch": [14, 0, 0, 7, 3, 1]}), X[[14, 0, 0, 7, 3, 1]]),
    "rows that a mask picks": (lambda: (X, {"batch": X[:, 0] > 9}), X[X[:, 0] > 9]),
    "fewer rows than ranks": (lambda: (X[:2], {}), X[:2]),
}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "plain"])
@pytest.mark.parametrize("kind", SCATTERED)
def test_scattered_rows_are_restored(restarting, exact, kind):
    function, rows = using_rows(exact)
    make, expected = SCATTERED[kind]
    values, options = make()
    synk.scatter(rows, values, **options)
    del values
    parts = [synk.get_value(rank, rows) for rank in range(3)]
    for rank in (1, 2):
        error = replace_worker(rank)
        assert error.lost == []
        assert "the next call will work" in str(error)
        for part, again in zip(parts, [synk.get_value(rank, rows) for rank in range(3)]):
            np.testing.assert_array_equal(part, again)
        np.testing.assert_array_equal(synk.gather(rows, nd_up=0), expected)
        if not exact or all(map(len, parts)):
            np.testing.assert_array_equal(function(), expected.sum(axis=0))


def test_scattered_data_and_rows_that_were_set_are_restored(restarting):
    function, rows = using_rows(False)
    data = synk.data(X)
    synk.scatter(rows, data, batch=[1, 3, 5, 7])
    replace_worker(2)
    np.testing.assert_array_equal(synk.gather(rows, nd_up=0), X[[1, 3, 5, 7]])
    own = X[9:] * 2
    synk.set_value(1, rows, own, batch=slice(1, 3))
    replace_worker(1)
    np.testing.assert_array_equal(synk.get_value(1, rows), own[1:3])
    with synk.sequence():
        synk.scatter(rows, X[:4])
        synk.scatter(rows, X)
    kill(*worker_pids())
    with pytest.raises(synk.WorkerRestarted):
        function()
    np.testing.assert_array_equal(function(), X.sum(axis=0))


def scatter_what_is_gone(rows):
    synk.scatter(rows, X * 2)


def scatter_and_change_the_array(rows):
    values = X.copy()
    synk.scatter(rows, values)
    _built["values"] = values
    values[6, 1] += 1


def scatter_and_shrink_data(rows):
    _built["values"] = data = synk.data(X)
    synk.scatter(rows, data)
    data.set_length(2)


def scatter_and_update(rows):
    synk.scatter(rows, X)
    if "updating" not in _built:
        _built["updating"] = synk.function([], (rows.sum(), "sum"), updates=[(rows, rows * 2)])
    _built["updating"]()


def set_what_is_gone(rows):
    synk.scatter(rows, X)
    synk.set_value(1, rows, X * 3)


def interrupted_scatter(rows):
    synk.broadcast(rows, X)
    kill(worker_pids()[0])
    with pytest.raises(synk.WorkerRestarted) as caught:
        synk.scatter(rows, X)
    assert caught.value.lost == [rows]
    return caught.value.ranks[0]


LOSSES = [
    scatter_what_is_gone,
    scatter_and_change_the_array,
    scatter_and_shrink_data,
    scatter_and_update,
    set_what_is_gone,
    interrupted_scatter,
]


@pytest.mark.parametrize("lose", LOSSES)
def test_what_only_the_dead_worker_had_is_lost(restarting, lose):
    function, rows = using_rows(False)
    rank = lose(rows)
    if rank is None:
        error, rank = replace_worker(1), 1
        assert error.lost == [rows]
        assert 'its rows of "rows of plain" are lost' in str(error)
    uses = [
        function,
        lambda: synk.gather(rows),
        lambda: synk.get_value(rank, rows),
        lambda: synk.get_shapes(rows),
        lambda: synk.get_lengths(rows),
        lambda: synk.check_replicas(rows),
        lambda: synk.all_gather(rows),
        lambda: synk.all_reduce(rows),
        lambda: synk.reduce(rows),
    ]
    for use in uses:
        with pytest.raises(synk.SessionError, match=f'the rows of "rows of plain" that rank {rank} had are lost'):
            use()
    with pytest.raises(synk.SessionError, match="had are lost"), synk.sequence():
        synk.all_reduce(rows)
    assert len(synk.get_value(3 - rank, rows)) > 0  # the rows of other ranks are there
    assert _built["f"](np.ones(6)) == 6
    synk.set_value(3 - rank, rows, X)
    with pytest.raises(synk.SessionError, match="had are lost"):
        function()
    with synk.sequence():
        synk.scatter(rows, X)
        synk.set_value(rank, rows, X[5 * rank : 5 * rank + 5])
    np.testing.assert_array_equal(function(), X.sum(axis=0))
    assert replace_worker(1).lost == []
    np.testing.assert_array_equal(function(), X.sum(axis=0))


@pytest.mark.parametrize("again", ["set", "broadcast"])
def test_lost_rows_are_set_again(restarting, again):
    function, rows = using_rows(False)
    scatter_what_is_gone(rows)
    replace_worker(2)
    part = np.ones((2, 3), "float32")
    if again == "set":
        synk.set_value(2, rows, part)
        np.testing.assert_array_equal(function(), X[:10].sum(axis=0) * 2 + 2)
        assert replace_worker(2).lost == []  # `part` is there
        np.testing.assert_array_equal(function(), X[:10].sum(axis=0) * 2 + 2)
    else:
        synk.broadcast(rows, part)
        np.testing.assert_array_equal(function(), [6, 6, 6])
    synk.broadcast(rows, part)
    assert replace_worker(1).lost == []
    np.testing.assert_array_equal(function(), [6, 6, 6])


@pytest.mark.parametrize("combine", [synk.all_reduce, synk.all_gather])
def test_what_collectives_have_made_equal_is_not_lost(restarting, combine):
    _, rows = using_rows(False)
    synk.scatter(rows, X * 2)
    combine(rows)
    expected = synk.get_value(0, rows)
    assert replace_worker(1).lost == []
    for rank in range(3):
        np.testing.assert_array_equal(synk.get_value(rank, rows), expected)


def test_an_exact_update_of_scattered_rows_is_lost(restarting):
    rows = theano.shared(np.zeros((1, 3), "float32"), "exact rows")
    function = synk.function([], rows.sum(), updates=[(rows, rows * 2)], sliceable_shareds=[rows], exact=True)
    synk.scatter(rows, X)
    assert replace_worker(1).lost == []
    assert function() == X.sum()
    assert replace_worker(1).lost == [rows]
    with pytest.raises(synk.SessionError, match='"exact rows" that rank 1 had are lost'):
        function()
    synk.scatter(rows, X)
    assert function() == X.sum()


def test_random_streams_differ_on_all_ranks(restarting):
    for _ in range(2):
        kill(worker_pids()[0])
        with pytest.raises(synk.WorkerRestarted):
            _built["random"]()
        for draws in _built["random"]():
            assert len(np.unique(draws)) == 12


def test_equal_random_streams_stay_equal(no_session):
    synk.fork(3, restart_workers=True, replicate_rng=True)
    build()
    _built["random"]()
    kill(worker_pids()[0])
    with pytest.raises(synk.WorkerRestarted):
        synk.gather(_built["w"])
    for draws in _built["random"]():
        assert len(np.unique(draws)) == 4


@pytest.mark.parametrize("master_rank", [1, 2])
def test_another_rank_is_the_master(no_session, master_rank):
    synk.fork(3, master_rank=master_rank, restart_workers=True)
    function, fault = build()
    rank = 3 - master_rank
    synk.set_value(0, fault, KILL)
    with pytest.raises(synk.WorkerRestarted) as caught:
        function(np.ones(6))
    assert caught.value.ranks == (0,)
    synk.set_value(rank, fault, KILL)
    with pytest.raises(synk.WorkerRestarted) as caught:
        function(np.ones(6))
    assert caught.value.ranks == (rank,)
    check_everything(3)


def test_functions_built_and_dropped_around_a_death(restarting):
    x, v = T.dvector("x"), theano.shared(np.ones(2), "v")
    old = synk.function([x], ((x * v.sum()).sum(), "sum"))
    dropped = synk.function([x], ((x * v.sum() * 3).sum(), "sum"))
    assert old(np.ones(6)) == 12
    assert dropped(np.ones(6)) == 36
    del dropped
    waiting = synk.function([x], ((x + v.sum()).sum(), "sum"))
    kill(*worker_pids())
    with pytest.raises(synk.WorkerRestarted):
        waiting(np.ones(6))
    assert waiting(np.ones(6)) == 18
    assert old(np.ones(6), num_slices=2) == 12
    synk.broadcast(v, np.full(2, 2.0))
    assert waiting(np.ones(6)) == 30
    assert old(np.ones(6)) == 24


def test_an_exception_is_no_death(restarting):
    function, fault = restarting
    pids = worker_pids()
    synk.set_value(2, fault, RAISE)
    with pytest.raises(synk.WorkerError, match="rank 2"):
        function(np.ones(6))
    assert worker_pids() == pids
    synk.broadcast(fault, NOTHING)
    kill(pids[0])
    with pytest.raises(synk.WorkerRestarted):
        function(np.ones(6))
    check_everything(3)


def test_what_always_kills_ends_in_a_broken_session(no_session):
    """A function that no process survives loading is not tried for ever."""
    synk.fork(2, restart_workers=True)
    build()
    x = T.dvector("x")
    deadly = synk.function([x], (Murderous()(x).sum(), "sum"))
    for _ in range(3):
        with pytest.raises((synk.WorkerRestarted, synk.WorkerDied)):
            deadly(np.ones(6))
    synk.close()
    assert worker_pids() == []


class Murderous(LoadedOnce):
    """An op that no other process than the one that made it survives unpickling."""

    def __init__(self):
        super().__init__("/nonexistent")

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.getpid() != self.pid:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_new_worker_dies_as_soon_as_it_is_born(no_session):
    """Which the next try replaces as well."""
    synk.fork(3, restart_workers=True)
    function, _ = build()
    left = [1]
    master = os.getpid()

    def die():
        if os.getppid() == master and left and _built.get("armed"):
            os.kill(os.getpid(), signal.SIGKILL)

    def count():
        if _built.get("armed"):
            _built["armed"] -= 1

    os.register_at_fork(after_in_child=die, after_in_parent=count)
    _built["armed"] = 1
    kill(worker_pids()[0])
    with pytest.raises(synk.WorkerRestarted) as caught:
        function(np.ones(6))
    assert set(caught.value.ranks) <= {1, 2}
    assert not _built["armed"]
    left.clear()
    check_everything(3)


class Locking(theano.Op):
    """Gathers things that cannot be pickled when it runs: in attributes that it had, and in one that it had not."""

    __props__ = ()

    def __init__(self):
        self.factor = 2.0
        self.lock = None
        self.locks = {}

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        self.lock = self.late = self.locks[len(self.locks)] = threading.Lock()
        outputs[0][0] = inputs[0] * self.factor

    def infer_shape(self, *arguments):
        return [arguments[-1][0]]


OPS_WITH_STATE = {
    "the user's own": lambda x: Locking()(x),
    "the gradient of a product": lambda x: T.grad(T.prod(x, axis=1).sum(), x),
    "a maximum": lambda x: T.max(x, axis=1),
    "elementwise": lambda x: T.switch(T.tanh(x) > 0, T.gammaln(x), x),
    "in a scan": lambda x: theano.scan(lambda row: T.prod(row) + Locking()(row), sequences=[x])[0],
}


@pytest.mark.parametrize("what", OPS_WITH_STATE)
def test_what_an_op_gathers_when_it_runs_does_not_travel(what, no_session):
    """To a second session, to a replaced worker, and in a function that is built of the same Op later."""
    x, values = T.dmatrix("x"), np.arange(1.0, 15).reshape(7, 2)
    expression = OPS_WITH_STATE[what](x)
    expected = theano.function([x], OPS_WITH_STATE[what](x), mode="FAST_COMPILE")(values)
    synk.fork(3, restart_workers=True)
    function = synk.function([x], expression, exact=True, mode="FAST_COMPILE")
    assert_close(function(values), expected)
    later = synk.function([x], [expression, x.sum()], exact=True, mode="FAST_COMPILE")
    assert_close(later(values)[0], expected)
    kill(worker_pids()[0])
    with pytest.raises(synk.WorkerRestarted):
        function(values)
    assert_close(function(values), expected)
    synk.close()
    synk.fork(2)
    assert_close(function(values), expected)
    assert_close(later(values)[0], expected)


def test_values_that_were_given_to_an_op_meanwhile_travel(no_session):
    x, op = T.dmatrix("x"), Locking()
    synk.fork(2)
    function = synk.function([x], op(x), exact=True, mode="FAST_COMPILE")
    assert_close(function(np.ones((4, 2))), 2 * np.ones((4, 2)))
    synk.close()
    op.factor, op.note = 3.0, "new"
    synk.fork(2)
    assert_close(function(np.ones((4, 2))), 3 * np.ones((4, 2)))


class Refusing(Locking):
    """Can be pickled only once."""

    def __getstate__(self):
        if self.locks:
            raise ValueError("not a second time")
        return self.__dict__


def test_the_error_says_why_a_worker_could_not_be_replaced(no_session):
    synk.fork(2, restart_workers=True)
    x = T.dmatrix("x")
    function = synk.function([x], Refusing()(x), exact=True, mode="FAST_COMPILE")
    function(np.ones((4, 2)))
    kill(*worker_pids())
    with pytest.raises(synk.WorkerDied, match=r"it could not be replaced: .*not a second time.*call synkhronos.close"):
        function(np.ones((4, 2)))
    with pytest.raises(synk.SessionError, match=r"it could not be replaced: .*not a second time"):
        function(np.ones((4, 2)))


def memory_of(pid):
    with open(f"/proc/{pid}/maps") as maps:
        shared = [line for line in maps if "/memfd:synkhronos" in line]
    sizes = [int(high, 16) - int(low, 16) for low, high in (line.split()[0].split("-") for line in shared)]
    return len(sizes), sum(sizes)


def descriptors_of(pid):
    targets = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return [target for target in targets if "/memfd:synkhronos" in target]


def test_new_workers_inherit_no_scratch_memory(no_session):
    """What the master holds for a moment is not held by a new worker for ever."""
    synk.fork(3, restart_workers=True)
    function, _ = build()
    double = _built["step"]
    for n in (100_000, 200_000):
        double(np.ones((n, 2)))
    old = worker_pids()
    kill(old[0])
    with pytest.raises(synk.WorkerRestarted):
        function(np.ones(6))
    (survivor,) = set(worker_pids()) & set(old)
    (fresh,) = set(worker_pids()) - set(old)
    for n in (300_000, 400_000):  # all scratch memory grows, and the old one should go
        total, _ = double(np.ones((n, 2)))
        assert total == 2 * n
    assert memory_of(fresh)[1] <= memory_of(survivor)[1] + 65536
    assert len(descriptors_of(fresh)) <= len(descriptors_of(survivor))


@pytest.mark.slow
def test_many_deaths_leave_nothing_behind(no_session):
    synk.fork(3, restart_workers=True)
    function, fault = build()
    data = synk.data(np.ones(1000))
    rng = np.random.RandomState(3)

    def die(times):
        for _ in range(times):
            how = rng.randint(3)
            if how == 0:
                kill(worker_pids()[rng.randint(2)])
            elif how == 1:
                synk.set_value(1 + rng.randint(2), fault, KILL)
            else:
                kill(*worker_pids())
            with pytest.raises(synk.WorkerRestarted):
                function(data)
            assert function(data) == 1000
            synk.broadcast(_built["w"], np.ones(10_000))
            synk.all_reduce(_built["w"])

    def held():
        me = psutil.Process()
        children = worker_pids()
        return (
            len(children),
            len(os.listdir("/proc/self/fd")),
            memory_of(me.pid),
            max(memory_of(pid)[0] for pid in children),
            max(len(os.listdir(f"/proc/{pid}/fd")) for pid in children),
            threading.active_count(),
        )

    die(6)
    synk.broadcast(fault, NOTHING)
    before = held()
    die(14)
    synk.broadcast(fault, NOTHING)
    after = held()
    assert before[0] == after[0] == 2
    assert after[1] <= before[1]
    assert after[2][0] <= before[2][0] + 1
    assert after[3] <= before[3] + 1
    assert after[4] <= before[4] + 1
    assert after[5] <= before[5]
    synk.broadcast(_built["w"], np.zeros(3))
    check_everything(3)
