"""Memory of ranks: where variables and results are stored, what `memory` reports, and processes that users fork."""

import contextvars
import functools
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from backend import T, on_theano, theano
from deadline import wait_for
from fault_ops import NOTHING, SLEEP, Fault

import synkhronos as synk
from synkhronos._memory import Segment
from synkhronos._session import current

N = 100_000  # float32: blocks of 400 KiB
_built = {}


def build():
    """Return a function that updates one variable in place and another with a new array, and the variables."""
    if not _built:
        x, rate = T.fvector("x"), T.fscalar("rate")
        w, v = (theano.shared(np.zeros(N, "float32"), name) for name in "wv")
        outputs = [((x + w[0]).sum(), "sum"), (x * 2, "gather"), (w + rate, None)]
        f = synk.function([x], outputs, bcast_inputs=[rate], updates=[(w, w + rate), (v, w[::-1] * rate)])
        _built.update(f=f, w=w, v=v)
    synk.distribute()
    synk.broadcast([_built["w"], _built["v"]], [np.zeros(N, "float32")] * 2)
    return _built["f"], _built["w"], _built["v"]


def offset(value):
    """Return the offset of an array, or of the controller's value of a variable, in the shared heap, or None."""
    value = getattr(value, "get_value", lambda **keywords: value)(borrow=True)
    return current().replica.heap.offset(value)


def assert_inside(*variables):
    for var in variables:
        place = offset(var)
        assert place is not None
        assert place // region_size() == current().master_rank


def region_size():
    base = current().replica.heap.base
    with open("/proc/self/maps") as maps:
        bounds = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in maps if "/memfd:synk" in line]
    (stop,) = [stop for start, stop in bounds if start <= base < stop]
    return (stop - base) // current().n_ranks


WAYS = [synk.broadcast, functools.partial(synk.set_value, 1), lambda var, value: synk.scatter(var, np.tile(value, 3))]


class TestWhereValuesLie:
    @pytest.fixture(autouse=True)
    def three_ranks(self, synchronize):
        synchronize(3, master_rank=1)

    def test_distribution_moves_variables_into_the_heap(self):
        w = theano.shared(np.ones(N, "float32"), "w")
        synk.distribute()  # functions of other tests
        before = synk.memory().in_use
        f = synk.function([], [(w.sum(), "sum")])
        assert offset(w) is None
        synk.distribute()
        assert_inside(w)
        after = synk.memory().in_use
        session = current("test")
        is_copied = bool(session.stale.copied([w]))  # else the workers view the controller's memory
        for rank in range(3):
            assert (after[rank] - before[rank] >= 4 * N) == (is_copied or rank == session.master_rank)
        assert f() == [3 * N]

    def test_a_variable_that_the_program_has_set_is_broadcast(self):
        f, w, _ = build()
        w.set_value(np.ones(N, "float32"))
        f(np.arange(N, dtype="float32"), 1)
        assert offset(w) is None or not on_theano  # Theano updates in place, outside of the heap
        synk.broadcast(w)
        assert synk.check_replicas(w) == {}

    @pytest.mark.parametrize("set_value", WAYS)
    def test_collectives_move_variables_into_the_heap(self, set_value):
        _, w, _ = build()
        w.set_value(np.ones(N, "float32"))  # the backend's method, which does not use the heap
        assert offset(w) is None
        value = np.arange(N, dtype="float32")
        set_value(w, value)
        assert_inside(w)
        assert (w.get_value() == value).all()
        before = offset(w)
        synk.broadcast(w, value + 1)
        assert offset(w) == before
        assert (synk.gather(w) == value + 1).all()

    def test_updates_stay_in_the_heap(self):
        f, w, v = build()
        for n in range(1, 5):
            f(np.ones(6, "float32"), 1)
            synk.all_reduce([w, v], op="sum" if n % 2 else "avg")
            assert_inside(w, v)
        synk.all_gather(v)
        assert_inside(v)
        assert v.get_value().shape == (3 * N,)

    def test_results_are_outside_of_the_heap(self):
        f, w, _ = build()
        results = [*f(np.ones(N, "float32"), 1), synk.reduce(w, in_place=False), synk.gather(w), synk.get_value(0, w)]
        for result in results:
            assert offset(result) is None
        kept = [result.copy() for result in results]
        for _ in range(3):
            f(np.ones(N, "float32"), 5)
        assert all((one == other).all() for one, other in zip(results, kept))

    def test_calls_in_contexts_and_threads(self):
        f, w, _ = build()
        contextvars.copy_context().run(f, np.ones(6, "float32"), 1)
        thread = threading.Thread(target=f, args=(np.ones(6, "float32"), 1))
        thread.start()
        thread.join()
        assert_inside(w)
        assert (w.get_value() == 2).all()
        assert offset(np.ones(N)) is None

    def test_after_an_exception_numpy_allocates_outside_of_the_heap(self):
        _, w, _ = build()
        start = T.lscalar("start")
        broken = synk.function([], w + w[start:], bcast_inputs=[start])
        with pytest.raises(synk.WorkerError):
            broken(7)
        assert offset(np.ones(N)) is None


