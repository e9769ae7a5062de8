"""Exceptions that handlers of signals raise, at whatever instant the signals come."""

import contextlib
import signal


class Interrupt(Exception):
    """Raised by the handler of a signal."""


def interrupt(number, frame):
    raise Interrupt


@contextlib.contextmanager
def handled_by(handler, *numbers):
    """Meanwhile signals, by default the one of the alarm, have this handler; no timer is left."""
    former = {number: signal.signal(number, handler) for number in numbers or [signal.SIGALRM]}
    try:
        yield
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, one in former.items():
            signal.signal(number, one)
