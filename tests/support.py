"""Helpers of the tests: scripts in processes of their own, an op that fails when told to, and what is left behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine import theano
from template import Template

import synkhronos
from synkhronos._session.devices import _list_gpus

ROOT = Path(synkhronos.__file__).resolve().parent.parent
_BEGAN = time.time() - 1  # what is older is nothing of these tests

template = Template()

#: What `Fault` does: the values of its second input.
NOTHING, RAISE, SLEEP, KILL, SEGFAULT, EXIT, LEAVE, LONG_SLEEP, RAISE_LATE = range(9)


class Fault(theano.Op):
    """The identity, but for a scalar that says what should go wrong; give it a shared variable to fail on one rank."""

    __props__ = ()

    def make_node(self, x, fault):
        return theano.Apply(self, [x, theano.tensor.as_tensor_variable(fault)], [x.type()])

    def perform(self, node, inputs, outputs):
        x, fault = inputs
        if fault in (RAISE, RAISE_LATE):
            time.sleep(0.2 * (fault == RAISE_LATE))
            raise ZeroDivisionError(f"the fault that the test ordered, fault {int(fault)}")
        if fault in (SLEEP, LONG_SLEEP):
            time.sleep(1.0 if fault == SLEEP else 20.0)
        elif fault in (KILL, SEGFAULT):
            os.kill(os.getpid(), signal.SIGKILL if fault == KILL else signal.SIGSEGV)
        elif fault == EXIT:
            raise SystemExit(3)
        elif fault == LEAVE:
            os._exit(4)
        outputs[0][0] = x.copy()

    def infer_shape(self, node, shapes):
        return [shapes[0]]

    def grad(self, inputs, gradients):
        return [gradients[0], theano.gradient.disconnected_type()]


def gpus(kind):
    """The names of the GPUs of a kind, ``"cuda"`` or ``"opencl"``; without any the test is skipped."""
    names = _list_gpus(kind)
    if isinstance(names, str):
        pytest.skip(names)
    return names


class Machine:
    """What this process has now: children, shared memory, descriptors, threads."""

    def __init__(self):
        self.children = {child.pid for child in psutil.Process().children(recursive=True)} - {template.pid}
        self.shared = shared_memory_names()
        self.threads = threading.active_count()
        self.descriptors = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                self.descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue

    def beyond(self, before):
        """What is here that was not there `before`: a list of descriptions."""
        extra = [f"child process {pid}" for pid in sorted(self.children - before.children)]
        extra += [f"/dev/shm/{name}" for name in sorted(self.shared - before.shared)]
        if self.threads > before.threads:
            extra.append(f"{self.threads - before.threads} threads")
        fresh = [target for name, target in self.descriptors.items() if before.descriptors.get(name) != target]
        extra += [f"descriptor of {target}" for target in fresh if "/memfd:synkhronos" in target]
        if len(self.descriptors) > len(before.descriptors) + 3:
            extra.append(f"descriptors of {fresh}")
        return extra


def shared_memory_names():
    """The names that sessions of this process, or of processes that are gone, have left in /dev/shm lately."""
    names = set()
    for name in os.listdir("/dev/shm"):
        ours = re.fullmatch(r"(sem\.)?synkhronos-(\d+)-.*", name)
        with contextlib.suppress(FileNotFoundError):
            if not ours or os.lstat(f"/dev/shm/{name}").st_mtime < _BEGAN:
                continue
            pid = int(ours.group(2))
            if pid == os.getpid() or not psutil.pid_exists(pid) or os.getpid() in _ancestors(pid):
                names.add(name)
    return names


def _ancestors(pid):
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.NoSuchProcess:
        return set()


def python(source, *options, timeout=110, directory=None, **environment):
    """Run a program that begins as every program does where synkhronos is installed; returns both outputs.

    A variable of the environment that is None is unset.
    """
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    program = "import _synkhronos_start\n" + textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={name: value for name, value in surroundings.items() if value is not None},
        cwd=directory,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip(), done.stderr.strip()


def start_script(source, *arguments, fresh=False, stdin=None, start_new_session=False, environment=None):
    """Start a Python script, given as its source, with what tests need imported.

    It is forked from a process that has imported that already; one that is ``fresh``, or has variables of the
    environment of its own, gets an interpreter of its own.

    Returns
    -------
    template.Script or subprocess.Popen
    """
    prelude = """
        import os, signal, sys, threading, time
        import numpy as np
        import synkhronos as synk
        from engine import T, theano
        import support
        from support import *
    """
    source = textwrap.dedent(prelude) + textwrap.dedent(source)
    own = {"PYTHONPATH": python_path(), "PYTHONWARNINGS": "ignore:synkhronos.fork:RuntimeWarning"}  # of many ranks
    if not fresh and environment is None and not template.outdated():
        return template.start(source, arguments, {**os.environ, **own}, stdin, start_new_session)
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
        env={**os.environ, **own, **(environment or {})},
    )


def python_path():
    """The variable ``PYTHONPATH`` with which a script finds the package and the modules of all groups of tests."""
    groups = [folder for folder in (ROOT / "tests").iterdir() if folder.is_dir()]
    paths = [ROOT, ROOT / "tests", *groups, os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, map(str, paths)))


def run_script(source, *arguments, timeout=90, returncode=0, **options):
    """Run a script to its end; returns what it printed, on standard output and on standard error."""
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


def cpp_codes(function, chosen):
    """The C++ code of each node of a Theano function that is ``chosen(node)``, of which there must be some, by node."""
    nodes = [node for node in function.maker.fgraph.toposort() if chosen(node)]
    assert nodes
    graphs = {node: theano.gof.FunctionGraph(node.inputs, node.outputs) for node in nodes}
    return {node: theano.gof.CLinker().accept(graph).get_src_code() for node, graph in graphs.items()}


def wait_until(condition, seconds):
    """Wait until ``condition()`` holds; whether it did within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_running(pid):
    """Whether a process is there and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def worker_pids():
    """The process ids of the workers of this process's session, in the order of their ranks."""
    children = {child.pid for child in psutil.Process().children()} - {template.pid}
    return sorted(filter(is_running, children))


def shares(n, n_ranks):
    """Each rank's rows, by another way than the library's."""
    return [
        (int(part[0]), int(part[-1]) + 1) if len(part) else (0, 0) for part in np.array_split(np.arange(n), n_ranks)
    ]


def assert_close(actual, expected, rtol=2e-5, atol=1e-6):
    """Arrays equal within tolerance, and of equal shape."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def same_state(one, other):
    """Whether two states of random streams are the same: arrays, or NumPy's generators."""
    one, other = (getattr(state, "bit_generator", None) or state for state in (one, other))
    return one.state == other.state if hasattr(one, "state") else np.array_equal(one, other)
