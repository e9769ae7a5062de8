"""`Background`: work in a thread whose starter may be interrupted at any instant."""

import gc
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from deadline import wait_for
from interrupts import Interrupt, handled_by, interrupt

from synkhronos._graph.fast_call import with_deep_stack
from synkhronos._utils import interrupts as _background
from synkhronos._utils.interrupts import Background


class Thing:
    """An object that work returns or holds."""


def test_what_is_raised_is_raised_once_the_work_is_over_and_holds_nothing_by_a_cycle():
    thing = Thing()
    ends = weakref.ref(thing)

    def fail(held):
        raise ValueError("of the work")

    def caller(held):
        work = Background(lambda: fail(held), "failing")
        work.start()
        assert work.wait()
        work.outcome()

    gc.disable()
    try:
        with pytest.raises(ValueError, match="of the work"):
            caller(thing)
        del thing
        assert ends() is None
    finally:
        gc.enable()


def test_waiting_for_a_while():
    go = threading.Lock()
    go.acquire()
    work = Background(go.acquire, "waiting", daemon=True)
    work.start()
    assert not work.wait(0.01)
    go.release()
    assert work.wait(10)
    assert work.outcome() is True


def test_work_that_has_not_started_is_not_waited_for():
    work = Background(time.sleep, "idle")
    assert work.wait()
    work.stop()


def test_stopped_work_has_ended():
    steps, ended = [], []

    def work():
        try:
            while True:
                steps.append(time.sleep(0.001))
        finally:
            ended.append(True)

    n_threads = threading.active_count()
    background = Background(work, "endless")
    background.start()
    background.stop()
    assert threading.active_count() == n_threads
    assert ended == [True] or not steps
    with pytest.raises(KeyboardInterrupt):
        background.outcome()


def test_interrupts_at_any_moment_neither_hang_nor_leave_a_thread(capfd, monkeypatch):
    """2000 interrupts come at random moments: during the start, the wait and the end."""
    monkeypatch.setattr(sys, "unraisablehook", id)  # Python's own finalizers are interrupted, too
    before, armed, n_interrupts = threading.active_count(), [], []

    def raise_interrupt(number, frame):
        while frame is not None and armed:
            if frame.f_code.co_filename == _background.__file__:
                n_interrupts.append(armed.pop())
                raise Interrupt
            frame = frame.f_back

    def work():
        for _ in range(20):
            time.sleep(0)
        return 1

    with handled_by(raise_interrupt):
        for delay in np.random.RandomState(0).uniform(1e-5, 4e-4, 2000):
            background = Background(work, "interrupted")
            armed[:] = [1]
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                background.start()
                background.wait()
            except Interrupt:
                background.stop()
            armed.clear()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert background.wait(0)
    assert len(n_interrupts) > 200
    assert threading.active_count() == before
    assert "Exception in thread" not in capfd.readouterr().err


# ---------------------------------------------------------------- with a deep stack


def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)


def settings():
    return sys.getrecursionlimit(), threading.stack_size()


def test_deep_recursion_in_several_threads_and_inside_itself_leaves_the_settings():
    before, found = settings(), []

    def nested():
        return with_deep_stack(lambda: depth(50_000)) + depth(50_000)

    def work():
        found.append(with_deep_stack(nested))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert (found, settings()) == ([100_000] * 4, before)


def test_handlers_run_meanwhile_and_what_they_raise_stops_the_work():
    came, n_threads = [], threading.active_count()

    def endless():
        while True:
            time.sleep(0.001)

    def handle(number, frame):
        came.append(number)
        if len(came) == 3:
            raise Interrupt

    before = settings()
    with handled_by(handle):
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(Interrupt):
            with_deep_stack(endless)
    assert (threading.active_count(), len(came), settings()) == (n_threads, 3, before)


def test_an_exception_that_a_finalizer_swallows_is_sent_again(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", id)
    monkeypatch.setattr(_background, "_SECONDS", 0.05)

    class Slow:
        def __del__(self):
            started.append(True)
            while time.monotonic() < end:
                time.sleep(0.001)

    def work():
        thing = Slow()
        del thing
        while True:
            time.sleep(0.001)

    started, end = [], time.monotonic() + 30
    background = Background(work, "finalizing")
    background.start()
    wait_for(lambda: started, "the finalizer")
    background.stop()
    assert time.monotonic() < end - 10
    with pytest.raises(KeyboardInterrupt):
        background.outcome()


def test_two_interrupts_at_any_moment_leave_neither_work_nor_settings(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", id)
    before, working = settings(), []

    def work():
        working.append(1)
        try:
            for _ in range(200):
                time.sleep(0)
        finally:
            working.clear()

    n_interrupts = 0
    with handled_by(interrupt, signal.SIGALRM, signal.SIGPROF):
        for delay in np.random.RandomState(0).uniform(1e-5, 1e-3, 700):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    signal.setitimer(signal.ITIMER_PROF, delay * 1.1)
                    with_deep_stack(work)
                except Interrupt:
                    n_interrupts += 1
                    assert not working
                for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
                    signal.setitimer(timer, 0)
            except Interrupt:
                n_interrupts += 1
            assert (working, settings()) == ([], before)
    assert n_interrupts > 300


def test_several_threads_wait_for_the_same_work():
    go_on = threading.Event()
    work = Background(go_on.wait, "work")
    work.start()
    ended = [Background(work.wait, f"waiter {number}") for number in range(3)]
    for waiter in ended:
        waiter.start()
    assert not any(waiter.wait(0.01) for waiter in ended)
    go_on.set()
    assert all(waiter.wait(30) and waiter.outcome() for waiter in ended)
