"""UNIX signals: handlers of programs that raise or use the session, and signals to all processes of a job."""

import functools
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
from fault_ops import NOTHING, RAISE, SLEEP
from faulty_function import built
from process_state import is_running, wait_for_a_call, wait_for_end, worker_pids
from scripts import ROOT, read_pids, run_script, start_script

import synkhronos as synk
from synkhronos._session import held
from synkhronos._utils import interrupts
from synkhronos._utils.interrupts import (
    deferred_interrupts,
    handle_second_signal,
    interrupt_behind,
    let_interrupts_pass,
)


class Alarm(Exception):
    """The exception that signal handlers in this module raise, in the place of `TimeoutError`, for example."""


def give_alarm(number, frame):
    raise Alarm(number)


class Alarms:
    """Signal handlers that are not functions: a method, and a callable object."""

    def method(self, number, frame):
        raise Alarm(number)

    __call__ = method


HANDLERS = {
    "function": give_alarm,
    "method": Alarms().method,
    "object": Alarms(),
    "partial": functools.partial(lambda more, *signalled: give_alarm(*signalled), "more"),
    "lambda": lambda number, frame: give_alarm(number, frame),
}

# ---------------------------------------------------------------- handlers that raise


NUMBERS = [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


@pytest.mark.parametrize(
    ("number", "rank", "kind"),
    [*itertools.product(NUMBERS, [0, 1], ["function"]), *itertools.product([signal.SIGALRM], [0], [*HANDLERS][1:])],
)
def test_a_handler_that_raises_while_a_call_waits(three, handled, number, rank, kind):
    """A call raises a handler's exception unchanged while the controller computes, and while it waits for a worker."""
    f, fault, _ = three
    handled(number, HANDLERS[kind])
    synk.set_value(rank, fault, SLEEP)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.raises(Alarm):
        f(np.ones(6))
    timer.join()
    synk.broadcast(fault, NOTHING)
    assert f(np.ones(6)) == 6


def test_an_exception_of_the_function_is_not_taken_for_a_handlers(three, handled):
    f, fault, _ = three
    handled(signal.SIGALRM, give_alarm)
    synk.set_value(0, fault, RAISE)
    with pytest.raises(synk.WorkerError, match="ZeroDivisionError"):
        f(np.ones(6))


def test_a_call_works_while_handlers_run(three, handled):
    f, fault, _ = three
    came = []
    handled(signal.SIGALRM, lambda *some: came.append(1))
    synk.set_value(1, fault, SLEEP)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    assert f(np.ones(6)) == 6
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(came) > 20


def test_handlers_that_raise_at_any_moment():
    """Results are right although handlers of three signals raise exceptions at 200 arbitrary moments."""
    out, _ = run_script(
        """
        from test_user_signals import Alarm
        x, w = T.dvector("x"), theano.shared(np.zeros(100_000), "w")
        live = []
        def give_alarm(number, frame):
            if live:
                live.pop()
                raise Alarm(number)
        numbers = [signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM]
        synk.fork(3)
        f = synk.function([x], [(x, "gather"), (x.sum(), "sum")])
        g = synk.function([], updates=[(w, w + 1)])
        g(), f(np.ones(3))
        for number in numbers:
            signal.signal(number, give_alarm)
        stop, armed = [], []
        def interrupt():
            rng = np.random.RandomState(0)
            while not stop:
                time.sleep(0.03 * rng.rand())
                if armed:
                    armed.clear()
                    for _ in range(rng.randint(1, 4)):
                        os.kill(os.getpid(), numbers[rng.randint(3)])
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        interrupted = broken = i = 0
        while interrupted < 200:
            try:
                try:
                    armed.append(1)
                    live[:] = [1, 1]  # raise two exceptions, the second while code cleans up after the first
                    while True:
                        i += 1
                        if i % 50 == 0:  # in case the last exceptions were dropped
                            armed.append(1)
                        values, total = f(np.arange(9.0) + i)
                        assert values.tolist() == (np.arange(9.0) + i).tolist(), values
                        d = synk.data(np.arange(9.0) + i)
                        assert f(d, batch=[0, i % 9, 8])[1] == 8 + i % 9 + 3 * i
                        synk.broadcast(w, np.full(100_000, 1.0))
                        synk.all_reduce(w, op="sum")
                        assert (synk.gather(w) == 3).all()
                except Alarm:
                    live.clear()
                    interrupted += 1
            except Alarm:
                live.clear()
            except synk.SessionError:
                live.clear()
                broken += 1
                armed.clear()
                synk.close()
                synk.fork(3)
        stop.append(1)
        armed.clear()
        thread.join()
        handlers = [signal.getsignal(number) for number in numbers]
        assert handlers == [give_alarm] * 3, handlers
        print(interrupted, broken < 20)
        """,
        timeout=100,
    )
    assert out == "200 True\n"


def test_deferred_signals_are_handled_once_when_the_block_ends(handled):
    came = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        handled(number, lambda number, frame: came.append((number, frame.f_code.co_name)))
    name = "test_deferred_signals_are_handled_once_when_the_block_ends"
    with deferred_interrupts():
        with deferred_interrupts():
            signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
        assert came == []
    assert came == [(signal.SIGUSR2, name), (signal.SIGUSR1, name)]
    handled(signal.SIGALRM, give_alarm)
    with pytest.raises(Alarm), deferred_interrupts():
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGUSR1)
    assert len(came) == 3  # the exception of one handler does not prevent the other from running
    assert signal.getsignal(signal.SIGALRM) is give_alarm
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("may_end", [True, False])
def test_a_second_signal_may_end_a_block(handled, may_end):
    handled(signal.SIGALRM, give_alarm)
    seen = []

    def give_and_wait(what):
        signal.raise_signal(signal.SIGALRM)
        handle_second_signal()
        seen.append(what)

    with pytest.raises(Alarm) as raised, deferred_interrupts(may_end=may_end):
        give_and_wait("first")
        give_and_wait("soon")  # it counts as the same
        time.sleep(0.4)
        with deferred_interrupts():
            give_and_wait("nested")
        handle_second_signal()
        seen.append("later")
    assert seen == ["first", "soon", "nested", "later"][: 4 - may_end]
    assert isinstance(raised.value.__context__, Alarm) == may_end
    assert interrupts.take_end() == may_end and not interrupts.take_end()
    assert signal.getsignal(signal.SIGALRM) is give_alarm


