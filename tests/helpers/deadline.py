"""The deadline of all waits of tests; it scales with the load of the machine."""

import os
import time

#: Seconds that a wait may take on an idle machine, unless the test says otherwise.
SECONDS = 30.0


def scaled(seconds):
    """Return seconds of an idle machine as seconds of this one, whose cores other processes use, too."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def wait_for(condition, what, seconds=SECONDS):
    """Wait until ``condition()`` holds, and return what it returned; fail with ``what`` at the deadline.

    Parameters
    ----------
    condition : callable
    what : str or callable
        What the test waits for, for the message.
    seconds : float
        The limit on an idle machine.
    """
    deadline = time.monotonic() + scaled(seconds)
    while not (held := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what() if callable(what) else what}"
        time.sleep(0.005)
    return held