def test_results_are_those_of_numpy(session):
    f, w, v = build()
    rng, expected = np.random.RandomState(0), np.zeros(N, "float32")
    for n in range(1, 80):
        x = rng.uniform(-1, 1, 1000 * n % 7919 + 1).astype("float32")
        total, twice, own = f(x, n % 3)
        np.testing.assert_allclose(total, (x + expected[0]).sum(), rtol=1e-3, atol=1e-2)
        assert (twice == 2 * x).all()
        reversed_before = expected[::-1] * np.float32(n % 3)
        expected = expected + np.float32(n % 3)
        assert (own == expected).all()
        assert (v.get_value(borrow=True) == reversed_before).all()
        assert (w.get_value(borrow=True) == expected).all()
    assert synk.check_replicas() == {}


# ---------------------------------------------------------------- what memory reports


def test_single_copy(session):
    f, w, _ = build()
    for _ in range(70):
        f(np.ones(1000, "float32"), 1)
    before = synk.memory()
    big = synk.function([], [((w.dimshuffle(0, "x") + T.ones((1, 50))).sum(), "sum")], mode="FAST_COMPILE")
    big()
    after = synk.memory()
    assert set(after.in_use) == set(range(current().n_ranks))
    for rank in after.in_use:
        assert after.largest[rank] >= before.in_use[rank] + 200 * N  # of float32, 50 for each element
        assert after.kept[rank] >= 200 * N
        assert after.in_use[rank] >= (8 * N if session > 1 else 0)
    for _ in range(140):
        f(np.ones(1000, "float32"), 1)
    later = synk.memory()
    assert all(later.kept[rank] < 200 * N for rank in later.kept)
    assert later.largest == after.largest
    lines = str(after).splitlines()
    assert [re.split("  +", line)[0] for line in lines] == ["Memory (MB)", "In use", "Kept", "Largest"]
    assert lines[0].split()[2:] == " ".join(f"rank {rank}" for rank in after.in_use).split()
    assert "in_use={0: " in repr(after)
    value = big()
    wait_for(lambda: not any(synk.memory().kept.values()), "freed memory")  # ranks execute nothing in the meantime
    assert big() == value


def test_kept_memory_is_freed_for_data(three, monkeypatch):
    f, _, _ = build()
    f(np.ones(1000, "float32"), 1)
    assert all(synk.memory().kept.values())
    create, refused = Segment.create, []

    def refuse_once(size):
        if not refused:
            refused.append(size)
            raise MemoryError
        return create(size)

    monkeypatch.setattr(Segment, "create", refuse_once)
    synk.data(np.ones(10))
    assert refused
    assert not any(synk.memory().kept.values())


# ---------------------------------------------------------------- the end of a session


def mapped():
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "/memfd:synkhronos" in line]


def test_sessions_one_after_the_other(no_session):
    """Variables keep their values, and the memory of a session is mapped as long as a value lies in it."""
    w = theano.shared(np.zeros(N, "float32"), "w")
    f = synk.function  # each session builds it again
    gc.collect()
    before = len(mapped())
    for n, n_ranks in enumerate([2, 1, 3, 5, 2], 1):
        synk.fork(n_ranks, use_gpu=False)
        f = synk.function([], [w.sum() / N], updates=[(w, w + 1)])
        assert f()[0] == pytest.approx(n - 1)
        synk.all_reduce(w)
        value = w.get_value(borrow=True)
        synk.close()
        assert (value == n).all()
        assert (w.get_value() == n).all()
    w.set_value(np.zeros(1, "float32"))
    assert (value == 5).all()
    del f, value
    gc.collect()
    assert len(mapped()) == before


