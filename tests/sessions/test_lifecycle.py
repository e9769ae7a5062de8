"""`fork` and `close`: calls in any order, `with` blocks, warnings, devices and arguments."""

import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import psutil
import pytest
from backend import T, theano
from process_state import worker_pids
from scripts import SESSION, read_pids, run_script, start_script
from summing_function import built, summing
from threadpoolctl import threadpool_info

import synkhronos as synk
from synkhronos._session import diagnostics, lifecycle


@pytest.mark.usefixtures("no_session")
class TestOrder:
    def test_fork_returns_the_number_of_ranks(self):
        for n in (1, 4):
            assert synk.fork(n) == n
            assert len(worker_pids()) == n - 1
            synk.close()
            assert worker_pids() == []

    def test_all_cores_by_default(self):
        assert synk.fork() == len(os.sched_getaffinity(0))

    def test_fork_twice_is_an_error_and_harmless(self):
        synk.fork(2)
        pids = worker_pids()
        with pytest.raises(RuntimeError, match=r"close\(\)"):
            synk.fork(2)
        assert worker_pids() == pids
        assert summing()(np.ones(5)) == 5

    def test_close_twice_or_before_fork_warns(self):
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="no session"):
                synk.close()
        synk.fork(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            synk.close()
        with pytest.warns(RuntimeWarning, match="no session"):
            synk.close()

    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("function", lambda: synk.function([], [])),
            ("distribute", synk.distribute),
            ("data", lambda: synk.data(np.ones(3))),
            ("", lambda: built["f"](np.ones(3))),
            ("", lambda: built["f"].build_inputs(np.ones(3))),
            ("memory", synk.memory),
            ("check_replicas", synk.check_replicas),
            ("sequence", lambda: contextlib.ExitStack().enter_context(synk.sequence())),
        ],
    )
    def test_calls_without_a_session_ask_for_fork(self, name, call):
        synk.fork(1)
        summing()
        synk.close()
        with pytest.raises(synk.SessionError, match=rf"{name}.*fork\(\)"):
            call()
        assert built["f"].as_theano(np.ones(3)) == 3  # Theano alone needs no session

    def test_old_functions_data_and_variables_in_a_new_session(self):
        synk.fork(2)
        function, w = summing(), built["w"]
        data = synk.data(np.arange(7.0))
        synk.broadcast(w, np.zeros(2))
        assert function(data) == 21
        own = w.get_value()
        synk.close()
        for n_ranks in (3, 1, 2):
            synk.fork(n_ranks)
            synk.distribute()
            np.testing.assert_array_equal(synk.gather(w), [own] * n_ranks)  # the controller's values
            synk.broadcast(w, np.zeros(2))
            assert function(data) == 21
            assert function(data, num_slices=3) == 21
            own = w.get_value()
            synk.close()

    def test_sessions_one_after_the_other_leave_nothing(self):
        def grown():
            synk.fork(3)
            assert summing()(np.ones(4)) == 4
            synk.close()
            return len(os.listdir("/proc/self/fd")), len(open("/proc/self/maps").readlines())

        grown()
        first = grown()
        for _ in range(4):
            last = grown()
        assert last[0] <= first[0]
        assert last[1] <= first[1] + 5

    def test_a_function_survives_two_sessions_without_use(self):
        x = T.dvector("x")
        with synk.session(2):
            function = synk.function([x], x.sum())
        with synk.session(2):
            pass
        with synk.session(2):
            assert function(np.ones(4)) == 2


