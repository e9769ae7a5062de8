"""Faults of single ranks in real processes: exceptions, stopped processes, and killed processes."""

import os
import resource
import signal
import threading
import time

import numpy as np
import pytest
from deadline import scaled
from fault_ops import LONG_SLEEP, NOTHING
from faulty_function import assert_broken, build, built
from process_state import later, worker_pids
from scripts import run_script

import synkhronos as synk
from synkhronos._collectives import SharedMemoryTransport

# ---------------------------------------------------------------- exceptions on a rank


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_raises_within_a_collective(no_session, monkeypatch, rank):
    """An exception on one rank releases the ranks that wait at the next barrier of the collective."""
    all_reduce = SharedMemoryTransport.all_reduce

    def fail(self, arrays, op, *others):
        if arrays[0][0] == rank and op == "prod":
            raise FloatingPointError("overflow")
        return all_reduce(self, arrays, op, *others)

    monkeypatch.setattr(SharedMemoryTransport, "all_reduce", fail)  # the workers inherit it
    synk.fork(5)
    function, _, big = build()
    for _ in range(3):
        for each in range(5):
            synk.set_value(each, big, np.full(600_000, float(each)))
        began = time.monotonic()
        with pytest.raises(
            synk.WorkerError, match=rf"rank {rank} \(cpu\) failed in AllReduce.*FloatingPoint"
        ) as caught:
            synk.all_reduce(big, op="prod")
        assert time.monotonic() - began < scaled(1)
        assert caught.value.rank == rank
        assert "Traceback (most recent call last)" in caught.value.traceback_text
        assert "broadcast" in str(caught.value)
        synk.broadcast(big, np.ones(600_000))
        synk.all_reduce(big, op="sum")
        assert (synk.gather(big) == 5).all()
        assert function(np.ones(6)) == 6


def test_a_rank_that_cannot_map_data(three):
    """A rank without free descriptors reports that it cannot map data, and maps it after the limit is raised."""
    function, _, _ = three
    pid = worker_pids()[0]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    data = [synk.data(np.full(6, float(i))) for i in range(3)]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(synk.WorkerError, match=r"rank 1 \(cpu\).*Too many open files"):
            function(data[1])
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    for i, each in enumerate(data):
        assert function(each) == 6 * i


# ---------------------------------------------------------------- death


def test_a_worker_dies_while_another_waits_for_a_stopped_one(fresh):
    pids = worker_pids()
    os.kill(pids[1], signal.SIGSTOP)
    killed = later(0.3, os.kill, pids[0], signal.SIGKILL)
    with pytest.raises(synk.WorkerDied, match=rf"rank 1 .*pid {pids[0]}.*SIGKILL"):
        synk.all_reduce(built["big"])
    assert time.monotonic() - killed[0] < scaled(1)
    assert_broken(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_a_worker_dies_between_the_blocks_of_a_large_array(fresh, number):
    big = built["big"]
    big.set_value(np.ones(30_000_000))
    synk.broadcast(big)
    pids = worker_pids()
    killed = later(0.01, os.kill, pids[1], number)
    with pytest.raises(synk.WorkerDied, match=rf"rank 2 .*pid {pids[1]}.*{signal.Signals(number).name}"):
        while True:
            synk.all_reduce(big, op="max")
    assert time.monotonic() - killed[0] < scaled(1)
    big.set_value(np.ones(1))
    assert_broken(pids)


def test_two_workers_die_at_once(fresh):
    pids = worker_pids()
    synk.broadcast(built["fault"], LONG_SLEEP)
    synk.set_value(0, built["fault"], NOTHING)
    killed = later(0.2, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
    with pytest.raises(synk.WorkerDied, match="SIGKILL"):
        built["f"](np.ones(6))
    assert time.monotonic() - killed[0] < scaled(1)
    assert_broken(pids)


def test_a_worker_dies_during_fork():
    """`fork` reports a worker that is killed, exits, or raises an exception before its first command."""
    out, _ = run_script(
        """
        from synkhronos import _graph
        born, ending = [], None
        def die():
            if len(born) == nth and ending is not None:
                ending()
        os.register_at_fork(before=lambda: born.append(1), after_in_child=die)
        start_worker = _graph.start_worker
        def fail(*some):
            if len(born) == nth:
                1 / 0
            return start_worker(*some)
        for nth in (1, 3):
            for kind in ("killed", "gone", "failing"):
                ending = {
                    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "gone": lambda: os._exit(3), "failing": None
                }[kind]
                _graph.start_worker = fail if kind == "failing" else start_worker
                born.clear()
                before = time.monotonic()
                try:
                    synk.fork(4)
                except synk.WorkerDied as error:
                    print(error.rank == nth, error.exitcode, time.monotonic() - before < scaled(3))
                assert not worker_pids() and not shared_memory_names()
        ending, _graph.start_worker = None, start_worker
        print(synk.fork(2))
        synk.close()
        """
    )
    expected = [f"True {code} True" for code in (-9, 3, 1)]
    assert out.splitlines() == [*expected, *expected, "2"]


@pytest.mark.parametrize("n_ranks", [2, 5])
def test_results_are_right_while_ranks_are_stopped_by_turns(synchronize, n_ranks):
    synchronize(n_ranks)
    function, _, big = build()
    done, pids = threading.Event(), worker_pids()

    def disturb():
        rng = np.random.RandomState(0)
        while not done.is_set():
            pid = pids[rng.randint(len(pids))]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02 + 0.1 * rng.rand())
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        deadline = time.monotonic() + 3
        rounds = 0
        while time.monotonic() < deadline or rounds < 5:
            rounds += 1
            n = 7 * rounds % 23
            assert function(np.full(n, 2.0)) == 2 * n
            synk.scatter(big, np.arange(1000.0 * n_ranks))
            synk.all_reduce(big, op="sum")
            expected = np.arange(1000.0 * n_ranks).reshape(n_ranks, 1000).sum(0)
            np.testing.assert_array_equal(synk.gather(big), [expected] * n_ranks)
    finally:
        done.set()
        thread.join()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_broken_sessions_one_after_the_other_leave_nothing(no_session):
    """Sessions whose workers died leave no descriptors or mappings open."""
    sizes = []
    for _ in range(6):
        synk.fork(3)
        build()
        os.kill(worker_pids()[0], signal.SIGKILL)
        with pytest.raises(synk.WorkerDied):
            built["f"](np.ones(6))
        synk.close()
        with open("/proc/self/maps") as maps:
            sizes.append((len(os.listdir("/proc/self/fd")), len(maps.readlines())))
    assert sizes[-1][0] <= sizes[1][0]
    assert sizes[-1][1] <= sizes[1][1] + 3