def test_arrays_of_a_closed_session_in_new_workers(no_session):
    """Workers of a new session get the controller's values, not the inherited memory of the closed session."""
    w = theano.shared(np.zeros(N, "float32"), "w")
    synk.fork(2, use_gpu=False)
    synk.function([], w.sum(), updates=[(w, w + 1)])()
    synk.close()
    synk.fork(3, use_gpu=False)
    w.get_value(borrow=True)[:] += 1
    assert synk.function([], [(w.sum(), "sum")])() == [6 * N]
    assert_inside(w)
    synk.close()


# ---------------------------------------------------------------- processes that users fork


def evaluate(number):
    """Return the sum of this process's value of the variable, and overwrite the value. Call it once in each process."""
    value = _built["w"].get_value(borrow=True)
    total = float(value.sum())
    value[:] = -1
    _built["w"].set_value(np.full(N, number, "float32"))
    return total


def test_a_child_evaluates_while_its_parent_goes_on(session):
    f, w, _ = build()
    f(np.ones(6, "float32"), 3)
    plain = theano.function([], w.sum())
    began, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(began[1], b"x")
            os.read(go[0], 1)
            with pytest.raises(synk.SessionError):
                f(np.ones(6, "float32"), 1)
            assert plain() == 3 * N
            assert evaluate(9) == 3 * N
            gc.collect()
            os._exit(0)
        finally:
            os._exit(1)
    os.read(began[0], 1)
    f(np.ones(6, "float32"), 1)
    synk.all_reduce(w)
    os.write(go[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    assert (w.get_value() == 4).all()
    assert synk.check_replicas() == {}
    for end in (*began, *go):
        os.close(end)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_pool_of_processes(two):
    f, w, _ = build()
    f(np.ones(6, "float32"), 3)
    with multiprocessing.get_context("fork").Pool(3, maxtasksperchild=1) as pool:
        assert pool.map(evaluate, range(6), chunksize=1) == [3 * N] * 6
    assert (w.get_value() == 3).all()
    f(np.ones(6, "float32"), 1)
    assert synk.check_replicas() == {}


@pytest.mark.parametrize("preexec", [None, os.getpid])
def test_programs_are_started(two, preexec):
    f, w, _ = build()
    f(np.ones(6, "float32"), 3)
    program = [sys.executable, "-c", "print(open('/proc/self/maps').read())"]
    out = subprocess.run(program, preexec_fn=preexec, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "memfd" not in out
    assert (w.get_value() == 3).all()


@pytest.mark.parametrize("by_handler", [False, True])
def test_close_frees_memory_of_workers_while_variables_live(no_session, by_handler):
    synk.fork(2)
    w, large = theano.shared(np.ones(N)), theano.shared(np.ones(20 * N))
    synk.broadcast([w, large])
    synk.all_reduce([w, large])  # now the workers have copies
    files = [int(name) for name in os.listdir("/proc/self/fd") if is_memory(f"/proc/self/fd/{name}")]
    kept = os.dup(max(files, key=lambda fd: os.fstat(fd).st_size))  # the shared heap is the largest
    try:
        assert os.fstat(kept).st_blocks * 512 > 2 * large.get_value(borrow=True).nbytes
        large.set_value(np.ones(1))
        if by_handler:
            close_within_a_call()
        else:
            synk.close()
        gc.collect()
        assert os.fstat(kept).st_blocks * 512 < 2 * w.get_value(borrow=True).nbytes + 4 * 2**20
        assert (w.get_value() == 1).all()
    finally:
        os.close(kept)


def close_within_a_call():
    x, fault = T.dvector("x"), theano.shared(np.int64(NOTHING), "fault")
    f = synk.function([x], (Fault()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
    f(np.ones(6))
    synk.set_value(1, fault, SLEEP)
    before = signal.signal(signal.SIGALRM, lambda *some: synk.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(synk.SessionError, match="closed"):
            f(np.ones(6))
    finally:
        signal.signal(signal.SIGALRM, before)


def is_memory(path):
    try:
        return os.readlink(path).startswith("/memfd:synkhronos")
    except OSError:  # the descriptor that os.listdir used is closed
        return False
