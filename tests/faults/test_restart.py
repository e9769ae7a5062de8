"""Replacement of dead workers by `fork(restart_workers=True)`: state of the new rank, and reports to the user."""

import contextlib
import logging
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from backend import T, theano
from comparison import assert_close
from deadline import scaled
from every_function import build, built, check_everything, restarted
from fault_ops import KILL, LEAVE, LONG_SLEEP, NOTHING, RAISE, SEGFAULT, Copy
from process_state import is_running, kill, shared_bytes, shared_links, shared_sizes, worker_pids

import synkhronos as synk


@pytest.mark.parametrize("rank", [1, 2])
def test_an_idle_worker_dies(restarting, rank, caplog):
    function, _ = restarting
    by_rank = worker_pids()[rank - 1]
    kill(by_rank)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "synkhronos"):
        error = restarted(function, np.ones(6))
    assert time.monotonic() - began < scaled(3)
    died = error.__cause__
    assert isinstance(died, synk.WorkerDied)
    assert error.ranks == (died.rank,)
    assert (died.pid, died.exitcode) == (by_rank, -signal.SIGKILL)
    assert "broadcast" in str(error)
    assert f"rank {died.rank}" in str(error)
    assert [one for one in caplog.records if one.name == "synkhronos" and "replaced" in one.getMessage()]
    fresh = worker_pids()
    assert len(fresh) == 2
    assert by_rank not in fresh
    check_everything(3)


@pytest.mark.parametrize("kind", [KILL, SEGFAULT, LEAVE])
def test_a_worker_dies_while_it_computes(restarting, kind):
    function, fault = restarting
    synk.set_value(1, fault, kind)
    assert restarted(function, np.ones(6)).ranks == (1,)
    assert function(np.ones(6)) == 6  # the new rank has the controller's value of the variable
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
    restarted(function, np.ones(6))
    assert time.monotonic() - killed[0] < scaled(3)
    check_everything(3)


def test_both_workers_die_at_once(restarting):
    function, _ = restarting
    kill(*worker_pids())
    assert sorted(restarted(function, np.ones(6)).ranks) == [1, 2]
    check_everything(3)


def test_a_worker_dies_in_a_collective(restarting):
    w = built["w"]
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


class Deadly(Copy):
    """An operation whose unpickling kills a process other than the controller, once for each file in a folder."""

    __props__ = ("folder", "pid")

    def __init__(self, folder):
        self.folder = str(folder)
        self.pid = os.getpid()

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.getpid() != self.pid:
            for name in os.listdir(self.folder):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(self.folder, name))
                    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_dies_while_functions_are_distributed(restarting, tmp_path):
    function, _ = restarting
    x, v = T.dvector("x"), theano.shared(np.full(2, 3.0), "v")
    (tmp_path / "once").touch()
    deadly = synk.function([x], ((Deadly(tmp_path)(x) * v.sum()).sum(), "sum"))
    also = synk.function([x], ((x * v.sum()).sum(), "sum"))
    restarted(synk.distribute)
    assert deadly(np.ones(6)) == 36
    assert also(np.ones(6)) == 36
    synk.broadcast(v, np.ones(2))
    assert deadly(np.ones(6)) == also(np.ones(6)) == 12
    assert function(np.ones(6)) == 6
    check_everything(3)


def test_a_new_worker_has_data_of_every_kind(restarting, tmp_path):
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
    restarted(function, unseen)
    data[0][0] = 5
    data[2].set_length(9000)
    assert [function(each) for each in data] == [50, *expected[1:]]
    assert (function(grown), function(unseen)) == (3, 8)
    after = synk.data(np.ones(77))
    assert function(after) == 77
    assert function(data[1], batch=[999, 0, 1]) == 1000
    del grown, data
    assert function(after) == 77


def test_shared_variables_of_a_new_worker_have_the_controllers_values(restarting):
    w = built["w"]
    for rank in range(3):
        synk.set_value(rank, w, np.full(3, rank + 10.0))
    kill(worker_pids()[0])
    error = restarted(synk.get_shapes, w)
    (dead,) = error.ranks
    expected = [10.0, 11.0, 12.0]
    expected[dead] = 10.0
    assert error.lost == []
    assert synk.gather(w)[:, 0].tolist() == expected


def test_random_streams_differ_on_all_ranks(restarting):
    for _ in range(2):
        kill(worker_pids()[0])
        restarted(built["random"])
        for draws in built["random"]():
            assert len(np.unique(draws)) == 12


def test_equal_random_streams_stay_equal(no_session):
    synk.fork(3, restart_workers=True, replicate_rng=True)
    build()
    built["random"]()
    kill(worker_pids()[0])
    restarted(synk.gather, built["w"])
    for draws in built["random"]():
        assert len(np.unique(draws)) == 4


@pytest.mark.parametrize("master_rank", [1, 2])
def test_a_controller_with_another_rank(no_session, master_rank):
    synk.fork(3, master_rank=master_rank, restart_workers=True)
    function, fault = build()
    rank = 3 - master_rank
    synk.set_value(0, fault, KILL)
    assert restarted(function, np.ones(6)).ranks == (0,)
    synk.set_value(rank, fault, KILL)
    assert restarted(function, np.ones(6)).ranks == (rank,)
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
    restarted(waiting, np.ones(6))
    assert waiting(np.ones(6)) == 18
    assert old(np.ones(6), num_slices=2) == 12
    synk.broadcast(v, np.full(2, 2.0))
    assert waiting(np.ones(6)) == 30
    assert old(np.ones(6)) == 24


