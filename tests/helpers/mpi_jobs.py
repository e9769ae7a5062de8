"""Programs that run on several hosts, and what they say."""

import sys
import textwrap
import time
from pathlib import Path

import pytest
from deadline import wait_for
from namespace_hosts import HAS_MPI

needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="mpi4py or mpiexec is not installed")

#: The folder that programs put on their path.
HELPERS = Path(__file__).parent

#: What each program begins with.
PRELUDE = f"""
    import atexit, os, signal, sys, time
    import numpy as np
    sys.path.insert(0, {str(HELPERS)!r})
    from backend import T, theano
    import synkhronos as synk

    def say(*what):
        print("says", time.monotonic(), *what, flush=True)

    def part():  # after the ranks have ended, and MPI
        time.sleep(0.3)
        say("parts")

    atexit.register(part)
"""


def start(hosts, *sources):
    """Start a program on all hosts, on which what earlier ones have left is old."""
    for name in hosts.names:
        hosts.inside(name, "find", "/dev/shm", "-type", "f", "-exec", "touch", "-d", "2 minutes ago", "{}", "+")
    return hosts.start(sys.executable, "-c", "".join(map(textwrap.dedent, [PRELUDE, *sources])))


def hear(job):
    """The next thing that the script says, and when it said it; fails with what went wrong where it says no more."""
    when, text = _next(job)
    if text == "parts":
        raise AssertionError(job.communicate(timeout=60)[1])
    return when, text


def _next(job):
    for line in job.stdout:  # the launcher prints, too
        if line.startswith("says "):
            when, text = line.rstrip("\n").split(" ", 2)[1:]
            return float(when), text
    raise AssertionError(job.communicate(timeout=60)[1])


def ends_well(hosts, job):
    """The program says no more, and ends; nothing is left."""
    said = _next(job)[1]
    out, err = job.communicate(timeout=60)
    assert (said, job.returncode, out) == ("parts", 0, ""), err
    until_nothing_is_left(hosts, time.monotonic(), limit=10)


def until_nothing_is_left(hosts, since, limit, of_mpi=False):
    """Wait until there are no processes, and no names in ``/dev/shm``; returns how long that took.

    ``of_mpi``: but for files of MPI's, which whoever is killed leaves there; the next program sweeps them.
    """
    left = []

    def nothing():
        left[:] = [one for one in hosts.left() if not of_mpi or "mpich_shm" not in one]
        return not left

    wait_for(nothing, lambda: f"the end of {left}", since + limit - time.monotonic())
    return time.monotonic() - since


def assert_nothing_left(hosts):
    """Wait until nothing is left of programs that have ended."""
    wait_for(lambda: not hosts.left(), lambda: f"the end of {hosts.left()}")