def test_a_second_signal_whose_handler_returns_ends_nothing(handled):
    numbers = []
    handled(signal.SIGALRM, lambda number, frame: numbers.append(number))
    with deferred_interrupts(may_end=True):
        signal.raise_signal(signal.SIGALRM)
        time.sleep(0.4)
        signal.raise_signal(signal.SIGALRM)
        assert numbers == []
        handle_second_signal()
        assert len(numbers) == 1
        signal.raise_signal(signal.SIGALRM)  # soon after the second one
        handle_second_signal()
        assert len(numbers) == 1
    assert len(numbers) == 2
    assert not interrupts.take_end()


def test_interrupted_deferring_restores_every_handler(handled, no_garbage_collection):
    """Handlers are restored although thousands of signals, whose handlers raise, interrupt their replacement."""
    for number in (signal.SIGUSR1, signal.SIGALRM):
        handled(number, give_alarm)
    blocks = raised = 0
    for delay in np.random.RandomState(0).uniform(20e-6, 80e-6, 5000):
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            end = time.monotonic() + 1
            while True:  # in Python 3.13, an exception in the evaluation of a condition here would leave the `try`
                with deferred_interrupts():
                    blocks += 1
                if time.monotonic() > end:
                    break
        except Alarm as error:
            raised += 1
            assert interrupt_behind(error) is error
    assert (raised, blocks > 5000) == (5000, True)
    with deferred_interrupts():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGALRM)] == [give_alarm] * 2
    with pytest.raises(Alarm):
        signal.raise_signal(signal.SIGUSR1)


def test_an_exception_that_a_caller_is_handling_is_not_taken_for_the_cause_of_an_error(handled):
    def read():
        try:
            raise OSError("no such file")
        except OSError as error:
            let_interrupts_pass(error)
            return "an ordinary error"

    def converted():
        try:
            try:
                signal.raise_signal(signal.SIGALRM)
            except Alarm:
                raise OSError("half done") from None
        except OSError as error:
            let_interrupts_pass(error)

    handled(signal.SIGALRM, give_alarm)
    for number in (signal.SIGALRM, signal.SIGINT):
        try:
            signal.raise_signal(number)
        except (Alarm, KeyboardInterrupt):
            assert read() == "an ordinary error"
            with pytest.raises(Alarm):
                converted()


def test_a_handler_that_was_saved_while_signals_were_deferred(handled):
    came = []
    handled(signal.SIGALRM, lambda *some: came.append("handled"))
    with deferred_interrupts():
        stand_in = signal.getsignal(signal.SIGALRM)
    with deferred_interrupts():
        pass
    signal.signal(signal.SIGALRM, stand_in)  # as a library does that restores a handler
    with deferred_interrupts():
        pass
    signal.raise_signal(signal.SIGALRM)
    assert came == ["handled"]


