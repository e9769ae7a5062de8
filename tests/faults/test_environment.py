"""Unusual environments: closed streams, closed descriptors, low limits, stopped jobs, and refused system calls."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest
from backend import T, theano
from deadline import wait_for
from fault_ops import Copy, Fault
from process_state import is_running, wait_for_a_call, wait_for_end, worker_pids
from scripts import read_pids, run_script, start_script
from seccomp import needs_seccomp

import synkhronos as synk

# ---------------------------------------------------------------- exceptions that cannot be printed


class Unspeakable(Exception):
    """An exception whose message raises another exception."""

    def __str__(self):
        raise RuntimeError("no message either")


class Speechless(Fault):
    """An operation that raises an `Unspeakable` on ranks whose second input is not 0."""

    def perform(self, node, inputs, outputs):
        if inputs[1]:
            raise Unspeakable
        outputs[0][0] = inputs[0].copy()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_whose_message_fails_is_reported_by_its_class(synchronize, rank):
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


class Unpicklable(Copy):
    """An operation that cannot be pickled, and whose error cannot be printed."""

    def __getstate__(self):
        raise Unspeakable


def test_a_function_whose_pickling_fails_without_a_message(no_session):
    synk.fork(2)
    x = T.dvector("x")
    f = synk.function([x], Unpicklable()(x).sum(), mode="FAST_COMPILE")
    with pytest.raises(TypeError, match=r"cannot be pickled.*Unspeakable"):
        f(np.ones(4))


# ---------------------------------------------------------------- data with very many rows


def test_calls_with_very_long_data_take_no_time_for_each_row(synchronize):
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


def test_descriptors_of_closed_streams_are_not_used_for_memory(tmp_path):
    """In a program without standard streams, later writes to descriptors 1 and 2 do not overwrite shared memory."""
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


# ---------------------------------------------------------------- descriptors of the library that the program closes

#: Programs that close the library's descriptors, or replace them by other files.
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
    """Calls work or report the closed descriptors, the program's files stay open, and the next session works."""
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
        class Closing(Copy):
            def perform(self, node, inputs, outputs):
                if os.getpid() != controller:
                    os.closerange(3, 4096)
                super().perform(node, inputs, outputs)
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


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("", "os.closerange(3, 4096)"),
        pytest.param("from seccomp import refuse; refuse('pidfd_open')", "synk.distribute()", marks=needs_seccomp),
    ],
    ids=["descriptors it closed", "pidfds are refused"],
)
def test_workers_end_with_a_controller_without_the_usual_descriptors(first, then):
    process = start_script(
        f"""
        {first}
        def fork_in_a_thread():  # otherwise the kernel would end workers by their parent-death signal
            synk.fork(3)
        thread = threading.Thread(target=fork_in_a_thread)
        thread.start(); thread.join()
        fault = theano.shared(np.int64(LONG_SLEEP), "fault")
        x = T.dvector("x")
        f = synk.function([x], (Fault()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
        {then}
        print(*worker_pids(), flush=True)
        with contextlib.suppress(synk.SessionError):  # "the program closed file descriptors"
            f(np.ones(6))
        signal.pause()
        """
    )
    try:
        workers = read_pids(process)
        if first:
            wait_for_a_call(process.pid)
        assert all(map(is_running, workers))
        process.kill()
        wait_for_end(workers)
    finally:
        process.kill()
        process.communicate()


def test_a_daemon_that_forks_twice_and_then_starts_a_session(tmp_path):
    """A session works in a daemon: after two forks and `setsid`, with all descriptors and standard streams closed."""
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
    wait_for(result.exists, "the result")
    assert result.read_text().splitlines() == ["7.0 100000.0", "[]"]


def test_a_fork_that_exceeds_the_limit_of_open_files():
    """`fork` reports the limit and leaves no descriptors open, and works once the limit allows it."""
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


def test_a_limit_of_file_sizes_is_reported():
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


# ---------------------------------------------------------------- a job that is stopped


@pytest.mark.parametrize("when", ["computing", "waiting"])
def test_a_job_that_is_stopped_for_longer_than_the_timeout_goes_on(when):
    """The timeout does not count the time in which a batch system, or Ctrl-Z, has stopped the job."""
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
        wait_for_a_call(process.pid)
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
        first, second = read_pids(process)
        os.kill(first, signal.SIGSTOP)  # a slow worker: the controller waits for it
        process.stdin.write("go on\n")
        process.stdin.flush()
        wait_for_end([second])
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(5.5)  # longer than the controller waits for workers to end
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
