"""What surrounds a program is not always as it should be: closed streams, refused system calls, low limits."""

import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from backend import T, theano
from process_state import is_running, wait_until, worker_pids
from scripts import run_script, start_script
from seccomp import needs_seccomp

import synkhronos as synk
from synkhronos._limits import free_memory

# ---------------------------------------------------------------- exceptions that cannot be shown


class Unspeakable(Exception):
    """An exception whose message is a fault of its own."""

    def __str__(self):
        raise RuntimeError("no message either")


class Speechless(theano.Op):
    """Raises an `Unspeakable` on the ranks whose second input is not 0."""

    __props__ = ()

    def make_node(self, x, fault):
        return theano.Apply(self, [x, T.as_tensor_variable(fault)], [x.type()])

    def perform(self, node, inputs, outputs):
        if inputs[1]:
            raise Unspeakable
        outputs[0][0] = inputs[0].copy()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_whose_message_fails_is_told_by_its_class(synchronize, rank):
    synchronize(3)
    x, fault = T.dvector("x"), theano.shared(np.int64(0), "fault")
    f = synk.function([x], (Speechless()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    pids = worker_pids()
    synk.set_value(rank, fault, 1)
    with pytest.raises(synk.WorkerError, match=rf"rank {rank} .*(Unspeakable|no message either)") as caught:
        f(np.ones(6))
    assert caught.value.rank == rank
    synk.broadcast(fault, 0)
    assert f(np.ones(6)) == 6
    assert worker_pids() == pids


class Unpicklable(theano.Op):
    """Cannot be pickled, and cannot be told why."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0].copy()

    def __getstate__(self):
        raise Unspeakable


def test_a_function_whose_pickling_fails_without_a_message(no_session):
    synk.fork(2)
    x = T.dvector("x")
    f = synk.function([x], Unpicklable()(x).sum(), mode="FAST_COMPILE")
    with pytest.raises(TypeError, match=r"cannot be pickled.*Unspeakable"):
        f(np.ones(4))


# ---------------------------------------------------------------- data with very many rows


def test_the_rows_of_very_long_data_cost_nothing(synchronize):
    synchronize(2)
    x = T.bvector("x")
    f = synk.function([x], [(x[:1].sum(), "sum"), (x[:1].mean(), "avg")], mode="FAST_COMPILE")
    short, long = synk.data(np.ones(100, np.int8)), synk.data(shape=(200_000_000,), dtype="int8")
    assert f(short)[0] == 2
    seconds = []
    for stop in (200_000_000, 199_999_998, 199_999_996):
        began = time.perf_counter()
        assert f(long, batch=slice(0, stop))[0] == 0
        seconds.append(time.perf_counter() - began)
        assert f.counts == (stop // 2, stop // 2)
    assert min(seconds) < 0.1


# ---------------------------------------------------------------- output streams

STREAMS = {
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "none": "sys.stdout = sys.stderr = None",
    "closed descriptors": "os.close(1); os.close(2)",
    "without flush": "sys.stdout = sys.stderr = type('Stream', (), {'write': lambda self, text: None})()",
    "full": "sys.stdout = sys.stderr = open('/dev/full', 'w'); sys.stdout.write('never to be seen')",
}


@pytest.mark.parametrize("how", STREAMS)
def test_output_streams_that_cannot_be_written_to(how, tmp_path):
    run_script(
        f"""
        result = open(sys.argv[1], "w")
        {STREAMS[how]}
        synk.fork(3, profile=True, restart_workers=True)
        x, fault = T.dvector("x"), theano.shared(np.int64(NOTHING), "fault")
        f = synk.function([x], (Fault()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
        data = synk.data(np.ones(6))
        print(f(data), file=result)
        synk.set_value(1, fault, KILL)
        try:
            f(data)
        except synk.WorkerRestarted:
            synk.broadcast(fault, NOTHING)
            print(f(data), file=result)
        synk.close()
        print(worker_pids(), file=result)
        result.close()
        os._exit(0)
        """,
        tmp_path / "result",
    )
    assert (tmp_path / "result").read_text().split() == ["6.0", "6.0", "[]"]


def test_descriptors_of_closed_streams_are_not_taken_for_memory(tmp_path):
    """A program started without standard streams: what something prints later must not land in shared memory."""
    run_script(
        """
        for number in (0, 1, 2):
            os.close(number)
        synk.fork(2)
        data = [synk.data(np.zeros(100)) for _ in range(5)]
        kept = {name: os.readlink(f"/proc/self/fd/{name}") for name in "012" if os.path.exists(f"/proc/self/fd/{name}")}
        for number in (1, 2):
            try:
                os.write(number, b"printed by a library")
            except OSError:
                pass
        x = T.dvector("x")
        f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
        with open(sys.argv[1], "w") as file:
            print([float(f(each)) for each in data], file=file)
            print([each for each in kept.values() if "synkhronos" in each or "shm" in each], file=file)
        synk.close()
        os._exit(0)
        """,
        tmp_path / "result",
    )
    assert (tmp_path / "result").read_text() == "[0.0, 0.0, 0.0, 0.0, 0.0]\n[]\n"


# ---------------------------------------------------------------- Python's recursion limit


def deep(action, n_frames):
    return action() if n_frames == 0 else deep(action, n_frames - 1)


def frames_left():
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return sys.getrecursionlimit() - depth


@functools.cache
def functions_for_recursion():
    x, s = T.dmatrix("x"), theano.shared(np.zeros(3), "s")
    exact = synk.function([x], x.sum(), updates=[(s, s + x.sum(0))], exact=True, mode="FAST_COMPILE")
    plain = synk.function([x], [(x.sum(), "sum"), (x.mean(0), "avg")], mode="FAST_COMPILE")
    return exact, plain, s


def in_sequence(exact, plain, s):
    with synk.sequence():
        exact(np.ones((7, 3)))
        synk.all_reduce(s)


LIMITED = {
    "exact": lambda exact, plain, s: exact(np.ones((7, 3))),
    "new memory": lambda exact, plain, s: exact(np.ones((7 + next(_lengths), 3))),
    "in slices": lambda exact, plain, s: plain(np.ones((7, 3)), num_slices=2),
    "data": lambda exact, plain, s: plain(synk.data(np.ones((7 + next(_lengths), 3)))),
    "collectives": lambda exact, plain, s: (synk.broadcast(s, np.ones(3)), synk.all_reduce(s)),
    "a sequence": in_sequence,
    "new function": lambda exact, plain, s: synk.function([], s.sum(), exact=True, mode="FAST_COMPILE")(),
}
_lengths = itertools.count(1000, 1000)


@pytest.mark.parametrize("what", LIMITED)
def test_a_call_near_the_recursion_limit_leaves_the_session_usable(what, synchronize):
    synchronize(3)
    functions = exact, plain, _ = functions_for_recursion()
    synk.distribute()
    pids, outcomes = worker_pids(), set()
    for left in range(10, 300, 29 if what == "new function" else 3):
        try:
            deep(lambda: LIMITED[what](*functions), frames_left() - left)
        except RecursionError:
            outcomes.add("refused")
        else:
            outcomes.add("done")
    assert outcomes == {"refused", "done"}
    assert worker_pids() == pids
    assert exact(np.ones((7, 3))) == plain(np.ones((7, 3)))[0] == 21
    assert synk.check_replicas() == {}


def test_sessions_that_begin_and_end_near_the_recursion_limit(no_session):
    """Workers have all frames that a new process has, wherever they were forked."""
    x = T.dmatrix("x")
    outcomes = set()
    for left in range(10, 320, 31):
        try:
            deep(lambda: synk.fork(3), frames_left() - left)
        except RecursionError:
            outcomes.add("refused")
            assert not worker_pids()
            continue
        outcomes.add("done")
        function = synk.function([x], x.sum(), exact=True, mode="FAST_COMPILE")
        assert function(np.ones((7, 3))) == 21
        for fewer in (10, 100):
            with pytest.raises(RecursionError):
                deep(synk.close, frames_left() - fewer)
        assert function(np.ones((7, 3))) == 21
        synk.close()
        assert not worker_pids()
    assert outcomes == {"refused", "done"}


class Endless(theano.Op):
    """Calls itself without end on the ranks whose second input is not 0."""

    __props__ = ()

    def make_node(self, x, is_endless):
        return theano.Apply(self, [x, T.as_tensor_variable(is_endless)], [x.type()])

    def perform(self, node, inputs, outputs):
        if inputs[1]:
            self.perform(node, inputs, outputs)
        outputs[0][0] = inputs[0].copy()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_op_that_meets_the_recursion_limit(rank, synchronize):
    synchronize(3)
    x, is_endless = T.dvector("x"), theano.shared(np.int64(0), "is_endless")
    f = synk.function([x], (Endless()(x, is_endless).sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    pids = worker_pids()
    synk.set_value(rank, is_endless, 1)
    with pytest.raises(synk.WorkerError, match="RecursionError") as caught:
        f(np.ones(6))
    assert caught.value.rank == rank
    synk.broadcast(is_endless, 0)
    assert f(np.ones(6)) == 6
    assert worker_pids() == pids


# ---------------------------------------------------------------- descriptors of the library's that the program closes

#: Puts the library's descriptors out of the way, and files of the program in their places.
CLOSING = {
    "closerange": "os.closerange(3, 4096)",
    "dup2": """
null = os.open("/dev/null", os.O_RDWR)
for name in os.listdir("/proc/self/fd"):
    if int(name) > 2:
        os.dup2(null, int(name))
""",
}


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("how", CLOSING)
def test_a_program_that_closes_the_descriptors_of_the_session(how, n_ranks):
    """Calls go on, or say what happened; nothing of the program's is closed; the next session works."""
    out, err = run_script(
        f"""
        synk.fork({n_ranks})
        x, s = T.dvector("x"), theano.shared(0.0, "s")
        f = synk.function([x], x.sum(), updates=[(s, s + x.sum())], exact=True, mode="FAST_COMPILE")
        data = synk.data(np.ones(7))
        assert f(data) == f(np.ones(7)) == 7
        exec({CLOSING[how]!r})
        mine = [open("/dev/null") for _ in range(60)]
        assert f(data) == 7 and f(np.ones(9)) == 9
        new = [lambda: f(np.ones(100_000)), lambda: f(synk.data(np.ones(100_000))), lambda: f(data)]
        for call in new:
            try:
                call()
            except synk.SessionError as error:
                print(str(error).startswith("the program closed file descriptors that synkhronos needs"))
        synk.close()
        print(worker_pids(), s.get_value())
        synk.fork({n_ranks})
        print(f(data), f(np.ones(100_000)), s.get_value())
        synk.close()
        print(worker_pids(), all(os.path.sameopenfile(mine[0].fileno(), file.fileno()) for file in mine))
        """,
        fresh=True,
    )
    assert out.splitlines() == ["True"] * 3 + ["[] 30.0", "7.0 100000.0 100037.0", "[] True"]
    assert "Traceback" not in err


def test_an_op_that_closes_the_descriptors_of_its_worker():
    out, _ = run_script(
        """
        class Closing(theano.Op):
            __props__ = ()
            def make_node(self, x):
                return theano.Apply(self, [x], [x.type()])
            def perform(self, node, inputs, outputs):
                if os.getpid() != controller:
                    os.closerange(3, 4096)
                outputs[0][0] = inputs[0].copy()
        controller = os.getpid()
        synk.fork(3)
        x = T.dvector("x")
        f = synk.function([x], (Closing()(x).sum(), "sum"), mode="FAST_COMPILE")
        print(f(np.ones(6)), f(np.ones(7)))
        try:
            f(np.ones(100_000))
        except synk.WorkerError as error:
            print(error.rank > 0, "SessionError: the program closed file descriptors" in str(error))
        synk.close()
        print(worker_pids())
        """
    )
    assert out.splitlines() == ["6.0 7.0", "True True", "[]"]


def test_workers_end_with_a_controller_that_closed_its_descriptors():
    process = start_script(
        """
        def fork_in_a_thread():  # else the kernel has another way to end workers
            synk.fork(3)
        thread = threading.Thread(target=fork_in_a_thread)
        thread.start(); thread.join()
        os.closerange(3, 4096)
        fault = theano.shared(np.int64(LONG_SLEEP), "fault")
        x = T.dvector("x")
        f = synk.function([x], (Fault()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
        print(*worker_pids(), flush=True)
        f(np.ones(6))
        """
    )
    try:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(is_running, workers))
        process.kill()
        assert wait_until(lambda: not any(map(is_running, workers)), 5)
    finally:
        process.kill()
        process.communicate()


def test_a_daemon_that_forks_twice_and_then_starts_a_session(tmp_path):
    """As daemons do: two forks, a session of its own, all descriptors closed, standard streams among them."""
    result = tmp_path / "result"
    run_script(
        """
        if os.fork():
            os._exit(0)
        os.setsid()
        if os.fork():
            os._exit(0)
        os.closerange(0, 4096)
        with open(sys.argv[1] + ".part", "w") as file:
            synk.fork(3)
            x = T.dvector("x")
            f = synk.function([x], x.sum(), exact=True, mode="FAST_COMPILE")
            print(f(np.ones(7)), f(np.ones(100_000)), file=file)
            synk.close()
            print(worker_pids(), file=file)
        os.rename(sys.argv[1] + ".part", sys.argv[1])
        os._exit(0)
        """,
        result,
        fresh=True,
    )
    assert wait_until(result.exists, 60)
    assert result.read_text().splitlines() == ["7.0 100000.0", "[]"]


def test_a_limit_of_open_files_that_a_fork_meets():
    """It says so, leaves nothing, and the fork works once the limit allows it."""
    out, _ = run_script(
        """
        import resource
        had = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened = lambda: set(os.listdir("/proc/self/fd"))
        before, refused = opened(), 0
        while not worker_pids():
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 1 + refused, had[1]))
            try:
                synk.fork(3)
            except (OSError, MemoryError) as error:
                assert "Too many open files" in str(error), error
                refused += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, had)
            assert worker_pids() or opened() == before
        x = T.dvector("x")
        print(refused > 0, synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")(np.ones(7)))
        synk.close()
        print(opened() == before, worker_pids())
        """
    )
    assert out.splitlines() == ["True 7.0", "True []"]


# ---------------------------------------------------------------- what the kernel or an administrator forbids

#: Uses all that ranks have in common: data, staged inputs, results, long messages, collectives of every size.
WORK = """
def work(n_ranks=3):
    assert synk.fork(n_ranks) == n_ranks
    x = T.dvector("x")
    w, large = theano.shared(np.ones(10), "w"), theano.shared(np.ones(3_000_000), "large")
    f = synk.function([x], [(x * w[0] * large[0], "gather"), (x.sum(), "sum")], mode="FAST_COMPILE")
    for n in (10, 200_000):
        data = synk.data(np.arange(float(n)))
        for values in (data, data.data.copy()):
            gathered, total = f(values)
            assert (gathered == np.arange(n)).all() and total == n * (n - 1) / 2
        assert f(data, batch=[3, 1])[0].tolist() == [3, 1]
    synk.set_value(n_ranks - 1, w, np.full(10, 1 + n_ranks))
    synk.all_reduce(w, op="avg")
    assert (synk.gather(w) == 2).all()
    synk.all_reduce(large, op="sum")
    assert (synk.get_value(n_ranks - 1, large) == n_ranks).all()
    most = theano.shared(5.0, "most")
    g = synk.function([x], T.opt.Assert("long " * 30_000)(x, T.lt(x.max(), most)).sum(), mode="FAST_COMPILE")
    assert g(np.ones(6)) == 2
    synk.set_value(1, most, 0.0)
    try:
        g(np.ones(6))
    except synk.WorkerError as error:  # which is longer than what has room beforehand
        assert error.rank == 1 and str(error).count("long") >= 30_000
    else:
        raise AssertionError("no error")
    synk.close()
    print("worked")
"""

FORBIDDEN = {
    "fallocate": "refuse('fallocate')",
    "memfd_create is not there": "import errno; refuse('memfd_create', error=errno.ENOSYS)",
    "pidfd_open": "refuse('pidfd_open')",
    "all of them": "refuse('fallocate', 'memfd_create', 'pidfd_open', 'sched_getaffinity')",
    "to look into this process": "import ctypes; assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0",
}


@needs_seccomp
@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_sandbox_forbids(what):
    out, err = run_script(f"{WORK}\nfrom seccomp import refuse\n{FORBIDDEN[what]}\nwork()\n")
    assert out == "worked\n"
    assert err == ""


@needs_seccomp
def test_a_worker_ends_with_its_controller_where_pidfds_are_refused():
    process = start_script(
        """
        from seccomp import refuse
        refuse("pidfd_open")
        def fork_in_a_thread():  # else the kernel has another way to end workers
            synk.fork(2)
        thread = threading.Thread(target=fork_in_a_thread)
        thread.start(); thread.join()
        fault = theano.shared(np.int64(LONG_SLEEP), "fault")
        x = T.dvector("x")
        f = synk.function([x], (Fault()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
        synk.distribute()
        synk.set_value(0, fault, NOTHING)
        print(*worker_pids(), flush=True)
        f(np.ones(4))
        """
    )
    try:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 1
        time.sleep(0.3)
        process.kill()
        assert wait_until(lambda: not any(map(is_running, workers)), 2)
    finally:
        process.kill()
        process.communicate()


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only the superuser may do that")

IN_A_NAMESPACE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def own_mounts():
    assert libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0
def cover(path, options):
    assert libc.mount(b"none", path, b"tmpfs", options, None) == 0
"""

SURROUNDINGS = {
    "without /proc": "own_mounts(); cover(b'/proc', 0)",
    "a /dev/shm that cannot be written": "own_mounts(); cover(b'/dev/shm', 1)",
    "without /proc and /dev/shm": "own_mounts(); cover(b'/proc', 0); cover(b'/dev/shm', 1)",
    "a namespace of processes, with the /proc of its parent": """
assert libc.unshare(0x20000000) == 0
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
}


LIBRARIES_FOUND = """
from threadpoolctl import ThreadpoolController
def found():
    try:
        return len(ThreadpoolController().info()) > 0
    except OSError:
        return False
"""


@needs_root
@pytest.mark.parametrize("where", SURROUNDINGS)
def test_surroundings_of_containers(where):
    setting = f"{WORK}\n{IN_A_NAMESPACE}\n{SURROUNDINGS[where]}"
    out, err = run_script(f"{setting}\nwork()\n{LIBRARIES_FOUND}\nprint(found())\nsys.stdout.flush()\n")
    worked, found = out.splitlines()
    assert worked == "worked"
    if found == "True":
        assert err == ""
    else:
        assert "without /proc" in where  # of which some versions of threadpoolctl read
        assert err == (
            "the threads of BLAS and OpenMP cannot be limited to each rank's cores "
            "([Errno 2] No such file or directory: '/proc/self/maps'): set OMP_NUM_THREADS\n"
        )


@needs_root
def test_another_user_after_setuid():
    """The kernel lets nobody look into a process whose user has changed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        out, err = run_script(
            # PyTensor imports setuptools late, when this user may no longer read where it is
            f"{WORK}\nimport setuptools\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\nwork()\n",
            environment={
                "THEANO_FLAGS": f"base_compiledir={folder},cxx=",
                "PYTENSOR_FLAGS": f"base_compiledir={folder},cxx=,linker=vm",
                "HOME": folder,
            },
        )
    assert out == "worked\n"
    assert [line for line in err.splitlines() if "g++" not in line] == []


def test_a_limit_of_file_sizes_is_named():
    out, _ = run_script(
        """
        import resource
        synk.fork(2)
        x = T.dvector("x")
        f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
        assert f(np.ones(6)) == 6
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited))
        for attempt in (lambda: synk.data(np.ones(100_000)), lambda: f(np.ones(100_000))):
            try:
                attempt()
            except MemoryError as error:
                print("100,000 bytes (ulimit -f)" in str(error))
        assert f(np.ones(6)) == 6
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
        print(f(np.ones(100_000)))
        """
    )
    assert out.split() == ["True", "True", "100000.0"]


def test_more_than_the_machine_has_is_refused_before_it_is_taken(synchronize, monkeypatch):
    synchronize(2)
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: pytest.fail("it was taken"))
    with pytest.raises(MemoryError, match=r"[\d,]+ bytes of shared memory wanted, [\d,]+ bytes free on this machine"):
        synk.data(dtype="uint8", shape=(psutil.virtual_memory().total,))


def test_the_limit_of_a_container_is_seen(tmp_path):
    """Both versions of memory cgroups, as the kernel lays them out."""
    unified, old = tmp_path / "unified", tmp_path / "old"
    job = unified / "cgroup" / "batch" / "job"
    job.mkdir(parents=True)
    (unified / "proc" / "self").mkdir(parents=True)
    (unified / "proc" / "self" / "cgroup").write_text("0::/batch/job\n")
    (unified / "proc" / "meminfo").write_text("MemAvailable: 1000 kB\nSwapFree: 24 kB\n")
    (job / "memory.max").write_text("max\n")
    for name, text in (("max", "9000"), ("current", "5000"), ("stat", "anon 1\ninactive_file 700\nactive_file 50\n")):
        (job.parent / f"memory.{name}").write_text(text)
    limits = []
    for swap in (None, "max\n", "4000\n", "600\n", "0\n"):  # what a cgroup may take of the machine's swap
        if swap is not None:
            (job.parent / "memory.swap.max").write_text(swap)
            (job.parent / "memory.swap.current").write_text("500")
        limits.append([n_bytes for n_bytes, _ in free_memory(unified / "proc", unified / "cgroup")])
    assert {machine for machine, _ in limits} == {1024 * 1024}
    assert [cgroup for _, cgroup in limits] == [4750 + swap for swap in (24 * 1024, 24 * 1024, 3500, 100, 0)]
    memory = old / "cgroup" / "memory"
    memory.mkdir(parents=True)
    (old / "proc" / "self").mkdir(parents=True)
    (old / "proc" / "self" / "cgroup").write_text(
        "4:memory:/docker/abc\n0::/\n"
    )  # what the container sees is at the top
    (old / "proc" / "meminfo").write_text("MemAvailable: 1 kB\nSwapFree: 0 kB\n")
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert [n_bytes for n_bytes, _ in free_memory(old / "proc", old / "cgroup")] == [1024]
    (memory / "memory.limit_in_bytes").write_text("9000")
    (memory / "memory.usage_in_bytes").write_text("8000")
    (memory / "memory.stat").write_text("total_inactive_file 100\ntotal_active_file 20\n")
    assert [n_bytes for n_bytes, _ in free_memory(old / "proc", old / "cgroup")] == [1024, 1120]
    (old / "proc" / "meminfo").write_text("MemAvailable: 1 kB\nSwapFree: 1 kB\n")
    (memory / "memory.memsw.limit_in_bytes").write_text("9600")  # of memory and swap together
    (memory / "memory.memsw.usage_in_bytes").write_text("8100")
    assert [n_bytes for n_bytes, _ in free_memory(old / "proc", old / "cgroup")] == [2048, 1120 + 500]


CGROUP = Path("/sys/fs/cgroup/memory") / f"synkhronos-{os.getpid()}"


@pytest.fixture
def little_cgroup():
    """A memory cgroup of 1 GiB, where one can be made."""
    try:
        CGROUP.mkdir()
        (CGROUP / "memory.limit_in_bytes").write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield CGROUP
    wait_until(lambda: not (CGROUP / "tasks").read_text(), 5)
    CGROUP.rmdir()


def test_a_container_of_little_memory(little_cgroup):
    """What a container cannot hold is refused; the kernel kills nobody."""
    out, _ = run_script(
        """
        open(sys.argv[1] + "/tasks", "w").write(str(os.getpid()))
        synk.fork(2)
        for size in (2 << 30, 1 << 30):
            try:
                synk.data(dtype="uint8", shape=(size,))
            except MemoryError as error:
                print("memory cgroup" in str(error))
        x = T.bvector("x")
        f = synk.function([x], (x[:1].sum(), "sum"), mode="FAST_COMPILE")
        data = synk.data(dtype="uint8", shape=(1 << 28,))
        print(f(synk.data(np.ones(4, "int8"))))
        """,
        little_cgroup,
    )
    assert out.split() == ["True", "True", "2"]


def test_what_ranks_compute_in_a_container_of_little_memory(little_cgroup):
    """Arrays of regions, kept ones, and data take turns in the memory that there is; the kernel kills nobody."""
    out, err = run_script(
        """
        open(sys.argv[1] + "/tasks", "w").write(str(os.getpid()))
        synk.fork(2)
        x, w = T.bvector("x"), theano.shared(np.zeros(2 << 20), "w")
        arrays = [T.alloc(w[0] + x[0], size << 17).sum() for size in (100, 150, 120)]  # of so many MiB on each rank
        f = synk.function([x], [(array, "avg") for array in arrays], updates=[(w, w + 1)], mode="FAST_COMPILE")
        for i in range(4):
            print(*f(np.ones(4, "int8")) == (1.0 + i) * 2**17 * np.array([100, 150, 120]))
            kept = synk.memory().kept
            print(len(synk.data(np.ones(420 << 20, "int8"))) >> 20, kept[0] + kept[1] > 100 << 20)
        """,
        little_cgroup,
    )
    assert err == ""
    assert out.split() == ["True", "True", "True", "420", "True"] * 4


# ---------------------------------------------------------------- a job that is stopped


@pytest.mark.parametrize("when", ["computing", "waiting"])
def test_a_job_that_is_stopped_for_longer_than_the_timeout_goes_on(when):
    """As batch systems do to run something more urgent, and users by Ctrl-Z."""
    process = start_script(
        f"""
        synk.fork(3, timeout=2.0)
        x, fault = T.dvector("x"), theano.shared(np.int64(NOTHING), "fault")
        f = synk.function([x], (Fault()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
        assert f(np.ones(6)) == 6
        synk.broadcast(fault, SLEEP)
        synk.set_value(0, fault, {"SLEEP" if when == "computing" else "NOTHING"})
        print("ready", flush=True)
        print(f(np.ones(6)), f(np.ones(6)), flush=True)
        """,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.4)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(3.5)
        os.killpg(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (out, err, process.returncode) == ("6.0 6.0\n", "", 0)


def test_a_job_that_is_stopped_while_it_closes_kills_no_worker():
    process = start_script(
        """
        synk.fork(3)
        print(*worker_pids(), flush=True)
        sys.stdin.readline()
        synk.close()
        print("closed")
        """,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        first, _ = map(int, process.stdout.readline().split())
        os.kill(first, signal.SIGSTOP)  # a slow one: the master waits for it
        process.stdin.write("go on\n")
        process.stdin.flush()
        time.sleep(1)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(5.5)  # more than the master grants
        os.killpg(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (out, err, process.returncode) == ("closed\n", "", 0)


@needs_seccomp
def test_a_fork_that_the_kernel_refuses_leaves_nothing():
    out, _ = run_script(
        """
        import errno, gc
        from seccomp import refuse
        synk.fork(2); synk.close()
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        refuse("clone", error=errno.EAGAIN)
        for _ in range(5):
            try:
                synk.fork(3)
            except BlockingIOError as error:
                print(error.errno == errno.EAGAIN)
        gc.collect()
        print(len(os.listdir("/proc/self/fd")) - before)
        """
    )
    assert out.split() == ["True"] * 5 + ["0"]
