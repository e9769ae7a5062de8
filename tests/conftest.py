"""Fixtures and hooks for all tests: shared sessions, and a check for leaked processes, files and threads.

The fixture `synchronize` makes a session of ``n`` ranks, and `session` makes one of `ranks` ranks. Both reuse the
current session if it has the same options and is intact, so that a module forks only a few times. Tests may run in any
order, and alone.
"""

import gc
import json
import os
import re
import signal
import sys
import warnings
import zlib
from pathlib import Path

import multinode_sessions
import psutil
import pytest
from backend import on_theano, theano
from backend_flags import UNOPTIMIZED, WORKER
from deadline import wait_for
from hypothesis import HealthCheck, settings
from process_state import ProcessState
from scripts import ROOT, fork_server

import synkhronos as synk

HELPERS = {path.stem for path in (Path(__file__).parent / "helpers").glob("*.py")}

RANKS = multinode_sessions.RANKS

#: Collect garbage seldom by itself: graphs are many objects, and this would take a tenth of the time.
gc.set_threshold(100_000, 20, 100)

#: ``nohup`` and background jobs ignore these signals, and child processes inherit that: restore the handlers.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

_suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
_common = {"deadline": None, "database": None, "suppress_health_check": _suppressed}
settings.register_profile("repeatable", derandomize=True, max_examples=40, **_common)
settings.register_profile("explore", max_examples=400, **_common)
settings.load_profile(os.environ.get("SYNKHRONOS_HYPOTHESIS", "repeatable"))


class Sessions:
    """The session of the test module that runs now."""

    def __init__(self):
        self.key = None

    def get(self, n_ranks, **options):
        """Make a session of these ranks and options, or reuse the current one, and return the number of ranks."""
        key = (n_ranks, *sorted(options.items()))
        if n_ranks < multinode_sessions.N:
            pytest.skip("there are more nodes than ranks")
        if key != self.key or not self.intact():
            self.close()
            assert synk.fork(n_ranks, use_gpu=False, **options) == n_ranks
            self.key = key
        return n_ranks

    def close(self):
        """Close the session, if there is one."""
        self.key = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            synk.close()

    def intact(self):
        """Return whether there is a session that can execute commands."""
        try:
            synk.distribute()
        except synk.SynkhronosError:
            return False
        return True


_sessions = Sessions()


@pytest.fixture
def synchronize():
    """Return a function of the number of ranks and of options of `fork` that makes or reuses a session."""
    return _sessions.get


@pytest.fixture(params=RANKS, ids="{}-ranks".format, scope="module")
def ranks(request):
    """Return each number of ranks in turn."""
    return request.param


@pytest.fixture
def session(ranks):
    """Make or reuse a session of `ranks` ranks, and return their number."""
    return _sessions.get(ranks)


@pytest.fixture
def no_session():
    """Close the session before the test and after it."""
    _sessions.close()
    yield
    _sessions.close()


@pytest.fixture(scope="module")
def optimized():
    """Compile Theano's C code with optimizations, as for users, in tests that depend on the machine code."""
    from theano.configparser import change_flags

    flags = os.environ["THEANO_FLAGS"]
    os.environ["THEANO_FLAGS"] = flags.replace(f"gcc.cxxflags={UNOPTIMIZED}", "gcc.cxxflags=")
    with change_flags(**{"gcc.cxxflags": theano.config.gcc.cxxflags.replace(UNOPTIMIZED, "")}):
        yield
    os.environ["THEANO_FLAGS"] = flags


