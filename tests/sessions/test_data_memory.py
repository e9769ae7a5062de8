"""Memory of `synk.data`: files, other processes, and how it is freed."""

import copy
import gc
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys

import numpy as np
import psutil
import pytest
from deadline import wait_for
from multinode_sessions import one_machine
from process_state import shared_bytes, worker_pids
from scripts import ROOT, run_script
from summing_function import sum_of

import synkhronos as synk

MEGABYTE = 1 << 20


# ---------------------------------------------------------------- files


@pytest.fixture
def file(tmp_path):
    """Return the path of a file with the float64 numbers 0 to 59."""
    path = tmp_path / "numbers"
    np.arange(60.0).tofile(path)
    return path


def mapped_by(pid, path):
    with open(f"/proc/{pid}/maps") as maps:
        return str(path) in maps.read()


PARTS = [(0, slice(None)), (0, slice(4, 9)), (16, slice(2, None)), (0, slice(0, 0)), (0, slice(None, None, 2))]


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(("offset", "part"), PARTS)
def test_a_memmap_is_shared_as_its_file(session, file, mode, offset, part):
    memmap = np.memmap(file, "float64", mode, offset=offset, shape=(19, 3))[part]
    expected = np.array(memmap)
    x = synk.data(memmap)
    assert sum_of("float64", 2)(x) == expected.sum()
    np.testing.assert_array_equal(x.data, expected)
    if len(expected) and part.step is None:
        assert np.shares_memory(x.data, memmap) or mapped_by(os.getpid(), file)
        assert all(mapped_by(pid, file) for pid in worker_pids())
        if mode == "r+":
            x[0] = 100
            assert sum_of("float64", 2)(x) == expected[1:].sum() + 300
            assert (memmap[0] == 100).all()
            assert np.fromfile(file)[offset // 8 + 3 * (part.start or 0)] == 100
        else:
            with pytest.raises(ValueError, match="read-only"):
                x[0] = 100
    x.free_memory()
    assert x.shape == (0, 0)


@one_machine("the test inspects workers of one node")
def test_a_read_only_memmap_shrinks_in_place_and_grows_by_a_copy(two, file):
    x = synk.data(np.memmap(file, "float64", "r"))
    x.set_length(10)
    assert sum_of("float64", 1)(x) == 45
    assert mapped_by(worker_pids()[0], file)
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1
    x.set_length(70)
    assert sum_of("float64", 1)(x) == 45
    x[0] = 1
    assert sum_of("float64", 1)(x) == 46
    np.testing.assert_array_equal(np.fromfile(file), np.arange(60.0))


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_set_value_never_writes_to_the_file(two, file, mode):
    x = synk.data(np.memmap(file, "float64", mode))
    x.set_value(np.full(5, 7.0))
    assert sum_of("float64", 1)(x) == 35
    x[:] = 8
    x.set_length(60)
    x[:] = 9
    np.testing.assert_array_equal(np.fromfile(file), np.arange(60.0))


def test_a_copy_on_write_memmap_is_copied(two, file):
    memmap = np.memmap(file, "float64", "c")
    memmap[0] = 1000  # the file itself does not change
    x = synk.data(memmap)
    assert sum_of("float64", 1)(x) == 1000 + np.arange(60).sum()


def test_a_memmap_at_an_odd_offset(two, tmp_path):
    path = tmp_path / "odd"
    path.write_bytes(b"#" + np.arange(20.0).tobytes())
    x = synk.data(np.memmap(path, "float64", "r", offset=1))
    assert sum_of("float64", 1)(x) == 190


def test_a_memmap_whose_file_is_gone_or_replaced(two, file):
    memmap = np.memmap(file, "float64", "r")
    file.unlink()
    np.zeros(60).tofile(file)
    x = synk.data(memmap)
    assert sum_of("float64", 1)(x) == np.arange(60).sum()
    file.unlink()
    y = synk.data(memmap)
    assert sum_of("float64", 1)(y) == np.arange(60).sum()


def test_data_of_a_deleted_file_do_not_harm_other_calls(two, file):
    x = synk.data(np.memmap(file, "float64", "r"))
    y = synk.data(np.ones(5))
    file.unlink()
    assert sum_of("float64", 1)(y) == 5
    assert sum_of("float64", 1)(x) == np.arange(60).sum()
    file.write_bytes(np.zeros(60).tobytes())
    z = synk.data(np.memmap(file, "float64", "r"))
    file.unlink()
    del z
    assert sum_of("float64", 1)(y) == 5


def test_the_dtype_of_a_memmap_can_be_forced_by_a_copy(two, file):
    x = synk.data(np.memmap(file, "float64", "r"), dtype="float32", force_cast=True)
    assert sum_of("float32", 1)(x) == np.arange(60).sum()
    x[0] = 1


# ---------------------------------------------------------------- other processes


def test_processes_forked_later_read_and_write(two, summing):
    x = synk.data(np.zeros(4))
    context = multiprocessing.get_context("fork")

    def write(data):
        data[1] = 5
        np.asarray(x)[2] = data[0] + 6

    x[0] = 1
    process = context.Process(target=write, args=(x.data,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert x.data.tolist() == [1, 5, 7, 0]
    assert summing(x) == 13


def test_a_child_may_drop_its_data(two, summing):
    x = synk.data(np.ones(4))
    pid = os.fork()
    if pid == 0:
        x.free_memory()
        x.set_value(np.full(100, 3.0))
        os._exit(0 if x.data.sum() == 300 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert summing(x) == 4
    x[0] = 2
    assert summing(x) == 5


def test_data_survive_their_session(no_session, two):
    x = synk.data(np.arange(10.0))
    assert sum_of("float64", 1)(x) == 45
    synk.close()
    assert x[3] == 3
    x[3] = 4
    x.set_length(5)
    assert x.data.tolist() == [0, 1, 2, 4, 4]
    with pytest.raises(synk.SessionError, match="fork"):
        synk.data(np.ones(3))
    synk.fork(3)
    assert sum_of("float64", 1)(x) == 11
    x.set_length(8)
    x[5:] = 1
    assert sum_of("float64", 1)(x) == 14


def test_data_that_no_worker_has_seen_survive_their_session(no_session, two, file):
    x, y = synk.data(np.arange(10.0)), synk.data(np.memmap(file, "float64", "r"))
    synk.close()
    synk.fork(2)
    assert sum_of("float64", 1)(x) == 45
    assert sum_of("float64", 1)(y) == np.arange(60).sum()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: copy.deepcopy([one, one])[1]])
def test_copies_have_memory_of_their_own(two, summing, file, copied):
    originals = [
        synk.data(np.arange(4.0), name="it", minibatch=True, oversize=2),
        synk.data(np.memmap(file, "float64", "r+")[:4]),
        synk.data(dtype="float64", ndim=1),
        synk.data(np.zeros(0)),
    ]
    for x in originals:
        y = copied(x)
        assert (y.dtype, y.shape, y.name, y.minibatch) == (x.dtype, x.shape, x.name, x.minibatch)
        if not x.size:
            continue
        before = x.data.copy()
        y[1] = 100
        assert np.array_equal(x.data, before)
        assert summing(x) == before.sum()
        x.free_memory()
        del x
        assert summing(y) == before.sum() - before[1] + 100
    assert np.memmap(file, "float64", "r")[1] != 100


def test_a_deep_copy_copies_each_object_once(two):
    x = synk.data(np.ones(3))
    first, second = copy.deepcopy((x, x))
    assert first is second
    assert first is not x


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_data_are_the_same_memory(two, summing, protocol):
    x = synk.data(np.arange(4.0), name="it", minibatch=True)
    y = pickle.loads(pickle.dumps(x, protocol))
    assert (y.name, y.minibatch, y.shape) == ("it", True, (4,))
    y[0] = 10
    assert x[0] == 10
    del x
    gc.collect()
    assert summing(y) == 16  # the memory lives as long as any of the objects
    z = pickle.loads(pickle.dumps(y, protocol))
    y.free_memory()
    assert y.shape == (0,)
    assert summing(z) == 16
    y.set_value(np.ones(2))
    assert (summing(y), summing(z)) == (2, 16)
    pickled = pickle.dumps(z, protocol)
    del z
    with pytest.raises(TypeError, match=r"numpy\.asarray"):
        pickle.loads(pickled)
    assert pickle.loads(pickle.dumps(synk.data(dtype="int8", ndim=2), protocol)).shape == (0, 0)


def test_pickled_data_of_a_file_and_of_structures(two, file):
    x = synk.data(np.memmap(file, "float64", "r+")[10:20])
    y = pickle.loads(pickle.dumps(x))
    y[0] = -5
    assert np.memmap(file, "float64", "r")[10] == -5
    structured = synk.data(np.zeros(3, [("a", "i4"), ("b", "f8")]))
    assert pickle.loads(pickle.dumps(structured)).dtype == structured.dtype


def test_pickled_data_in_other_processes(two, summing):
    x = synk.data(np.arange(4.0))
    with multiprocessing.get_context("fork").Pool(1) as pool:  # forked later, it inherits the memory
        assert pool.apply(_write_through, (x,)) == 6
    assert x.data.tolist() == [50, 1, 2, 3]
    assert summing(x) == 56
    script = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))"
    command = [sys.executable, "-c", script, pickle.dumps(x).hex()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("TypeError: got pickled Data of shape (4,)")
    assert "numpy.asarray(data)" in done.stderr


def _write_through(data):
    total = data.data.sum()
    data[0] = 50
    return total


def test_free_memory_frees_it_on_every_rank(three, summing):
    summing(np.ones(10))
    pids = [os.getpid(), *worker_pids()]
    before = [shared_bytes(pid) for pid in pids]
    x = synk.data(np.zeros(4 * MEGABYTE))
    assert summing(x) == 0
    assert all(shared_bytes(pid) >= old + 32 * MEGABYTE for pid, old in zip(pids, before))
    x.free_memory()
    assert x.shape == (0,)
    assert x.alloc_size == 0
    wait_for(lambda: all(shared_bytes(pid) < old + MEGABYTE for pid, old in zip(pids, before)), "freed memory")
    x.set_value(np.ones(3))
    assert summing(x) == 3


@pytest.mark.parametrize("used", [True, False])
def test_memory_of_dropped_data_is_freed(two, summing, used):
    summing(np.ones(10))
    before = [shared_bytes(pid) for pid in (os.getpid(), *worker_pids())]
    x = synk.data(np.zeros(4 * MEGABYTE))
    if used:
        summing(x)
        summing(x)  # a repeated call, whose plan is cached
    del x
    gc.collect()
    if used:  # otherwise it is kept until workers have mapped it
        assert shared_bytes(os.getpid()) < before[0] + MEGABYTE
    summing(np.ones(10))
    assert all(shared_bytes(pid) < old + MEGABYTE for pid, old in zip((os.getpid(), *worker_pids()), before))


def test_many_data_do_not_pile_up(two, summing):
    pids = [os.getpid(), *worker_pids()]
    before = [shared_bytes(pid) for pid in pids]
    for _ in range(60):
        x = synk.data(dtype="uint8", shape=(20 * MEGABYTE,))
    assert x.size == 20 * MEGABYTE
    assert all(shared_bytes(pid) - old < 200 * MEGABYTE for pid, old in zip(pids, before))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        x = synk.data(np.ones(3))
    assert len(os.listdir("/proc/self/fd")) < before + 150
    assert summing(x) == 3


def test_more_data_than_descriptors(two):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        kept = [synk.data(np.full(3, float(i))) for i in range(400)]
        assert sum_of("float64", 1)(kept[-1]) == 3 * 399
        assert sum_of("float64", 1)(kept[0]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_dropped_before_close_is_freed():
    run_script(
        """
        x = T.dvector("x")
        synk.fork(2)
        f = synk.function([x], x.sum())
        f(np.ones(3))
        def mapped():
            return sum("/memfd:synkhronos" in line for line in open("/proc/self/maps"))
        before = mapped()
        d = synk.data(np.zeros(1_000_000))
        f(d)
        del d
        e = synk.data(np.zeros(1_000_000))
        del e
        synk.close()
        import gc; gc.collect()
        assert mapped() <= before, (mapped(), before)
        """
    )


def test_too_little_shared_memory_is_a_memory_error_and_changes_nothing(two, summing):
    x = synk.data(np.arange(10.0))
    too_much = psutil.virtual_memory().total * 2
    with pytest.raises(MemoryError, match=r"cannot allocate.*free"):
        x.set_length(too_much // 8)
    assert x.data.tolist() == list(range(10))
    with pytest.raises(MemoryError):
        x.set_shape((too_much,))
    with pytest.raises(MemoryError):
        synk.data(dtype="float64", shape=(too_much,))
    assert x.data.tolist() == list(range(10))
    assert summing(x) == 45
    x.set_length(20)
    assert summing(x) == 45


def test_freed_memory_can_be_used_at_once():
    """Freed data make room for the next, in memory that holds only one of them. A limit simulates the full memory."""
    run_script(
        """
        import resource
        synk.fork(2)
        x = T.dvector("x")
        f = synk.function([x], (x.sum(), "sum"))
        f(np.ones(3))
        from synkhronos._memory import descriptors as anonymous
        from process_state import shared_bytes
        def most():  # workers unmap memory later
            return max(shared_bytes(pid) for pid in (os.getpid(), *worker_pids()))
        limit = most() + 50_000_000
        def counting(size):
            if most() + size > limit:
                raise MemoryError("as if the machine were full")
        anonymous.check_room = counting
        for i in range(10):
            d = synk.data(np.ones(4_000_000))
            assert f(d) == 4_000_000
            if i < 5:
                d.free_memory()
            del d
        """
    )
