"""Programs that run on several hosts, or as if on several, and what they say."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from deadline import wait_for
from namespace_hosts import HAS_MPI, MPIEXEC, Hosts, reason_to_skip

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


def run_processes(*sources, n=2, **environment):
    """Run a program by mpiexec, as if each process were on its own node; its exit code, output, and errors."""
    launcher = [MPIEXEC, "-n", str(n)] if n > 1 else []
    done = subprocess.run(
        [*launcher, sys.executable, "-c", "".join(map(textwrap.dedent, sources))],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


def output_of(*sources, **options):
    """What a program prints that `run_processes` runs, and that succeeds."""
    code, out, err = run_processes(*sources, **options)
    assert code == 0, out + err
    return out


def hosts_or_skip(n, **options):
    """So many `Hosts`; the test is skipped where there can be none."""
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    return Hosts(n, **options)


def start(hosts, *sources):
    """Start a program on all hosts, on which what earlier ones have left is old."""
    for name in hosts.names:
        hosts.inside(name, "find", "/dev/shm", "-type", "f", "-exec", "touch", "-d", "2 minutes ago", "{}", "+")
    return hosts.start(sys.executable, "-c", "".join(map(textwrap.dedent, [PRELUDE, *sources])))


def start_until_ready(hosts, *sources):
    """Start a program on all hosts, and wait until it says that it is ready."""
    job = start(hosts, *sources)
    assert hear(job)[1] == "ready"
    return job


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


def ends_badly(hosts, job, since, limit):
    """The program fails, and nothing is left but files of MPI's; returns how long that took."""
    job.communicate(timeout=60)
    assert job.returncode != 0
    return until_nothing_is_left(hosts, since, limit, of_mpi=True)


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
