"""Exceptions and deaths of ranks: errors name rank and cause, come in time, and leave no processes or memory."""

import contextlib
import faulthandler
import gc
import os
import re
import signal
import sys
import threading
import time
import traceback

import numpy as np
import pytest
from backend import T, on_theano, theano
from deadline import scaled
from fault_ops import EXIT, KILL, LEAVE, LONG_SLEEP, NOTHING, RAISE, RAISE_LATE, SEGFAULT, Copy, Fault
from faulty_function import assert_broken, build, slow_call
from process_state import is_running, later, shared_memory_names, wait_for_end, worker_pids

import synkhronos as synk
from synkhronos._session.lifecycle import current


@pytest.fixture(autouse=True, scope="module")
def quiet_crashes():
    """Disable `faulthandler`, so that workers that crash on purpose print no tracebacks."""
    enabled = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if enabled:
        faulthandler.enable()


# ---------------------------------------------------------------- exceptions


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_a_rank_that_raises(three, rank, num_slices):
    function, fault, _ = three
    synk.set_value(rank, fault, RAISE)
    with pytest.raises(synk.WorkerError, match=rf"rank {rank} \(cpu\).*the fault that the test ordered") as caught:
        function(np.ones(6), num_slices=num_slices)
    assert (caught.value.rank, caught.value.device) == (rank, "cpu")
    assert "replicas" not in str(caught.value)  # the function has no updates
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


@pytest.mark.parametrize("num_slices", [1, 2])
def test_the_message_says_how_to_make_replicas_equal_again(three, num_slices):
    _, fault, _ = three
    x, n = T.dvector("x"), theano.shared(np.zeros(1), "n")
    function = synk.function([x], (Fault()(x, fault).sum(), "sum"), updates=[(n, n + x.sum(), "avg")])
    synk.set_value(1, fault, RAISE)
    with pytest.raises(synk.WorkerError, match=r"replicas may differ now; synkhronos\.broadcast"):
        function(np.ones(6), num_slices=num_slices)
    synk.broadcast(fault, NOTHING)


@pytest.mark.parametrize("num_slices", [1, 2])
def test_updates_that_follow_a_collective_may_have_been_made_on_some_ranks(three, num_slices):
    """In slices, they belong to the second step of the call."""
    _, fault, _ = three
    x, w = T.dvector("x"), theano.shared(np.ones(2), "w")
    total = synk.summed(x.sum())
    function = synk.function([x], (Fault()(total * w, fault).sum(), "avg"), updates=[(w, w + total)])
    synk.set_value(1, fault, RAISE)
    with pytest.raises(synk.WorkerError, match="replicas may differ") as caught:
        function(np.ones(6), num_slices=num_slices)
    assert caught.value.updated is None
    synk.broadcast(fault, NOTHING)


class RaisesFrom(Copy):
    """An operation whose exception has a cause."""

    def perform(self, node, inputs, outputs):
        try:
            {}["the key"]
        except KeyError as error:
            raise RuntimeError("no such entry") from error


@pytest.mark.usefixtures("three")
def test_the_cause_of_an_exception_is_reported_after_it():
    x = T.dvector("x")
    broken = synk.function([x], RaisesFrom()(x).sum(), name="lookup")
    with pytest.raises(synk.WorkerError) as caught:
        broken(np.ones(6))
    text = "".join(traceback.format_exception(None, caught.value, caught.value.__traceback__))
    assert "(cpu) failed in Call lookup: RuntimeError: no such entry\n" in text
    assert text.count("RuntimeError: no such entry") == text.count("KeyError: 'the key'") == 1
    assert text.index("RuntimeError: no") < text.index("KeyError: 'the key'") < text.index("\nwhich led to\n")


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("exact", [True, False])
def test_functions_without_a_name_are_named_by_the_line_that_builds_them(exact):
    x = T.dvector("x")
    broken = synk.function([x], RaisesFrom()(x).sum(), exact=exact)
    line = sys._getframe().f_lineno - 1
    with pytest.raises(
        synk.WorkerError, match=rf"failed in Call {re.escape(__file__)}:{line}: RuntimeError: no such entry"
    ):
        broken(np.ones(6))


def test_shapes_that_differ_are_reported_once(three):
    *_, big = three
    for rank in range(3):
        synk.set_value(rank, big, np.zeros(rank + 1))
    with pytest.raises(ValueError, match="all_reduce: big has the shapes") as caught:
        synk.all_reduce(big)
    text = "".join(traceback.format_exception(None, caught.value, caught.value.__traceback__))
    assert text.count("Traceback (most recent call last)") == text.count("Error: ") == 1


def test_the_first_failure_is_reported(three):
    function, fault, _ = three
    synk.set_value(1, fault, RAISE_LATE)
    synk.set_value(2, fault, RAISE)
    with pytest.raises(synk.WorkerError) as caught:
        function(np.ones(6))
    assert caught.value.rank == 2
    synk.broadcast(fault, RAISE)
    with pytest.raises(synk.WorkerError) as caught:
        function(np.ones(6))
    assert "may differ" not in str(caught.value)  # all ranks failed alike


def test_failures_in_a_row(three):
    function, fault, big = three
    for i in range(30):
        synk.set_value(i % 3, fault, RAISE)
        with pytest.raises(synk.WorkerError, match=f"rank {i % 3}"):
            function(np.ones(6))
        synk.all_reduce(big, op="max")
        synk.broadcast(fault, NOTHING)
        assert function(np.ones(6)) == 6


