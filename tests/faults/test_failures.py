"""Exceptions on a rank: the user gets an error that names them, in time, and nothing is left behind."""

import contextlib
import faulthandler
import gc
import os
import signal
import threading
import time
import traceback

import numpy as np
import pytest
from backend import T, on_theano, theano
from deadline import scaled
from fault_ops import EXIT, KILL, LEAVE, LONG_SLEEP, NOTHING, RAISE, RAISE_LATE, SEGFAULT, SLEEP, Fault, Unloadable
from process_state import is_running, shared_memory_names, wait_for_a_call, wait_for_end, worker_pids

import synkhronos as synk
from synkhronos._session.lifecycle import current

_built = {}


@pytest.fixture(autouse=True, scope="module")
def quiet_crashes():
    """Keep the workers that are made to crash here from writing where they were."""
    enabled = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if enabled:
        faulthandler.enable()


@pytest.fixture
def faulty(synchronize):
    """A session of three ranks, a function, and the variable that says what should go wrong on which rank."""
    return make_faulty(synchronize(3))


def make_faulty(n_ranks):
    if not _built:
        x = T.dvector("x")
        fault, seen = theano.shared(np.int64(NOTHING), "fault"), theano.shared(np.zeros(2), "seen")
        _built["fault"], _built["seen"] = fault, seen
        _built["f"] = synk.function([x], (Fault()(x, fault).sum(), "sum"), updates=[(seen, seen + x.sum())])
    synk.distribute()
    synk.broadcast(_built["fault"], NOTHING)
    synk.broadcast(_built["seen"], np.zeros(2))
    assert _built["f"](np.ones(2 * n_ranks)) == 2 * n_ranks
    return _built["f"], _built["fault"]


# ---------------------------------------------------------------- exceptions


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_a_rank_that_raises(faulty, rank, num_slices):
    function, fault = faulty
    synk.set_value(rank, fault, RAISE)
    with pytest.raises(synk.WorkerError, match=rf"rank {rank} \(cpu\).*the fault that the test ordered") as caught:
        function(np.ones(6), num_slices=num_slices)
    assert (caught.value.rank, caught.value.device) == (rank, "cpu")
    assert "broadcast" in str(caught.value)  # how replicas become equal again
    text = "".join(traceback.format_exception(None, caught.value, caught.value.__traceback__))
    assert text.count("the fault that the test ordered, fault 1") == 1
    assert text.count("Apply node that caused the error") == on_theano  # PyTensor prints it only on request
    cause, where = text.split(f"On rank {rank}: Traceback (most recent call last):\n")
    assert "ZeroDivisionError: the fault that the test ordered, fault 1\n" in cause
    assert where.count("in perform") == 1
    assert caught.value.traceback_text.endswith(where.strip() + "\n")
    if rank == 0:
        assert isinstance(caught.value.exception, ZeroDivisionError)
        assert caught.value.exception.__traceback__ is not None
    else:
        assert caught.value.exception is None
    synk.broadcast(fault, NOTHING)
    assert function(np.ones(6), num_slices=num_slices) == 6


