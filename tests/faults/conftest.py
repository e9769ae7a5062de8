"""Fixtures for tests of faults: signal handlers, and sessions with a function that can fail."""

import signal

import every_function
import faulty_function
import pytest

import synkhronos as synk


@pytest.fixture
def handled():
    """Yield a function that sets a signal handler for the duration of one test."""
    before = {}

    def handle(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield handle
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def three(synchronize):
    """Start a session of three ranks; return the function that can fail, and its variables."""
    synchronize(3)
    return faulty_function.build()


@pytest.fixture
def fresh(no_session):
    """Do the same as `three`, in a session that the test may break."""
    synk.fork(3)
    return faulty_function.build()


@pytest.fixture
def restarting(synchronize):
    """Start a session of three ranks that replaces dead workers; return a function that can fail, and its fault."""
    synchronize(3, restart_workers=True)
    return every_function.build()