@pytest.mark.usefixtures("no_session")
class TestBlock:
    """`synk.session`, as a context manager and as a decorator."""

    def test_it_forks_and_closes(self):
        with synk.session(3, use_gpu=False, master_rank=1) as n_ranks:
            assert n_ranks == 3
            assert len(worker_pids()) == 2
            assert summing()(np.ones(4)) == 4
        assert worker_pids() == []
        with pytest.raises(synk.SessionError):
            synk.distribute()
        with synk.session(2), warnings.catch_warnings():
            warnings.simplefilter("error")
            synk.close()  # the end of the block does not warn
        with synk.session(2):
            synk.close()
            synk.fork(3)
        assert worker_pids() == []

    def test_as_a_decorator_and_where_a_function_returns(self):
        @synk.session(2)
        def decorated():
            return len(worker_pids())

        def returning():
            with synk.session(2):
                return len(worker_pids())

        assert [decorated(), decorated(), returning(), returning()] == [1] * 4
        assert worker_pids() == []

    def test_arguments_are_those_of_fork(self):
        assert list(inspect.signature(synk.session).parameters) == list(inspect.signature(synk.fork).parameters)
        for function in synk.session, synk.fork:
            with pytest.raises(TypeError, match="fork has no argument 'n_paralel'; did you mean n_parallel"):
                function(n_paralel=2)
        with pytest.raises(ValueError, match="n_parallel is 0; expected at least 1"), synk.session(0):
            raise AssertionError
        synk.fork(2)
        with pytest.raises(synk.SessionError, match="fork was already called"), synk.session(2):
            raise AssertionError
        assert len(worker_pids()) == 1  # the worker of the first session

    @pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
    def test_exceptions_pass_through_the_block(self, error):
        with pytest.raises(type(error)) as caught, synk.session(2):
            raise error
        assert caught.value is error
        assert worker_pids() == []

    def test_an_error_of_close_does_not_mask_that_of_the_block(self, monkeypatch, caplog):
        def fail(session):
            raise OSError("cannot be finished")

        monkeypatch.setattr(lifecycle, "finish", fail)
        with pytest.raises(ValueError, match="mine"), synk.session(2):
            raise ValueError("mine")
        assert "closing the session failed, too: OSError: cannot be finished" in caplog.text
        assert worker_pids() == []
        with pytest.raises(OSError, match="cannot be finished"), synk.session(2):
            pass
        assert worker_pids() == []

    def test_a_broken_session(self):
        with pytest.raises(synk.WorkerDied), synk.session(3):
            summing()(np.ones(3))
            os.kill(worker_pids()[0], signal.SIGKILL)
            summing()(np.ones(3))
        assert worker_pids() == []
        with synk.session(3):
            os.kill(worker_pids()[0], signal.SIGKILL)
            with pytest.raises(synk.WorkerDied):
                summing()(np.ones(3))
        assert worker_pids() == []

    def test_a_child_of_the_user_leaves_the_session_alone(self):
        """An exception that leaves the block in a forked child does not close the session."""
        try:
            with synk.session(2):
                pid = os.fork()
                if pid == 0:
                    raise SystemExit
                assert os.waitpid(pid, 0)[1] == 0
                assert summing()(np.ones(3)) == 3
        except SystemExit:
            os._exit(0)
        assert worker_pids() == []

    def test_ctrl_c(self):
        script = """
            signal.signal(signal.SIGINT, signal.default_int_handler)
            x = T.dvector("x")
            try:
                with synk.session(2):
                    synk.function([x], (x.sum(), "sum"))
                    os.kill(os.getpid(), signal.SIGINT)
                    wait_for(lambda: False, "the signal")
            except KeyboardInterrupt:
                assert worker_pids() == []
                print("closed")
        """
        assert run_script(script) == ("closed\n", "")


def test_messages_of_level_debug(two, caplog):
    """The controller alone logs compilations, distributions with their sizes, and transports of collectives."""
    x, w = T.dvector("x"), theano.shared(np.zeros(3), "w")
    large = theano.shared(np.zeros(2 * 1024 * 1024), "large")
    with caplog.at_level("DEBUG", "synkhronos"):
        function = synk.function([x], (x.sum() + 0 * w.sum() + 0 * large[0], "sum"), updates=[(w, w + 1)], name="total")
        assert function(np.ones(4)) == 4
        assert function(np.ones(4), num_slices=2) == 4
        synk.all_reduce(w)
        synk.all_reduce([large, w])
        synk.reduce(w)
        synk.gather(w)
        synk.broadcast(w)
        synk.all_gather(w)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    expected = [
        r"compiled the function total\(x\) in \d+\.\d\d s",
        r"distributed the function total\(x\) in \d+\.\d\d s: a graph of \d+ bytes, and \d+ bytes of values; "
        r"new shared variables: (w, large|large, w)",
        r"compiled the function total \(Variant\(accumulate=True.*\)\)\(x\) in \d+\.\d\d s",
        r"distributed the function total \(Variant\(accumulate=True.*new shared variables: none",
        r"all-reduce of w \(24 bytes\): through staging buffers",
        r"all-reduce of large, w \(16777240 bytes\): large arrays in place",
        r"reduce of w \(24 bytes\): through staging buffers",
        r"get of w \(24 bytes\): through shared memory",
        r"broadcast of w \(24 bytes\): through staging buffers",
        r"all-gather of w \(48 bytes\): through staging buffers",
    ]
    assert len(lines) == len(expected), "\n".join(lines)
    for line, pattern in zip(lines, expected):
        assert re.fullmatch(pattern, line), line


