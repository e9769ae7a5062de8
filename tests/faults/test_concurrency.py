"""Concurrency: several controllers on one node, threads of one controller, and other processes next to a session."""

import concurrent.futures
import functools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from backend import T, theano
from fault_ops import NOTHING, SLEEP
from faulty_function import build, slow_call
from process_state import is_running, wait_for_a_call, wait_for_end, worker_pids
from scripts import read_pids, run_script, start_script

import synkhronos as synk


@functools.cache
def built():
    """Build a function and its two variables."""
    x, w, v = T.dvector("x"), theano.shared(np.zeros(100), "w"), theano.shared(0.0, "v")
    g = synk.function([x], [(x * 2 + 0 * w.sum() + 0 * v, "gather"), (x.max(), "max")])
    return g, w, v


def in_threads(*works):
    """Run each function in its own thread, and raise the first exception that one of them raises."""
    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        return [future.result(60) for future in [pool.submit(work) for work in works]]


# ---------------------------------------------------------------- threads


def test_calls_of_all_kinds_from_many_threads(three):
    f, *_ = three
    g, w, v = built()
    synk.distribute()
    deadline = time.monotonic() + 3

    def rounds():
        n = 0
        while time.monotonic() < deadline or n < 3:
            n += 1
            yield n

    def calling(value):
        for i in rounds():
            n = 3 + i % 50
            assert f(np.full(n, value), num_slices=1 + i % 2) == pytest.approx(n * value)
            doubled, largest = g(np.arange(n) * value, batch=slice(1, n))
            np.testing.assert_array_equal(doubled, 2 * value * np.arange(1, n))
            assert largest == (n - 1) * value

    def churning():
        for i in rounds():
            data = synk.data(np.full(4 + i % 300, 2.0))
            assert f(data) == 2 * len(data)
            data.set_length(2000 + i % 5)
            assert f(data) == 2 * (4 + i % 300)

    def communicating():
        for i in rounds():
            synk.broadcast(v, float(i))
            assert synk.gather(v).tolist() == [i] * 3
            synk.all_reduce(v, op="sum")
            assert synk.get_value(1, v) == 3 * i
            synk.scatter(w, np.arange(9.0) * i)
            assert synk.gather(w, nd_up=0).tolist() == (np.arange(9.0) * i).tolist()

    in_threads(lambda: calling(1.0), lambda: calling(3.0), churning, communicating)


def test_functions_built_from_several_threads_under_a_lock(three):
    """Several threads build and call functions. The lock is needed because Theano compiles in one thread at a time."""
    compiling = threading.Lock()

    def work(factor):
        def build_and_call():
            for _ in range(3):
                x, s = T.dvector("x"), theano.shared(np.float64(factor))
                with compiling:
                    scaled = synk.function([x], ((x * s).sum(), "sum"), mode="FAST_COMPILE")
                assert scaled(np.ones(7)) == 7 * factor
                synk.broadcast(s, 2.0 * factor)
                assert scaled(np.ones(7)) == 14 * factor

        return build_and_call

    in_threads(work(2), work(3), work(5))


def test_close_waits_for_the_call_of_another_thread(fresh):
    with slow_call():
        synk.close()
    assert worker_pids() == []


def test_a_thread_that_waited_while_another_closed_is_reported(fresh):
    f, fault, _ = fresh
    synk.set_value(1, fault, SLEEP)
    outcomes = []

    def call():
        try:
            outcomes.append(float(f(np.ones(6))))
        except synk.SessionError:
            outcomes.append("closed")

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for_a_call()
    synk.close()
    for thread in threads:
        thread.join(20)
    assert set(outcomes) <= {6.0, "closed"}
    assert outcomes.count(6.0) >= 1
    assert len(outcomes) == 4
    assert worker_pids() == []


def test_forks_of_several_threads_make_one_session(no_session):
    outcomes = []

    def work():
        try:
            outcomes.append(synk.fork(2))
        except synk.SessionError as error:
            outcomes.append("close()" in str(error))

    in_threads(work, work, work)
    assert sorted(outcomes) == [True, True, 2]
    assert len(worker_pids()) == 1
    assert build()[0](np.ones(6)) == 6
    synk.close()
    assert worker_pids() == []


def test_closes_of_several_threads(fresh):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_threads(synk.close, synk.close, synk.close)
    assert worker_pids() == []
    assert len([one for one in caught if "no session" in str(one.message)]) <= 2


def test_an_error_in_one_thread_is_not_reported_in_another(three):
    f, *_ = three
    g, *_ = built()

    def failing():
        for _ in range(30):
            with pytest.raises(TypeError):
                f(np.ones((2, 2)))
            with pytest.raises(IndexError):
                f(np.ones(6), batch=[7])

    def working():
        for _ in range(60):
            assert g(np.ones(9))[1] == 1

    in_threads(failing, working, failing)


# ---------------------------------------------------------------- several controllers

