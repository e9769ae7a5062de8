"""Run scripts of tests in new processes, forked from a server or as new interpreters."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
from fork_server import ForkServer

import synkhronos

ROOT = Path(synkhronos.__file__).resolve().parent.parent

fork_server = ForkServer()

#: The start of each script.
PRELUDE = """
    import contextlib, os, re, signal, subprocess, sys, textwrap, threading, time
    from pathlib import Path
    import numpy as np
    import psutil
    import pytest
    import synkhronos
    import synkhronos as synk
    from backend import T, cpp_codes, theano
    from comparison import *
    from deadline import *
    from fault_ops import *
    from process_state import *
    from scripts import *
"""


def python(source, *options, timeout=110, directory=None, **environment):
    """Run a program with the start-up code of an installed synkhronos, and return both outputs.

    An environment variable that is None is unset.
    """
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    surroundings = {name: value for name, value in surroundings.items() if value is not None}
    command = [sys.executable, *options, "-c", "import _synkhronos_start\n" + textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=surroundings, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip(), done.stderr.strip()


def start_script(source, *arguments, fresh=False, stdin=None, start_new_session=False, environment=None):
    """Start a Python script from its source, after the imports of `PRELUDE`.

    The script is forked from a process that has imported these modules. With ``fresh`` or environment variables of its
    own, it gets a new interpreter.

    Returns
    -------
    fork_server.Script or subprocess.Popen
    """
    source, own = textwrap.dedent(PRELUDE) + textwrap.dedent(source), _own_environment()
    if not fresh and environment is None and not fork_server.outdated():
        return fork_server.start(source, arguments, {**os.environ, **own}, stdin, start_new_session)
    streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command, environment = [sys.executable, "-c", source, *map(str, arguments)], {**own, **(environment or {})}
    return subprocess.Popen(command, **streams, start_new_session=start_new_session, env={**os.environ, **environment})


def stand_in(source):
    """Return a command that another program executes in place of ``python -c SOURCE``; see `fork_server`."""
    return fork_server.stand_in(source, {**os.environ, **_own_environment()})


def _own_environment():
    return {"PYTHONPATH": python_path(), "PYTHONWARNINGS": "ignore:synkhronos.fork:RuntimeWarning"}  # many ranks


def python_path():
    """Return the ``PYTHONPATH`` with which a script finds the package and the modules of tests."""
    groups = [folder for folder in (ROOT / "tests").iterdir() if folder.is_dir()]
    paths = [ROOT, *groups, os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, map(str, paths)))


def run_script(source, *arguments, timeout=90, returncode=0, **options):
    """Run a script to its end, and return its standard output and standard error."""
    process = start_script(source, *arguments, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        out, err = process.communicate()
        raise AssertionError(f"the script did not end in {timeout} s\n{out}\n{err}") from None
    assert process.returncode == returncode, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def launch(*arguments, cache, options=(), timeout=110, directory=None, check=False, stdin=None, **environment):
    """Execute ``python -m synkhronos`` with some arguments and a cache folder."""
    surroundings = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
    command = [sys.executable, *options, "-m", "synkhronos", *map(str, arguments)]
    options = {"input": stdin, "timeout": timeout, "env": surroundings, "cwd": directory, "check": check}
    return subprocess.run(command, capture_output=True, text=True, **options)


#: The start of a program with a session of three ranks; it prints the process ids of its workers.
SESSION = """
synk.fork(3)
x, fault = T.dvector("x"), theano.shared(NOTHING, "fault")
f = synk.function([x], (Fault()(x, fault).sum(), "sum"))
d = synk.data(np.ones(1000))
assert f(d) == 1000
print(*worker_pids(), flush=True)
"""


def read_pids(process, n=2):
    """Read ``n`` process ids that a program prints in one line, as `SESSION` does."""
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == n, process.communicate()
    return pids


def without_the_package(program, *arguments):
    """Return a command that executes a program which imports modules of the package without its ``__init__``."""
    stand_in = """
        import sys, types
        package = sys.modules["synkhronos"] = types.ModuleType("synkhronos")
        package.__path__ = [PATH]
    """
    source = textwrap.dedent(stand_in).replace("PATH", repr(str(ROOT / "synkhronos"))) + textwrap.dedent(program)
    return [sys.executable, "-c", source, *arguments]