def test_a_worker_that_raises_is_not_replaced(restarting):
    function, fault = restarting
    pids = worker_pids()
    synk.set_value(2, fault, RAISE)
    with pytest.raises(synk.WorkerError, match="rank 2"):
        function(np.ones(6))
    assert worker_pids() == pids
    synk.broadcast(fault, NOTHING)
    kill(pids[0])
    restarted(function, np.ones(6))
    check_everything(3)


def test_a_function_that_always_kills_workers_breaks_the_session(no_session, tmp_path):
    """The library does not replace workers without end if loading a function kills each of them."""
    synk.fork(2, restart_workers=True)
    build()
    x = T.dvector("x")
    for i in range(100):
        (tmp_path / str(i)).touch()
    deadly = synk.function([x], (Deadly(tmp_path)(x).sum(), "sum"))
    for _ in range(3):
        with pytest.raises((synk.WorkerRestarted, synk.WorkerDied)):
            deadly(np.ones(6))
    synk.close()
    assert worker_pids() == []


def test_a_new_worker_dies_as_soon_as_it_is_born(no_session):
    """A new worker that dies at its start is replaced, too."""
    synk.fork(3, restart_workers=True)
    function, _ = build()
    left = [1]
    controller = os.getpid()

    def die():
        if os.getppid() == controller and left and built.get("armed"):
            os.kill(os.getpid(), signal.SIGKILL)

    def count():
        if built.get("armed"):
            built["armed"] -= 1

    os.register_at_fork(after_in_child=die, after_in_parent=count)
    built["armed"] = 1
    kill(worker_pids()[0])
    assert set(restarted(function, np.ones(6)).ranks) <= {1, 2}
    assert not built["armed"]
    left.clear()
    check_everything(3)


class Locking(Copy):
    """An operation that stores locks, which cannot be pickled, in old and new attributes when it runs."""

    def __init__(self):
        self.factor = 2.0
        self.lock = None
        self.locks = {}

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
def test_state_that_an_op_stores_when_it_runs_is_not_sent(what, no_session):
    """The state is not sent to a second session, to a new worker, or with a later function of the same operation."""
    x, values = T.dmatrix("x"), np.arange(1.0, 15).reshape(7, 2)
    expression = OPS_WITH_STATE[what](x)
    expected = theano.function([x], OPS_WITH_STATE[what](x), mode="FAST_COMPILE")(values)
    synk.fork(3, restart_workers=True)
    function = synk.function([x], expression, exact=True, mode="FAST_COMPILE")
    assert_close(function(values), expected)
    later = synk.function([x], [expression, x.sum()], exact=True, mode="FAST_COMPILE")
    assert_close(later(values)[0], expected)
    kill(worker_pids()[0])
    restarted(function, values)
    assert_close(function(values), expected)
    synk.close()
    synk.fork(2)
    assert_close(function(values), expected)
    assert_close(later(values)[0], expected)


def test_attributes_of_an_op_that_changed_between_sessions_are_sent(no_session):
    x, op = T.dmatrix("x"), Locking()
    synk.fork(2)
    function = synk.function([x], op(x), exact=True, mode="FAST_COMPILE")
    assert_close(function(np.ones((4, 2))), 2 * np.ones((4, 2)))
    synk.close()
    op.factor, op.note = 3.0, "new"
    synk.fork(2)
    assert_close(function(np.ones((4, 2))), 3 * np.ones((4, 2)))


class Refusing(Locking):
    """An operation that can be pickled only before it runs."""

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


def test_new_workers_inherit_no_scratch_memory(no_session):
    """A new worker does not keep scratch memory that the controller had at the fork and has freed since."""
    synk.fork(3, restart_workers=True)
    function, _ = build()
    double = built["step"]
    for n in (100_000, 200_000):
        double(np.ones((n, 2)))
    old = worker_pids()
    kill(old[0])
    restarted(function, np.ones(6))
    (survivor,) = set(worker_pids()) & set(old)
    (fresh,) = set(worker_pids()) - set(old)
    for n in (300_000, 400_000):  # all scratch memory grows, and the old memory should be freed
        total, _ = double(np.ones((n, 2)))
        assert total == 2 * n
    assert shared_bytes(fresh) <= shared_bytes(survivor) + 65536
    assert len(shared_links(fresh)) <= len(shared_links(survivor))


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
            restarted(function, data)
            assert function(data) == 1000
            synk.broadcast(built["w"], np.ones(10_000))
            synk.all_reduce(built["w"])

    def held():
        children = worker_pids()
        return np.array(
            [
                len(children),
                len(os.listdir("/proc/self/fd")),
                len(shared_sizes(os.getpid())),
                max(len(shared_sizes(pid)) for pid in children),
                max(len(os.listdir(f"/proc/{pid}/fd")) for pid in children),
                threading.active_count(),
            ]
        )

    die(6)
    synk.broadcast(fault, NOTHING)
    before = held()
    die(14)
    synk.broadcast(fault, NOTHING)
    after = held()
    assert before[0] == after[0] == 2
    assert (after - before <= [0, 0, 1, 1, 1, 0]).all(), (before, after)
    synk.broadcast(built["w"], np.zeros(3))
    check_everything(3)