CONTROLLER = """
n_ranks, seed = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.RandomState(seed)
x, w = T.dvector("x"), theano.shared(np.zeros(5), "w")
checked = 0
for _ in range(3):
    synk.fork(n_ranks)
    f = synk.function([x], [(x * seed, "gather"), (x.sum() + 0 * w.sum(), "sum")], mode="FAST_COMPILE")
    for _ in range(40):
        values = rng.randint(0, 100, rng.randint(1, 3000)).astype("float64")
        data = synk.data(values)
        for given in (values, data):
            scaled, total = f(given)
            assert total == values.sum() and (scaled == seed * values).all()
        synk.broadcast(w, np.full(5, seed))
        synk.all_reduce(w, op="sum")
        assert (synk.gather(w) == n_ranks * seed).all()
        checked += 1
    synk.close()
print(checked, len(worker_pids()), len(shared_memory_names()))
"""


def test_controllers_at_the_same_time_do_not_interfere():
    """Sessions of several processes do not interfere, for example those of pytest-xdist."""
    controllers = [start_script(CONTROLLER, n_ranks, seed) for seed, n_ranks in enumerate((2, 3, 2, 5), start=1)]
    for controller in controllers:
        out, err = controller.communicate(timeout=90)
        assert out == "120 0 0\n", err
        assert controller.returncode == 0


def test_the_end_of_one_controller_does_not_affect_another(three):
    f, *_ = three
    other = start_script("synk.fork(3); print(*worker_pids(), flush=True); time.sleep(60)")
    pids = read_pids(other)
    assert f(np.ones(6)) == 6
    other.kill()
    other.communicate()
    wait_for_end(pids)
    assert f(np.ones(6)) == 6
    assert len(worker_pids()) == 2


def test_a_process_of_the_user_starts_its_own_session(three):
    """A process of multiprocessing starts a session while its parent computes in another."""
    f, *_ = three
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_session_of_a_child, args=(queue, i)) for i in (2, 3)]
    for process in processes:
        process.start()
    for i in range(200):
        assert f(np.full(5, float(i))) == 5 * i
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(queue.get() for _ in processes) == [2, 3]
    assert f(np.ones(6)) == 6


def _session_of_a_child(queue, n_ranks):
    synk.fork(n_ranks)
    f, *_ = build()
    for i in range(100):
        assert f(np.full(7, float(i))) == 7 * i
    queue.put(n_ranks)
    synk.close()


# ---------------------------------------------------------------- other processes next to a session


def test_subprocesses_next_to_a_session(three):
    f, *_ = three

    def running():
        for i in range(6):
            assert subprocess.check_output([sys.executable, "-S", "-c", f"print({i} + 1)"]) == b"%d\n" % (i + 1)

    def failing():
        for _ in range(6):
            assert subprocess.run(["sh", "-c", "kill -9 $$"], check=False).returncode == -9

    def calling():
        for i in range(300):
            assert f(np.full(5, float(i))) == 5 * i

    in_threads(running, failing, calling)
    assert len(worker_pids()) == 2


def _square(value):
    return value * value


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_next_to_a_session(method):
    """A script can use a pool of multiprocessing and a session at the same time."""
    out, err = run_script(
        f"""
        import multiprocessing
        from test_concurrency import _square
        if __name__ == "__main__":
            synk.fork(3)
            x = T.dvector("x")
            f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
            before = worker_pids()
            with multiprocessing.get_context("{method}").Pool(2) as pool:
                later = pool.map_async(_square, range(50))
                assert all(f(np.full(5, float(i))) == 5 * i for i in range(200))
                assert later.get(60) == [i * i for i in range(50)]
            assert set(before) <= set(worker_pids())
            print(f(np.ones(6)))
            synk.close()
        """
    )
    assert out == "6.0\n"
    assert err == ""


def test_children_that_the_user_forks_during_a_call(three):
    """A child that is forked while another thread is in a call can exit without affecting the session."""
    f, fault, _ = three
    with slow_call():
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    synk.broadcast(fault, NOTHING)
    assert f(np.ones(6)) == 6


def test_a_session_of_a_thread_ends_with_the_process():
    out, err = run_script(
        """
        def work():
            synk.fork(3)
            print(*worker_pids(), flush=True)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """
    )
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 2
    assert err == ""
    assert not any(map(is_running, pids))


def test_a_daemon_thread_in_a_call_does_not_keep_the_process_alive(no_session):
    process = start_script(
        f"""
        synk.fork(2)
        x, fault = T.dvector("x"), theano.shared(np.int64(0), "fault")
        f = synk.function([x], (Fault()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
        f(np.ones(2))
        synk.set_value(1, fault, {SLEEP})
        threading.Thread(target=f, args=(np.ones(2),), daemon=True).start()
        wait_for_a_call()
        print(*worker_pids(), flush=True)
        """
    )
    pids = read_pids(process, 1)
    process.communicate(timeout=20)
    assert process.returncode == 0
    wait_for_end(pids)