@pytest.fixture
def no_garbage_collection():
    """Disable garbage collection during the test.

    Hypothesis registers a callback of the collector. Python drops exceptions that a signal handler raises in it.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """Return each floating-point dtype that CPU cores compute with."""
    return request.param


@pytest.fixture(autouse=True, scope="module")
def nothing_left(request):
    """Check after each module that no new child process, file in /dev/shm, descriptor or thread is left."""
    gc.collect()
    before = ProcessState()
    yield
    _sessions.close()
    clear_cached_functions(request.module)

    def left():
        gc.collect()
        return ProcessState().beyond(before)

    wait_for(lambda: not left(), lambda: f"the end of {left()}")
    gc.freeze()  # what is left stays, such as the backend's caches, and later collections need not look at it


def clear_cached_functions(module):
    """Drop the functions that a module and the helpers cache, so that later sessions do not replicate them."""
    for name, value in list(vars(module).items()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
        elif name == "_built":
            value.clear()
    for helper in HELPERS & sys.modules.keys():
        getattr(sys.modules[helper], "built", {}).clear()


class SkippedModule(pytest.Module):
    """A test module that is not imported. It has a single item, which is skipped."""

    def collect(self):
        """Return the item that reports the reason."""
        return [SkippedItem.from_parent(self, name="all")]


class SkippedItem(pytest.Item):
    """An item that is skipped for the reason of its module."""

    def runtest(self):
        """Skip the item."""
        pytest.skip(self.parent.reason)


def pytest_pycollect_makemodule(module_path, parent):
    """On PyTensor, skip test modules that import parts of Theano, without importing them."""
    reason = re.search(r'^pytestmark = \[?theano_only\("(.*?)"\)', module_path.read_text(), re.MULTILINE)
    if on_theano or not reason:
        return None
    module = SkippedModule.from_parent(parent, path=module_path)
    module.reason = reason[1]
    return module


#: Start of the names of tests that `.ci/run` runs on one backend only.
ON_ONE_BACKEND = tuple(
    line.partition("=")[2]
    for name in ("theano-only", "pytensor-only")
    for line in (ROOT / ".ci" / f"{name}.txt").read_text().splitlines()
)


def pytest_addoption(parser):
    """Add the option by which `.ci/run` divides the variants of tests between the backends."""
    parser.addoption("--alternate", action="store_true", help="run each variant of a test on one of the backends")


#: Folders whose tests are about processes and messages, which both backends share.
OF_PROCESSES = ("tests/nodes/", "tests/faults/")


def alternates(item):
    """Return whether `.ci/run` runs a test on one of the two backends, unless only one of them has the operation."""
    may_alternate = hasattr(item, "callspec") or item.nodeid.startswith(OF_PROCESSES)
    return may_alternate and not item.nodeid.startswith(ON_ONE_BACKEND)


def is_of_this_backend(item):
    """Return whether `.ci/run` runs a test on this backend, or this variant of it."""
    if not alternates(item) or item.get_closest_marker("theano_only"):
        return True
    turn = zlib.crc32(item.nodeid.encode())
    if hasattr(item, "callspec") and item.callspec.params.get("ranks") in RANKS:  # modules keep their sessions
        turn = zlib.crc32(item.nodeid.split("::")[0].encode()) + RANKS.index(item.callspec.params["ranks"])
    return turn % 2 == on_theano


def pytest_collection_modifyitems(config, items):
    """With --alternate, leave out the variants that run on the other backend."""
    if config.getoption("--alternate"):
        config.hook.pytest_deselected(items=[item for item in items if not is_of_this_backend(item)])
        items[:] = [item for item in items if is_of_this_backend(item)]


def pytest_collection_finish(session):
    """Exclude the modules and tests that exist now from garbage collection: they are a million objects that stay."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """On PyTensor, skip tests of features that it does not support."""
    mark = item.get_closest_marker("theano_only")
    if mark and not on_theano:
        pytest.skip(mark.args[0])


_outcomes = {}  # by test: its outcome, and the reason if it was skipped
_groups = {}  # by folder of tests: the start of the first test, the end of the last one, the number of tests


def pytest_collectreport(report):
    """Record the modules that skip themselves because a package is missing."""
    if report.skipped and report.nodeid.endswith(".py"):
        _outcomes[report.nodeid] = ("skipped", report.longrepr[2])


def pytest_runtest_logreport(report):
    """Record the outcome of each test, and the times of its group."""
    if report.outcome != "passed" or report.when == "call":
        _outcomes[report.nodeid] = (report.outcome, report.longrepr[2] if report.skipped else "")
    group = "/".join(report.nodeid.split("::")[0].split("/")[:-1])
    began, _, n_tests = _groups.get(group, (report.start, 0, 0))
    _groups[group] = (min(began, report.start), report.stop, n_tests + (report.when == "call"))


def pytest_terminal_summary(terminalreporter):
    """Print how long each group took, including the forks and compilations of its modules."""
    terminalreporter.section("time of each group")
    for group, (began, ended, n_tests) in _groups.items():
        minutes, seconds = divmod(round(ended - began), 60)
        terminalreporter.line(f"{group:20} {n_tests:5} tests {minutes:3}:{seconds:02}")


def pytest_sessionfinish(session):
    """Write the outcomes to the file that SYNKHRONOS_TEST_REPORT names, for the table of backends.

    Then end the fork server of scripts, and processes that a failing test may have left.
    """
    if not WORKER and "SYNKHRONOS_TEST_REPORT" in os.environ:
        report = {"engine": synk.engine, "tests": _outcomes}
        Path(os.environ["SYNKHRONOS_TEST_REPORT"]).write_text(json.dumps(report, indent=1))
    if not WORKER and session.config.getoption("numprocesses", None):
        return  # this process ran no tests
    fork_server.close()
    for child in psutil.Process().children(recursive=True):
        if child.name().startswith(("python", "synkhronos")):
            child.kill()
