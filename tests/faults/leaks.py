"""Leaks: memory, descriptors, threads and mappings of long runs, in the controller and in every worker.

Memory is measured as USS, the unique set size of a process, after a warm-up with the same calls. The allowed growth is
below one small object for each call: an empty Python object with its reference takes about 60 bytes, so 20,000 calls
that leak one each add 1.2 MB.
"""

import gc
import os
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from backend import T, theano
from process_state import shared_sizes, worker_pids

import synkhronos as synk

_built = {}

#: Python's own setting, as for users. conftest.py sets more, but exceptions are cycles that hold their arrays.
gc.set_threshold(2000 if sys.version_info >= (3, 13) else 700, 10, 10)


@pytest.fixture
def session(synchronize):
    synchronize(3)
    if not _built:
        x, w = T.dvector("x"), theano.shared(np.zeros(4), "w")
        _built["w"] = w
        _built["f"] = synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")], updates=[(w, w + x.sum())])
    synk.distribute()
    synk.broadcast(_built["w"], np.zeros(4))
    return _built["f"]


def _n_threads(pid):
    """Return the number of threads of a process, without the one that exists only while a rank keeps freed blocks."""
    names = [task.joinpath("comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
    return len(names) - names.count("synk-idle")


class Held:
    """Resources that the processes of the session hold now."""

    def __init__(self):
        gc.collect()
        self.processes = [os.getpid(), *worker_pids()]
        self.memory = np.array([psutil.Process(pid).memory_full_info().uss for pid in self.processes])
        self.descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in self.processes]
        self.threads = [threading.active_count(), *map(_n_threads, self.processes)]
        self.shared = [shared_sizes(pid) for pid in self.processes]

    def check(self, before, allowance):
        """Assert that each process holds at most `allowance` bytes more than `before`, and no other resources."""
        assert self.processes == before.processes
        assert self.descriptors == before.descriptors
        assert self.threads == before.threads
        for now, then in zip(self.shared, before.shared):
            assert len(now) <= len(then)  # idle ranks free the memory that they kept for results
            assert sum(now) <= sum(then) + 65536  # scratch memory has the size of the longest message so far
        grown = self.memory - before.memory
        assert (grown < allowance).all(), grown


def check_growth(work, rounds, warm_up, allowance):
    """Call ``work(i)`` `warm_up` times, then `rounds` times, and assert that the latter calls leak nothing."""
    for i in range(warm_up):
        work(i)
    before = Held()
    for i in range(rounds):
        work(i)
    Held().check(before, allowance)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_thousand_calls_with_changing_batches(session):
    data = synk.data(np.arange(200.0))
    rng = np.random.RandomState(0)
    values = np.arange(300.0)
    picks = [rng.randint(0, 200, n) for n in range(1, 60)]

    def call(i):
        n, pick = 1 + i % 199, picks[i % 59]
        given, options, chosen = [
            (data, {"batch": n}, values[:n]),
            (data, {"batch": slice(n // 2, n)}, values[n // 2 : n]),
            (data, {"batch": pick}, pick),
            (values[:n], {}, values[:n]),
            (data, {"batch": pick.tolist(), "num_slices": 1 + i % 3}, pick),
        ][i % 5]
        total, doubled = session(given, **options)
        assert total == chosen.sum()
        assert len(doubled) == len(chosen)
        assert doubled.sum() == 2 * total

    check_growth(call, 20_000, 2_000, 1_000_000)


def test_collectives(session):
    w = _built["w"]

    def communicate(i):
        n = 1 + i % 50
        synk.broadcast(w, np.ones(n))
        synk.all_reduce(w, op="sum")
        assert synk.gather(w).sum() == 9 * n
        synk.scatter(w, np.arange(3.0 * n))
        synk.all_gather(w)
        assert len(synk.get_value(2, w)) == 3 * n
        synk.reduce(w, in_place=bool(i % 2))
        synk.set_value(1, w, np.zeros(n))
        assert synk.get_lengths(w)[1] == n

    check_growth(communicate, 500, 100, 500_000)


def test_data_that_grow_and_shrink(session):
    kept = synk.data(np.zeros(5000))

    def churn(i):
        n = 1 + (i * 7919) % 5000
        data = synk.data(np.ones(n), oversize=1 + i % 2)
        assert session(data)[0] == n
        data.set_length(2 * n)
        data.set_length(n // 2)
        assert session(data)[0] == n // 2
        data.set_value(np.ones(3 * n))
        kept.set_length(n)
        kept[:] = 1
        assert session(kept)[0] == n
        if i % 3:
            data.free_memory()

    def rounds(n):
        for i in range(n):
            churn(i)
        kept.set_length(5000)
        gc.collect()
        session(kept)
        return Held()

    before = rounds(100)
    rounds(600).check(before, 500_000)


@pytest.mark.slow
def test_functions_distributed_in_many_rounds(session):
    """Functions that are dropped free their variables and constants on all ranks."""
    mode = theano.Mode(linker="py", optimizer=None)
    x = T.dvector("x")

    def build(i):
        v = theano.shared(np.full(20_000, float(i)), "v")
        f = synk.function([x], ((x * v[0] + i).sum(), "sum"), mode=mode)
        assert f(np.ones(4)) == 8 * i
        synk.broadcast(v, np.ones(20_000))
        assert f(np.ones(4)) == 4 + 4 * i
        if i % 4 == 0:
            synk.function([x], x.sum(), mode=mode)  # dropped before it is distributed
        return f

    def rounds(n):
        kept = []
        for i in range(n):
            kept = [*kept[-2:], build(i)]
        del kept
        gc.collect()
        synk.distribute()  # distributes and then removes functions that were dropped before
        gc.collect()
        session(np.ones(3))  # the workers remove them, too

    rounds(60)  # until then, the malloc heaps of PyTensor and Theano grow by 8 and 5 MB
    before, objects = Held(), len(gc.get_objects())
    rounds(30)
    after = Held()
    assert len(gc.get_objects()) < objects + 60  # two for each round
    after.check(before, 3_500_000)  # 30 variables of 160 kB that stayed would be 4.8 MB


def test_failing_calls(session):
    """Arrays in the tracebacks of errors are freed when the user drops the errors."""
    x = T.dvector("x")
    fail = synk.function([x], (T.dot(x, T.ones((7,))), "sum"), mode="FAST_COMPILE")

    def call(i):
        with pytest.raises(TypeError):
            session(np.ones((2, 2)))
        with pytest.raises(IndexError):
            session(np.ones(1000), batch=[1000])
        with pytest.raises(synk.WorkerError):
            fail(np.ones(3000))
        assert session(np.ones(3))[0] == 3

    check_growth(call, 300, 100, 800_000)


@pytest.mark.slow
def test_sessions_one_after_the_other(no_session):
    """The controller holds the same resources after many sessions as after a few."""
    x, w = T.dvector("x"), theano.shared(np.zeros(1000), "w")

    def live(i):
        synk.fork(2 + i % 2, restart_workers=bool(i % 3))
        if "h" not in _built:
            _built["h"] = synk.function([x], [(x * w[0], "gather")], mode="FAST_COMPILE")
        data = synk.data(np.ones(1000 * (1 + i % 5)))
        assert len(_built["h"](data)[0]) == len(data)
        _built["h"](np.ones(20_000))
        if i % 4:
            data.free_memory()
        synk.close()

    check_growth(live, 24, 8, 800_000)