class Locked(Copy):
    """An operation that cannot be pickled."""

    def __init__(self):
        self.lock = threading.Lock()


def local_op():
    """Return an operation whose class cannot be imported."""

    class Local(Copy):
        pass

    return Local()


@pytest.mark.parametrize(("make", "reason"), [(Locked, "lock"), (local_op, "Local")])
def test_a_function_that_cannot_be_pickled_is_reported_and_others_work(three, make, reason):
    function, *_ = three
    x, w = T.dvector("x"), theano.shared(np.ones(1), "w")
    stuck = synk.function([x], ((make()(x) * w.sum()).sum(), "sum"), name="stuck")
    of_line = synk.function([x], make()(x).sum())
    other = synk.function([x], ((x * w.sum()).sum(), "sum"))
    for _ in range(2):
        for bad, name in ((stuck, r"stuck\(x\)"), (of_line, r"of \S*test_failures.py:\d+ \(x\)")):
            words = rf"the function {name} cannot be replicated, because it cannot be pickled.*{reason}"
            with pytest.raises(TypeError, match=words):
                bad(np.ones(6))
        assert function(np.ones(6)) == 6
        assert other(np.ones(6)) == 6
    assert stuck.as_theano(np.ones(6)) == 6
    del stuck, of_line, bad
    gc.collect()
    with contextlib.suppress(TypeError):  # functions dropped before their distribution are reported once more
        synk.distribute()
    synk.distribute()
    synk.broadcast(w, np.full(1, 2.0))
    assert other(np.ones(6)) == 12


def test_long_tracebacks_arrive_completely(three):
    function, fault, _ = three
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("rank", [1, 2])
def test_an_idle_worker_is_killed(fresh, rank, number):
    function, *_ = fresh
    pids = worker_pids()
    pid = pids[rank - 1]
    os.kill(pid, number)
    wait_for_end([pid])
    began = time.monotonic()
    with pytest.raises(synk.WorkerDied, match=f"rank {rank}.*{pid}.*{signal.Signals(number).name}") as caught:
        function(np.ones(6))
    assert time.monotonic() - began < scaled(1)
    assert (caught.value.rank, caught.value.pid, caught.value.exitcode) == (rank, pid, -number)
    assert_broken(pids)
    assert synk.fork(2) == 2
    assert function.as_theano(np.ones(6)) == 6
    build()


@pytest.mark.parametrize(
    ("fault_kind", "exitcode", "words"),
    [
        (KILL, -signal.SIGKILL, "SIGKILL.*out of memory"),  # the kernel sends it when memory is short
        (SEGFAULT, -signal.SIGSEGV, "SIGSEGV"),
        (EXIT, None, ""),
        (LEAVE, 4, ""),
    ],
)
def test_a_worker_dies_while_it_computes(fresh, fault_kind, exitcode, words):
    function, fault, _ = fresh
    pids = worker_pids()
    synk.set_value(2, fault, fault_kind)
    synk.set_value(1, fault, LONG_SLEEP)
    began = time.monotonic()
    with pytest.raises(synk.WorkerDied, match=f"rank 2.*{pids[1]}.*{words}") as caught:
        function(np.ones(6))
    assert time.monotonic() - began < scaled(1)
    if exitcode is not None:
        assert caught.value.exitcode == exitcode
    assert_broken(pids)


class Deadly(Copy):
    """An operation whose unpickling kills one process."""

    __props__ = ("pid",)

    def __init__(self, pid):
        self.pid = pid

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.getpid() == self.pid:
            os.kill(self.pid, signal.SIGKILL)


def test_a_worker_dies_while_functions_are_distributed(no_session):
    synk.fork(3)
    x = T.dvector("x")
    function = synk.function([x], (Deadly(worker_pids()[0])(x).sum(), "sum"))
    with pytest.raises(synk.WorkerDied, match="rank 1"):
        synk.distribute()
    with pytest.raises(synk.SessionError, match="broken"):
        function(np.ones(3))
    synk.close()
    assert not shared_memory_names()


def test_results_are_right_after_a_worker_was_stopped_for_a_while(three):
    function, _, big = three
    pid = worker_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    later(0.7, os.kill, pid, signal.SIGCONT)
    assert function(np.ones(6)) == 6
    os.kill(pid, signal.SIGSTOP)
    later(0.7, os.kill, pid, signal.SIGCONT)
    synk.all_reduce(big, op="sum")
    assert synk.gather(big).tolist() == [[3]] * 3


def test_closing_with_a_stopped_worker(no_session):
    synk.fork(2)
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGSTOP)
    synk.close()
    assert not is_running(pid)


# ---------------------------------------------------------------- threads


def test_data_made_while_another_thread_calls(three):
    function, fault, _ = three
    with slow_call():
        data = synk.data(np.full(6, 2.0))
    synk.broadcast(fault, NOTHING)
    assert function(data) == 12


# ---------------------------------------------------------------- interrupts


def test_a_command_clears_the_abort_flag_of_an_earlier_interrupt(synchronize):
    synchronize(2)
    *_, big = build()
    sync = current()._group.sync
    sync.abort()
    synk.all_reduce(big)
    assert not sync.aborted
