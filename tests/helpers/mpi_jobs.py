"""Programs that run on several hosts, or on one host as several nodes, and the messages that they print."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from deadline import wait_for
from namespace_hosts import HAS_MPI, MPIEXEC, Hosts, reason_to_skip
from scripts import fork_server, stand_in

needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="mpi4py or mpiexec is not installed")

#: The folder that programs add to `sys.path`.
HELPERS = Path(__file__).parent

#: The start of a program whose nodes have as many ranks as the environment variable RANKS says.
RANKS_OF_NODES = f"""
    import os, signal, sys, threading, time
    import numpy as np
    sys.path.insert(0, {str(HELPERS)!r})
    from backend import T, theano
    import synkhronos as synk
    import synkhronos._session.lifecycle as lifecycle
    from synkhronos import rules

    sizes = [int(size) for size in os.environ["RANKS"].split()]
    own, find_devices = sizes[int(os.environ.get("PMI_RANK", 0))], lifecycle.find_free_devices
    lifecycle.find_free_devices = lambda n_parallel, *others: find_devices(own, *others)
"""

#: The start of each program.
PRELUDE = f"""
    import atexit, os, signal, sys, time
    import numpy as np
    sys.path.insert(0, {str(HELPERS)!r})
    from backend import T, theano
    import synkhronos as synk

    def say(*what):
        print("says", time.monotonic(), *what, flush=True)

    def part():  # runs after the ranks and MPI have ended
        time.sleep(0.3)
        say("parts")

    atexit.register(part)
"""


def run_processes(*sources, n=2, timeout=280, fresh=False, **environment):
    """Run a program by mpiexec, each process as a node of its own; return its exit code and both outputs.

    The processes are forks of `fork_server`. With ``fresh``, they are new interpreters.
    """
    source = "".join(map(textwrap.dedent, sources))
    is_fresh = fresh or fork_server.outdated() or any("FLAGS" in name for name in environment)
    command = [sys.executable, "-c", source] if is_fresh else stand_in(source)
    launcher = [MPIEXEC, "-n", str(n)] if n > 1 else []
    done = subprocess.run(
        [*launcher, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


def output_of(*sources, **options):
    """Run a program by `run_processes`, assert that it succeeds, and return its standard output."""
    code, out, err = run_processes(*sources, **options)
    assert code == 0, out + err
    return out


def hosts_or_skip(n, **options):
    """Return ``n`` `Hosts`, or skip the test where they cannot be created."""
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    return Hosts(n, **options)


def start(hosts, *sources):
    """Start a program on all hosts. Files in ``/dev/shm`` from earlier programs are made two minutes old before."""
    for name in hosts.names:
        hosts.inside(name, "find", "/dev/shm", "-type", "f", "-exec", "touch", "-d", "2 minutes ago", "{}", "+")
    return hosts.start(sys.executable, "-c", "".join(map(textwrap.dedent, [PRELUDE, *sources])))


def start_until_ready(hosts, *sources):
    """Start a program on all hosts, and wait until it has printed "ready"."""
    job = start(hosts, *sources)
    assert hear(job)[1] == "ready"
    return job


def hear(job):
    """Return the time and text of the program's next message; fail with its errors if it has ended."""
    when, text = _next(job)
    if text == "parts":
        raise AssertionError(job.communicate(timeout=60)[1])
    return when, text


def _next(job):
    for line in job.stdout:  # skips the launcher's output
        if line.startswith("says "):
            when, text = line.rstrip("\n").split(" ", 2)[1:]
            return float(when), text
    raise AssertionError(job.communicate(timeout=60)[1])


def ends_well(hosts, job):
    """Assert that a program ends successfully without further messages, and wait until nothing is left of it."""
    said = _next(job)[1]
    out, err = job.communicate(timeout=60)
    assert (said, job.returncode, out) == ("parts", 0, ""), err
    until_nothing_is_left(hosts, time.monotonic(), limit=10)


def ends_badly(hosts, job, since, limit):
    """Assert that a program fails, wait until only MPI's files are left, and return the seconds since ``since``."""
    job.communicate(timeout=60)
    assert job.returncode != 0
    return until_nothing_is_left(hosts, since, limit, of_mpi=True)


def until_nothing_is_left(hosts, since, limit, of_mpi=False):
    """Wait until no processes and no files in ``/dev/shm`` are left; return the seconds since ``since``.

    With ``of_mpi``, files of MPI may stay. A killed process leaves them, and the next program removes them.
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
