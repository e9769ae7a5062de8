"""Fixtures of tests of faults: sessions with a function that can fail."""

import signal

import every_function
import faulty_function
import pytest

import synkhronos as synk


@pytest.fixture
def handled():
    """Sets handlers of signals for one test."""
    before = {}

    def handle(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield handle
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def three(synchronize):
    """A session of three ranks, the function, and its variables."""
    synchronize(3)
    return faulty_function.build()


@pytest.fixture
def fresh(no_session):
    """The same, in a session that the test may break."""
    synk.fork(3)
    return faulty_function.build()


@pytest.fixture
def restarting(synchronize):
    """A session of three ranks that replaces its workers."""
    synchronize(3, restart_workers=True)
    return every_function.build()