@pytest.mark.usefixtures("no_session")
class TestWarnings:
    @pytest.mark.filterwarnings("error")
    def test_more_ranks_than_cores(self, monkeypatch):
        monkeypatch.setattr(diagnostics, "count_cores", lambda: 2)
        words = (
            "^synkhronos.fork: 3 ranks share 2 CPU cores, which is slower than one rank on each core; "
            "`python -m synkhronos info` shows what this machine has$"
        )
        with pytest.warns(RuntimeWarning, match=words) as caught:
            synk.fork(3)
        assert [one.filename for one in caught] == [__file__]
        synk.close()
        with pytest.warns(RuntimeWarning, match="3 ranks share 2 CPU cores") as caught, synk.session(3):
            pass
        assert [one.filename for one in caught] == [__file__]
        synk.fork(2)
        monkeypatch.setattr(diagnostics, "count_cores", lambda: 1)
        synk.close()
        with pytest.warns(RuntimeWarning, match="2 ranks share 1 CPU core, "):
            synk.fork(2)

    @pytest.mark.filterwarnings("error")
    def test_threads(self):
        done = threading.Event()
        thread = threading.Thread(target=done.wait, name="the loader")
        thread.start()
        try:
            words = (
                r"^synkhronos.fork: other threads are running \(the loader\), and locks .*fork before starting threads$"
            )
            with pytest.warns(RuntimeWarning, match=words) as caught:
                synk.fork(2)
            assert [one.filename for one in caught] == [__file__]
            synk.close()
            synk.fork(1)  # forks nothing
            synk.close()
        finally:
            done.set()
            thread.join()
        synk.fork(2)

    @pytest.mark.filterwarnings("error")
    def test_a_warning_that_is_an_error_leaves_no_session(self, monkeypatch):
        monkeypatch.setattr(diagnostics, "count_cores", lambda: 1)
        with pytest.raises(RuntimeWarning):
            synk.fork(2)
        assert worker_pids() == []


@pytest.mark.usefixtures("no_session")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"n_parallel": 0}, ValueError, "n_parallel"),
        ({"n_parallel": -1}, ValueError, "n_parallel"),
        ({"n_parallel": 2.0}, TypeError, "n_parallel"),
        ({"n_parallel": True}, TypeError, "n_parallel"),
        ({"n_parallel": "2"}, TypeError, "n_parallel"),
        ({"n_parallel": 2, "master_rank": 2}, ValueError, "master_rank"),
        ({"n_parallel": 2, "master_rank": -1}, ValueError, "master_rank"),
        ({"n_parallel": 2, "master_rank": 0.0}, TypeError, "master_rank"),
        ({"use_gpu": "yes"}, TypeError, "use_gpu"),
        ({"devices": "cpu:x"}, (synk.DeviceError, ValueError), "cpu:x"),
        ({"devices": []}, (TypeError, ValueError), "devices"),
        ({"devices": 3}, TypeError, "devices"),
        ({"devices": [1]}, TypeError, "devices"),
        ({"devices": ["cpu"] * 3, "n_parallel": 2}, ValueError, "devices names 3"),
        ({"devices": ["cpu"], "use_gpu": True}, synk.DeviceError, "use_gpu"),
        ({"wire_dtype": "float32"}, ValueError, "wire_dtype"),
    ],
)
def test_wrong_arguments_of_fork_leave_no_session(arguments, error, words):
    with pytest.raises(error, match=words):
        synk.fork(**arguments)
    assert worker_pids() == []
    assert synk.fork(1) == 1


@pytest.mark.usefixtures("no_session")
def test_the_former_name_of_wire_dtype_is_deprecated():
    with pytest.warns(DeprecationWarning, match="wire_dtype") as records:
        synk.fork(1, exchange="bfloat16")
    assert records[0].filename == __file__
    synk.close()
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="wire_dtype"):
        synk.fork(1, exchange="float32")


