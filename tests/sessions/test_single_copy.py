"""Memory use: a data set is stored once, however many ranks read it."""

import os

import numpy as np
import psutil
import pytest
from backend import T, theano
from process_state import worker_pids

import synkhronos as synk

GIGABYTE = 10**9


def proportional_set_size():
    """Return the memory of this process and its workers in bytes, with shared pages counted once."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in (os.getpid(), *worker_pids()))


def reading():
    """Return a function that reads all of its input in place, after a first call with few rows."""
    x, w = T.fmatrix("x"), theano.shared(np.ones(1000, "float32"), "w")
    function = synk.function([x], [(T.dot(x, w).sum(dtype="float64"), "sum")])
    function(synk.data(np.ones((8, 1000), "float32")), batch=[0, 5, 3])
    return function


@pytest.mark.timeout(240)
@pytest.mark.skipif(psutil.virtual_memory().available < 2 * GIGABYTE, reason="needs 2 GB of memory")
def test_a_gigabyte_is_stored_once(synchronize):
    n_ranks = synchronize(4)
    function = reading()
    before = proportional_set_size()
    data = synk.data(dtype="float32", shape=(GIGABYTE // 4000, 1000))
    data[:] = 1
    assert function(data)[0] == pytest.approx(GIGABYTE / 4)
    assert function(data, num_slices=4)[0] == pytest.approx(GIGABYTE / 4)
    assert function(data, batch=slice(1000, 2000))[0] == 1_000_000
    added = proportional_set_size() - before
    assert len(worker_pids()) == n_ranks - 1
    assert GIGABYTE * 0.99 < added <= GIGABYTE * 1.05
    data.free_memory()
    function(np.ones((4, 1000), "float32"))
    assert proportional_set_size() - before < GIGABYTE * 0.05


def test_a_file_needs_no_shared_memory(three, tmp_path):
    function = reading()
    path = tmp_path / "rows"
    file = np.memmap(path, "float32", "w+", shape=(40_000, 1000))  # 160 MB
    file[:] = 1
    file.flush()
    file = np.memmap(path, "float32", "r", shape=(40_000, 1000))
    shared, anonymous = shared_pages(), anonymous_memory()
    data = synk.data(file)
    assert function(data)[0] == 40_000_000
    assert function(data, batch=slice(3, 10_003))[0] == 10_000_000
    assert shared_pages() - shared < 10e6
    assert anonymous_memory() - anonymous < 30e6


def shared_pages():
    """Return the bytes of segments that this process and its workers have mapped."""
    pids = (os.getpid(), *worker_pids())
    maps = [one for pid in pids for one in psutil.Process(pid).memory_maps()]
    return sum(one.rss for one in maps if "/memfd:synkhronos" in one.path)


def anonymous_memory():
    """Return the bytes of this process and its workers that are neither files nor shared memory."""
    pids = (os.getpid(), *worker_pids())
    return sum(one.anonymous for pid in pids for one in psutil.Process(pid).memory_maps())


def test_large_collectives_need_no_memory_of_their_size(two):
    w = theano.shared(np.ones(5_000_000), "w")  # 40 MB
    kept = synk.function([], [(w[0], None)])
    kept()
    synk.all_reduce(w)
    before = proportional_set_size()
    for _ in range(3):
        synk.all_reduce(w, op="sum")
    assert proportional_set_size() - before < 10e6
    assert w.get_value(borrow=True)[0] == 8


def test_many_calls_do_not_leak(two):
    function = reading()
    w = theano.shared(np.zeros(1000), "w")
    kept = synk.function([], [(w[0], None)])
    data = synk.data(np.ones((500, 1000), "float32"))
    rng = np.random.RandomState(0)

    def work(rounds):
        for i in range(rounds):
            batch = rng.permutation(500)[: rng.randint(1, 500)] if i % 2 else slice(int(rng.randint(500)), 500)
            function(data, batch=batch, num_slices=1 + i % 3)
            function(np.ones((rng.randint(1, 300), 1000), "float32"))
            synk.broadcast(w, np.ones(rng.randint(1, 2000)))
            synk.gather(w)
            synk.all_reduce(w)
            data.set_length(500 + i % 100)
            synk.data(np.ones(1000))
        kept()
        function(data, batch=10)

    def state():
        processes = [psutil.Process(pid) for pid in (os.getpid(), *worker_pids())]
        return [(one.num_fds(), one.num_threads(), len(one.memory_maps(grouped=False))) for one in processes]

    work(150)
    before, memory = state(), proportional_set_size()
    work(300)
    after = state()
    for old, new in zip(before, after):
        assert new[0] <= old[0] + 40  # descriptors that the next command closes
        assert new[1] <= old[1] + 1  # one may start late; a leak starts one in each round
        assert new[2] <= old[2] + 80
    assert proportional_set_size() - memory < 20e6