# ---------------------------------------------------------------- handlers that use the session


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: synk.gather(built["fault"]), r"this call interrupts another one.*set a flag"),
        # a call from a finalizer bypasses the check of the public functions, so the dispatcher must refuse it
        (lambda: held().flush(), "this call interrupts another one"),
    ],
)
def test_a_handler_may_not_use_the_ranks_in_the_middle_of_a_call(three, handled, use, message):
    f, fault, _ = three
    synk.set_value(1, fault, SLEEP)
    handled(signal.SIGALRM, lambda *some: use())
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(synk.SessionError, match=message):
        f(np.ones(6))
    synk.broadcast(fault, NOTHING)
    assert f(np.ones(6)) == 6
    os.kill(os.getpid(), signal.SIGALRM)  # between calls, a handler may use the session
    assert f(np.ones(6)) == 6


@pytest.mark.parametrize(
    ("at_once", "message"), [(False, "closed"), (True, r"synkhronos\.close: another thread closes the session")]
)
def test_a_handler_that_closes_the_session_in_the_middle_of_a_call(fresh, handled, at_once, message):
    """A handler can close the session, also while another thread closes it."""
    f, fault, _ = fresh
    pids, thread = worker_pids(), threading.Thread(target=synk.close)
    synk.set_value(1, fault, SLEEP)
    handled(signal.SIGALRM, lambda *some: synk.close())
    handled(signal.SIGUSR1, lambda *some: thread.start())
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    if at_once:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    with pytest.raises(synk.SessionError, match=message):
        f(np.ones(6))
    if at_once:
        thread.join(20)
    assert not thread.is_alive()
    assert not any(map(is_running, pids))
    synk.fork(2)
    synk.broadcast(fault, NOTHING)
    assert f(np.ones(6)) == 6


# ---------------------------------------------------------------- signals to all processes of a job

SIGNALLED = """
synk.fork(3)
x, w, fault = T.dvector("x"), theano.shared(np.zeros(3), "w"), theano.shared(np.int64(NOTHING), "fault")
f = synk.function([x], (Fault()(x, fault).sum(), "sum"), updates=[(w, w + 1)], mode="FAST_COMPILE")
f(np.ones(6))
{before}
try:
    print(*worker_pids(), flush=True)
    while True:
        assert f(np.ones(6)) == 6
        {loop}
except {caught}:
    synk.broadcast(w)  # ranks may differ after an interrupt
assert f(np.ones(6)) == 6
assert (synk.gather(w) == synk.get_value(0, w)).all()
print("saved", flush=True)
synk.close()
"""


def signal_the_group(*numbers, before="", loop="", caught="ZeroDivisionError"):
    """Send signals to a program and its workers while they compute; return the exit code, stdout and stderr."""
    process = start_script(SIGNALLED.format(before=before, loop=loop, caught=caught), start_new_session=True)
    pids = read_pids(process)
    wait_for_a_call(process.pid)
    for number in numbers:
        os.killpg(process.pid, number)
    try:
        out, err = process.communicate(timeout=30)
        wait_for_end(pids)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    return process.returncode, out, err


ASKING = [signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGRTMIN]


@pytest.mark.parametrize("number", ASKING, ids=str)
def test_a_handler_that_sets_a_flag_and_the_program_saves_later(number):
    before = f"came = []; signal.signal({int(number)}, lambda *some: came.append(1))"
    assert signal_the_group(number, before=before, loop="if came: break") == (0, "saved\n", "")


