"""Timeouts: the error names the silent rank and the command that it does not answer."""

import os
import signal

import numpy as np
import pytest
from fault_ops import LONG_SLEEP, SLEEP_THREE
from faulty_function import assert_broken, build, built
from process_state import worker_pids
from scripts import run_script

import synkhronos as synk

TIMEOUT = 2  # seconds; workers on a busy node load a function in less


@pytest.mark.parametrize("timeout", [0, -1, "1", True, float("nan")])
def test_wrong_timeouts(no_session, timeout):
    with pytest.raises((TypeError, ValueError), match="timeout"):
        synk.fork(2, timeout=timeout)
    assert worker_pids() == []


def test_a_timeout_names_rank_and_command(no_session):
    synk.fork(3, timeout=TIMEOUT)
    function, fault, _ = build()
    pids = worker_pids()
    synk.set_value(2, fault, LONG_SLEEP)
    with pytest.raises(synk.WorkerTimeout, match=rf"rank 2 \(cpu, pid {pids[1]}\).*{TIMEOUT} seconds.*Call"):
        function(np.ones(6))
    assert_broken(pids)


def test_a_timeout_in_a_collective_names_the_rank_that_the_others_wait_for(no_session):
    synk.fork(4, timeout=TIMEOUT)
    build()
    pids = worker_pids()
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(synk.WorkerTimeout, match=rf"rank 2 \(cpu, pid {pids[1]}\).*AllReduce") as caught:
        synk.all_reduce(built["big"])
    assert (caught.value.rank, caught.value.pid) == (2, pids[1])
    assert isinstance(caught.value, TimeoutError)
    assert_broken(pids)


def test_a_timeout_during_fork():
    out, _ = run_script(
        """
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))
        before = time.monotonic()
        try:
            synk.fork(3, timeout=0.5)
        except synk.WorkerTimeout as error:
            print(error.rank, time.monotonic() - before < scaled(3))
        print(worker_pids())
        """
    )
    assert out == "1 True\n[]\n"


def test_a_timeout_does_not_limit_the_controllers_own_computation(no_session):
    synk.fork(2, timeout=TIMEOUT)
    function, fault, _ = build()
    synk.set_value(0, fault, SLEEP_THREE)
    assert function(np.ones(6)) == 6
