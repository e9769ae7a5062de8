"""The deadline of all waits in tests, scaled by the load of the machine."""

import os
import time

#: Default limit of a wait on an idle machine, in seconds.
SECONDS = 30.0


def scaled(seconds):
    """Return a time on an idle machine as a time on this machine, whose cores other processes use, too."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def wait_for(condition, what, seconds=SECONDS):
    """Wait until ``condition()`` holds, and return what it returned; fail with ``what`` at the deadline.

    Parameters
    ----------
    condition : callable
    what : str or callable
        Name of the condition, for the message.
    seconds : float
        The limit on an idle machine.
    """
    deadline = time.monotonic() + scaled(seconds)
    while not (held := condition()):
        assert time.monotonic() < deadline, f"timed out waiting for {what() if callable(what) else what}"
        time.sleep(0.005)
    return held