@pytest.mark.parametrize("number", ASKING[:3], ids=str)
def test_a_handler_that_raises_and_the_program_saves(number):
    before = f"""
class Preempted(Exception):
    pass
def preempted(*some):
    raise Preempted
signal.signal({int(number)}, preempted)
"""
    returncode, out, err = signal_the_group(number, before=before, caught="Preempted")
    assert (returncode, out) == (0, "saved\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("number", ASKING[:4], ids=str)
def test_without_a_handler_controller_and_workers_end_by_the_signal(number):
    assert signal_the_group(number) == (-number, "", "")


def test_signals_that_the_controller_ignores_end_no_worker():
    """Workers ignore signals that the controller ignores, for example under ``nohup``."""
    before = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
synk.close(); synk.fork(3); f(np.ones(6))
came = []; signal.signal(signal.SIGUSR1, lambda *some: came.append(1))
"""
    numbers = [signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1]
    assert signal_the_group(*numbers, before=before, loop="if came: break") == (0, "saved\n", "")


def test_the_example_saves_and_exits(tmp_path, monkeypatch):
    """The program in docs/robustness.md saves its variables when all its processes get SIGTERM, as by ``timeout``."""
    document = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
    program = document.split("<!-- run by test_user_signals.py -->\n```python\n")[1].split("```")[0]
    program = program.replace("    step(data)\n", "    step(data)\n    if i == 3: print('ready', flush=True)\n")
    program = program.replace("import theano\nimport theano.tensor as T\n", "from backend import T, theano\n")
    monkeypatch.chdir(tmp_path)
    process = start_script("\n" + program, start_new_session=True)
    assert process.stdout.readline() == "ready\n", process.communicate()
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (128 + signal.SIGTERM, "", "")
    with np.load(tmp_path / "checkpoint.npz") as saved:
        assert sorted(saved.files) == ["0/0", "0/1"]
        assert saved["0/0"][0] >= 5
        np.testing.assert_array_equal(saved["0/0"], saved["0/1"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_one_worker_alone_does_nothing(three, number):
    f, *_ = three
    pids = worker_pids()
    for pid in pids:
        os.kill(pid, number)
    assert f(np.ones(6)) == 6
    assert worker_pids() == pids


def test_signals_while_workers_are_forked():
    """A worker never runs the controller's handlers, not even directly after its fork."""
    out, err = run_script(
        """
        main, came = os.getpid(), []
        def note(*some):
            if os.getpid() != main:
                os.write(2, b"a worker ran the handler")
            came.append(1)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, note)
        stop = []
        def signals():
            while not stop:
                os.killpg(0, signal.SIGTERM), os.killpg(0, signal.SIGUSR1)
                time.sleep(0.003)
        thread = threading.Thread(target=signals)
        thread.start()
        for _ in range(15):
            synk.fork(4)
            assert len(worker_pids()) == 3
            synk.close()
        stop.append(1)
        thread.join()
        print(len(came) > 20)
        """,
        start_new_session=True,
    )
    assert (out, err) == ("True\n", "")


def test_a_rank_that_still_writes_after_an_interrupt_does_not_overwrite_new_arrays():
    """Signals interrupt an all-reduce of copies of an array that is not C-contiguous, and blocks are freed at once."""
    out, _ = run_script(
        """
        import random
        from synkhronos._memory import heap
        map_heap = heap._map
        heap._map = lambda shared, n_ranks, rank, size, keep: map_heap(shared, n_ranks, rank, size, keep=0)
        class Raised(Exception): pass
        class Zeros(theano.Op):
            __props__ = ()
            def make_node(self, x): return theano.Apply(self, [x], [T.dmatrix()])
            def perform(self, node, inputs, outputs): outputs[0][0] = np.zeros((1500, 2000))
        def handle(*some): raise Raised
        synk.fork(3)
        m, x = theano.shared(np.ones((2000, 1500)), "m"), T.dmatrix("x")
        turn = synk.function([], [], updates=[(m, T.ones((1500, 2000)).T * 7)])
        zeros = synk.function([x], (Zeros()(x), "sum"))
        synk.distribute()
        signal.signal(signal.SIGALRM, handle)
        turn()
        synk.all_reduce(m, "sum")
        began = time.monotonic()
        synk.all_reduce(m, "sum")
        took = time.monotonic() - began  # so that interrupts come at all instants, on any node
        raised, end = 0, time.monotonic() + 8
        while time.monotonic() < end:
            turn()
            try:
                signal.setitimer(signal.ITIMER_REAL, (0.1 + random.random()) * took)
                synk.all_reduce(m, "sum")
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Raised:
                raised += 1
            assert not zeros(np.ones((3, 2))).any()
        print(raised > 10)
        """
    )
    assert out == "True\n"


def test_stack_dumps_of_workers_go_on_working():
    """Workers keep handlers of `faulthandler.register`, which Python's `signal` module does not see."""
    _, err = run_script(
        """
        import faulthandler
        faulthandler.register(signal.SIGUSR2, all_threads=False)
        synk.fork(2)
        os.kill(worker_pids()[0], signal.SIGUSR2)
        synk.close()
        """
    )
    assert "in serve" in err


def test_stack_dumps_that_call_a_handler_outlive_a_session():
    """Deferring signals keeps a chained handler of faulthandler, although `signal` sees only the handler below it."""
    out, err = run_script(
        """
        import faulthandler
        from synkhronos._utils.interrupts import deferred_interrupts
        came = []
        signal.signal(signal.SIGUSR1, lambda *some: came.append(1))
        faulthandler.register(signal.SIGUSR1, chain=True, all_threads=False)
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGUSR1)
            print(came)
        synk.fork(2)
        synk.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        print(came)
        """
    )
    assert out == "[]\n[1, 1]\n"
    assert err.count("most recent call first") == 2
