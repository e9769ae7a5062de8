"""Exceptions raised by signal handlers at random moments."""

import contextlib
import signal


class Interrupt(Exception):
    """Raised by a signal handler."""


def interrupt(number, frame):
    raise Interrupt


@contextlib.contextmanager
def handled_by(handler, *numbers):
    """Set a handler of signals, by default SIGALRM, within the block; stop all timers at the end."""
    former = {number: signal.signal(number, handler) for number in numbers or [signal.SIGALRM]}
    try:
        yield
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, one in former.items():
            signal.signal(number, one)