class RaisesFrom(theano.Op):
    """An op whose exception has a cause of its own."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        try:
            {}["the key"]
        except KeyError as error:
            raise RuntimeError("no such entry") from error


@pytest.mark.usefixtures("faulty")
def test_what_an_exception_came_from_is_reported_after_it():
    x = T.dvector("x")
    broken = synk.function([x], RaisesFrom()(x).sum(), name="lookup")
    with pytest.raises(synk.WorkerError) as caught:
        broken(np.ones(6))
    text = "".join(traceback.format_exception(None, caught.value, caught.value.__traceback__))
    assert "(cpu) failed in Call lookup: RuntimeError: no such entry\n" in text
    assert text.count("RuntimeError: no such entry") == text.count("KeyError: 'the key'") == 1
    assert text.index("RuntimeError: no") < text.index("KeyError: 'the key'") < text.index("\nwhich led to\n")


@pytest.mark.usefixtures("faulty")
def test_shapes_that_differ_are_reported_once():
    for rank in range(3):
        synk.set_value(rank, _built["seen"], np.zeros(rank + 1))
    with pytest.raises(ValueError, match="all_reduce: seen has the shapes") as caught:
        synk.all_reduce(_built["seen"])
    text = "".join(traceback.format_exception(None, caught.value, caught.value.__traceback__))
    assert text.count("Traceback (most recent call last)") == text.count("Error: ") == 1
    synk.broadcast(_built["seen"], np.zeros(2))


def test_the_first_failure_is_reported(faulty):
    function, fault = faulty
    synk.set_value(1, fault, RAISE_LATE)
    synk.set_value(2, fault, RAISE)
    with pytest.raises(synk.WorkerError) as caught:
        function(np.ones(6))
    assert caught.value.rank == 2
    synk.broadcast(fault, RAISE)
    with pytest.raises(synk.WorkerError) as caught:
        function(np.ones(6))
    assert "may differ" not in str(caught.value)  # all ranks failed alike


def test_failures_in_a_row(faulty):
    function, fault = faulty
    for i in range(30):
        synk.set_value(i % 3, fault, RAISE)
        with pytest.raises(synk.WorkerError):
            function(np.ones(6))
        synk.broadcast(fault, NOTHING)
        synk.all_reduce(_built["seen"], op="max")
        assert function(np.ones(6)) == 6


def test_an_unpickling_that_fails_can_be_tried_again(faulty, tmp_path):
    function, _ = faulty
    file = tmp_path / "there"
    file.touch()
    x, w = T.dvector("x"), theano.shared(np.ones(1), "w")
    difficult = synk.function([x], ((Unloadable(str(file))(x) * w.sum()).sum(), "sum"))
    with pytest.raises(synk.WorkerError, match="cannot be unpickled here"):
        difficult(np.ones(6))
    assert function(np.ones(6)) == 6
    other = synk.function([x], ((x * w.sum()).sum(), "sum"))
    assert other(np.ones(6)) == 6
    file.unlink()
    assert difficult(np.ones(6)) == 6
    synk.broadcast(w, np.full(1, 2.0))
    assert difficult(np.ones(6)) == other(np.ones(6)) == 12


def test_a_function_that_cannot_be_pickled_does_not_harm_others(faulty):
    function, _ = faulty

    class Local(theano.Op):
        __props__ = ()

        def make_node(self, x):
            return theano.Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs):
            outputs[0][0] = inputs[0].copy()

    x, w = T.dvector("x"), theano.shared(np.ones(1), "w")
    stuck = synk.function([x], ((Local()(x) * w.sum()).sum(), "sum"), name="stuck")
    other = synk.function([x], ((x * w.sum()).sum(), "sum"))
    for _ in range(2):
        with pytest.raises(Exception, match="Local"):
            stuck(np.ones(6))
        assert function(np.ones(6)) == 6
        assert other(np.ones(6)) == 6
    assert stuck.as_theano(np.ones(6)) == 6
    del stuck
    gc.collect()
    with contextlib.suppress(TypeError):  # what was dropped before it was distributed is reported once more
        synk.distribute()
    synk.distribute()
    synk.broadcast(w, np.full(1, 2.0))
    assert other(np.ones(6)) == 12


def test_long_tracebacks_arrive_whole(faulty):
    function, fault = faulty
    synk.set_value(2, fault, RAISE)
    name = "long" * 30_000
    x = T.dvector(name)
    verbose = synk.function([x], (Fault()(x + 0, fault).sum(), "sum"))
    synk.set_value(2, fault, RAISE)
    with pytest.raises(synk.WorkerError) as caught:
        verbose(np.ones(6))
    assert "ZeroDivisionError" in str(caught.value)
    synk.broadcast(fault, NOTHING)
    assert function(np.ones(6)) == 6


# ---------------------------------------------------------------- death


def check_broken(function, fault):
    calls = [
        lambda: function(np.ones(6)),
        lambda: synk.broadcast(fault),
        lambda: synk.all_reduce(_built["seen"]),
        lambda: synk.gather(fault),
        synk.distribute,
    ]
    for call in calls:
        with pytest.raises(synk.SessionError, match=r"broken.*close\(\).*fork\(\)"):
            call()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("rank", [1, 2])
def test_an_idle_worker_is_killed(no_session, rank, number):
    synk.fork(3)
    function, fault = make_faulty(3)
    pids = worker_pids()
    os.kill(pids[rank - 1], number)
    wait_for_end([pids[rank - 1]])
    began = time.monotonic()
    with pytest.raises(
        synk.WorkerDied, match=f"rank {rank}.*{pids[rank - 1]}.*{signal.Signals(number).name}"
    ) as caught:
        function(np.ones(6))
    assert time.monotonic() - began < scaled(1)
    assert (caught.value.rank, caught.value.pid, caught.value.exitcode) == (rank, pids[rank - 1], -number)
    check_broken(function, fault)
    synk.close()
    assert not any(map(is_running, pids))
    assert not shared_memory_names()
    assert synk.fork(2) == 2
    assert function.as_theano(np.ones(6)) == 6
    make_faulty(2)


@pytest.mark.parametrize(
    ("fault_kind", "exitcode"),
    [(KILL, -signal.SIGKILL), (SEGFAULT, -signal.SIGSEGV), (EXIT, None), (LEAVE, 4)],
)
def test_a_worker_dies_while_it_computes(no_session, fault_kind, exitcode):
    synk.fork(3)
    function, fault = make_faulty(3)
    pids = worker_pids()
    synk.set_value(2, fault, fault_kind)
    synk.set_value(1, fault, LONG_SLEEP)
    began = time.monotonic()
    with pytest.raises(synk.WorkerDied, match=f"rank 2.*{pids[1]}") as caught:
        function(np.ones(6))
    assert time.monotonic() - began < scaled(1)
    if exitcode is not None:
        assert caught.value.exitcode == exitcode
    check_broken(function, fault)
    synk.close()
    assert not any(map(is_running, pids))
    assert not shared_memory_names()


def test_a_worker_dies_while_functions_are_distributed(no_session, tmp_path):
    synk.fork(3)
    x = T.dvector("x")
    function = synk.function([x], (Deadly(worker_pids()[0], str(tmp_path / "x"))(x).sum(), "sum"))
    with pytest.raises(synk.WorkerDied, match="rank 1"):
        synk.distribute()
    with pytest.raises(synk.SessionError, match="broken"):
        function(np.ones(3))
    synk.close()
    assert not shared_memory_names()


class Deadly(Unloadable):
    """An op whose unpickling ends one process."""

    __props__ = ("pid", "file")

    def __init__(self, pid, file):
        super().__init__(file)
        self.pid = pid

    def __setstate__(self, state):
        super().__setstate__(state)
        if os.getpid() == self.pid:
            os.kill(self.pid, signal.SIGKILL)


def test_a_worker_that_is_stopped_for_a_while_is_slow_and_not_wrong(faulty):
    function, _ = faulty
    pid = worker_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.7, os.kill, (pid, signal.SIGCONT))
    timer.start()
    assert function(np.ones(6)) == 6
    timer.join()
    synk.broadcast(_built["seen"], np.ones(2))
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.7, os.kill, (pid, signal.SIGCONT))
    timer.start()
    synk.all_reduce(_built["seen"], op="sum")
    timer.join()
    assert synk.gather(_built["seen"]).tolist() == [[3, 3]] * 3


def test_closing_with_a_stopped_worker(no_session):
    synk.fork(2)
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGSTOP)
    synk.close()
    assert not is_running(pid)


# ---------------------------------------------------------------- threads


def test_data_made_while_another_thread_calls(faulty):
    function, fault = faulty
    synk.set_value(1, fault, SLEEP)
    results = []
    thread = threading.Thread(target=lambda: results.append(function(np.ones(6))))
    thread.start()
    wait_for_a_call()
    data = synk.data(np.full(6, 2.0))
    thread.join()
    synk.broadcast(fault, NOTHING)
    assert function(data) == 12
    assert results == [6]


# ---------------------------------------------------------------- silence, and new workers


def test_a_command_lowers_an_abort_flag_that_an_interrupt_left_up(synchronize):
    make_faulty(synchronize(2))
    signals = current()._group.signals
    signals.abort()
    synk.all_reduce(_built["seen"])
    assert not signals.aborted