@pytest.mark.usefixtures("no_session")
class TestDevices:
    def test_a_gpu_that_is_not_there(self):
        if synk.get_n_gpu():
            pytest.skip("there are GPUs")
        with pytest.raises(synk.DeviceError, match=r"use_gpu is True.*synkhronos info"):
            synk.fork(use_gpu=True)

    @pytest.mark.parametrize(
        ("arguments", "n_ranks"),
        [
            ({"devices": ["cpu"] * 3}, 3),
            ({"devices": ("cpu", "cpu")}, 2),
            ({"devices": "cpu", "n_parallel": 3}, 3),
            ({"devices": "cpu"}, 1),
            ({"n_parallel": np.int64(2), "use_gpu": False}, 2),
            ({"n_parallel": 2, "max_n_var": 1, "max_dim": 1, "profile_workers": False}, 2),
        ],
    )
    def test_named_devices(self, arguments, n_ranks):
        assert synk.fork(**arguments) == n_ranks
        assert summing()(np.ones(5)) == 5

    def test_the_arguments_of_2017_by_position(self):
        assert synk.fork(2, False, 1, False, 1000, 16) == 2
        w = built["w"] if summing() else None
        synk.distribute()
        synk.set_value(1, w, np.full(2, 5.0))
        assert w.get_value().tolist() == [5.0, 5.0]

    def test_counting_gpus_leaves_this_process_fit_to_fork(self):
        assert synk.get_n_gpu() >= 0
        assert "pygpu" not in sys.modules

    def test_many_more_ranks_than_cores(self):
        n_ranks = 4 * len(os.sched_getaffinity(0)) + 1
        assert synk.fork(n_ranks) == n_ranks
        assert summing()(np.ones(100)) == 100
        synk.all_reduce(built["w"], op="sum")
        assert len(set(synk.gather(built["w"])[:, 0])) == 1


class ThreadCount(theano.Op):
    """Return the number of threads that each library of the computing process may use."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [theano.tensor.as_tensor_variable(x)], [T.lvector()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.array([library["num_threads"] for library in threadpool_info()])


@pytest.mark.usefixtures("no_session")
@pytest.mark.parametrize("n_ranks", [1, 2, 5])
def test_ranks_share_the_cores(n_ranks):
    before = [library["num_threads"] for library in threadpool_info()]
    synk.fork(n_ranks)
    x = T.dmatrix("x")
    function = synk.function([], [(ThreadCount()(T.dot(x, x)), "gather")], bcast_inputs=[x])
    threads = function(np.ones((3, 3)))[0]
    assert len(threads) >= n_ranks
    assert threads.max() <= max(1, len(os.sched_getaffinity(0)) // n_ranks)
    assert threads.min() >= 1
    synk.close()
    assert [library["num_threads"] for library in threadpool_info()][: len(before)] == before


def test_a_session_of_another_thread_than_the_main_one():
    run_script(
        """
        def work():
            synk.fork(2)
            x = T.dvector("x")
            box.append((synk.function([x], (x.sum(), "sum")), worker_pids()))
        box = []
        thread = threading.Thread(target=work)
        thread.start(); thread.join()
        f, pids = box[0]
        wait_for(lambda: not os.path.exists(f"/proc/self/task/{thread.native_id}"), "the end of the thread that forked")
        assert f(np.ones(4)) == 4
        synk.close()
        assert not any(map(is_running, pids))
        """
    )


def test_two_controllers_do_not_interfere(two):
    process = start_script(SESSION + "sys.stdin.readline(); print(f(d), flush=True)", stdin=subprocess.PIPE)
    read_pids(process)
    assert summing()(np.ones(5)) == 5
    synk.close()
    out, _ = process.communicate("go on\n", timeout=30)
    assert out == "1000.0\n"


def test_nothing_listens_on_a_socket(three):
    summing()(np.ones(3))
    mine = psutil.Process()
    for process in [mine, *mine.children()]:
        connections = process.net_connections() if hasattr(process, "net_connections") else process.connections()
        assert not [one for one in connections if one.status == psutil.CONN_LISTEN]


def test_a_fork_that_fails_leaves_no_worker():
    out, err = run_script(
        """
        fork = os.fork
        calls = []
        def failing():
            calls.append(1)
            if len(calls) == 3:
                raise BlockingIOError(11, "no more processes")
            return fork()
        os.fork = failing
        try:
            synk.fork(4)
        except OSError as error:
            print("no more processes" in str(error))
        print(worker_pids())
        os.fork = fork
        print(synk.fork(2))
        """
    )
    assert out.split("\n")[:3] == ["True", "[]", "2"]
    assert err == ""
