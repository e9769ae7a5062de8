"""`_background`: work in a thread, whose starter may be interrupted at any instant."""

import gc
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from synkhronos import _background
from synkhronos._background import Background


class Interrupt(Exception):
    """Raised by the handler of a signal."""


class Thing:
    """Something that work returns, or holds."""


def test_result():
    work = Background(lambda: 3, "three")
    work.start()
    assert work.wait()
    assert work.outcome() == 3


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

    background = Background(work, "endless")
    background.start()
    background.stop()
    n_steps = len(steps)
    time.sleep(0.01)
    assert len(steps) == n_steps
    assert ended == [True] or not steps
    with pytest.raises(KeyboardInterrupt):
        background.outcome()


def test_interrupts_at_any_moment_neither_hang_nor_leave_a_thread(capfd, monkeypatch):
    """Two thousand, wherever they come in there: at the start, while it waits, at the end."""
    monkeypatch.setattr(sys, "unraisablehook", id)  # of interrupts of finalizers of Python's own
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

    old = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
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
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert len(n_interrupts) > 200
    assert threading.active_count() == before
    assert "Exception in thread" not in capfd.readouterr().err
