"""What the tests share: sessions that tests of a module use one after the other, and the proof that nothing is left.

`synchronize(n)` (and `session`, with the parameter `ranks`) gives a test a session of ``n`` ranks, re-using the one
that there is if it fits and is intact, so that a module forks a few times only; tests may run in any order and alone.
"""

import gc
import json
import os
import re
import signal
import sys
import warnings
from pathlib import Path

import multinode_sessions
import psutil
import pytest
from backend import on_theano, theano
from backend_flags import UNOPTIMIZED, WORKER
from deadline import wait_for
from hypothesis import HealthCheck, settings
from process_state import ProcessState
from scripts import fork_server

import synkhronos as synk

HELPERS = {path.stem for path in (Path(__file__).parent / "helpers").glob("*.py")}

RANKS = multinode_sessions.RANKS

#: Under ``nohup`` and in background jobs these are ignored, and so they are in what is started there.
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
        """Have a session of these ranks and options; returns the number of ranks."""
        key = (n_ranks, *sorted(options.items()))
        if n_ranks < multinode_sessions.N:
            pytest.skip("there are more machines than ranks")
        if key != self.key or not self.intact():
            self.close()
            assert synk.fork(n_ranks, use_gpu=False, **options) == n_ranks
            self.key = key
        return n_ranks

    def close(self):
        """Have none."""
        self.key = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            synk.close()

    def intact(self):
        """Whether the session is the one that `get` made, and can still carry out commands."""
        try:
            synk.distribute()
        except synk.SynkhronosError:
            return False
        return True


_sessions = Sessions()


@pytest.fixture
def synchronize():
    """A function of the number of ranks, and of options of `fork`, that makes or re-uses a session."""
    return _sessions.get


@pytest.fixture(params=RANKS, ids="{}-ranks".format, scope="module")
def ranks(request):
    """Each number of ranks in turn."""
    return request.param


@pytest.fixture
def session(ranks):
    """A session of `ranks` ranks."""
    return _sessions.get(ranks)


@pytest.fixture
def no_session():
    """No session, before the test and after it."""
    _sessions.close()
    yield
    _sessions.close()


@pytest.fixture(scope="module")
def optimized():
    """Have Theano's C code compiled as it is for users, where all depends on the code that comes of it."""
    from theano.configparser import change_flags

    flags = os.environ["THEANO_FLAGS"]
    os.environ["THEANO_FLAGS"] = flags.replace(f"gcc.cxxflags={UNOPTIMIZED}", "gcc.cxxflags=")
    with change_flags(**{"gcc.cxxflags": theano.config.gcc.cxxflags.replace(UNOPTIMIZED, "")}):
        yield
    os.environ["THEANO_FLAGS"] = flags


@pytest.fixture
def no_garbage_collection():
    """Python drops what a handler of a signal raises in the functions that hypothesis has the collector call."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """Both floating dtypes of CPU cores."""
    return request.param


@pytest.fixture(autouse=True, scope="module")
def nothing_left(request):
    """After each module: no child process, nothing in /dev/shm, no descriptor and no thread more than before."""
    gc.collect()
    before = ProcessState()
    yield
    _sessions.close()
    forget_what_was_built(request.module)

    def left():
        gc.collect()
        return ProcessState().beyond(before)

    wait_for(lambda: not left(), lambda: f"the end of {left()}")


def forget_what_was_built(module):
    """Drop the functions that a module and helpers keep for tests, or later sessions would replicate them too."""
    for name, value in list(vars(module).items()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
        elif name == "_built":
            value.clear()
    for helper in HELPERS & sys.modules.keys():
        getattr(sys.modules[helper], "built", {}).clear()


class LeftOut(pytest.Module):
    """A module of tests that is not imported: all it has is one that is skipped."""

    def collect(self):
        """Say why, where every report of a run finds it."""
        return [Reason.from_parent(self, name="all")]


class Reason(pytest.Item):
    """Why a module is left out."""

    def runtest(self):
        """Skip it."""
        pytest.skip(self.parent.reason)


def pytest_pycollect_makemodule(module_path, parent):
    """On PyTensor, leave out the modules of tests of Theano's own parts, which import these."""
    reason = re.search(r'^pytestmark = \[?theano_only\("(.*?)"\)', module_path.read_text(), re.MULTILINE)
    if on_theano or not reason:
        return None
    module = LeftOut.from_parent(parent, path=module_path)
    module.reason = reason[1]
    return module


def pytest_runtest_setup(item):
    """On PyTensor, skip the tests of what it has not."""
    mark = item.get_closest_marker("theano_only")
    if mark and not on_theano:
        pytest.skip(mark.args[0])


_outcomes = {}  # of each test: what it was, and why it was skipped
_groups = {}  # for each folder of tests: when its first test began, when its last one ended, how many there were


def pytest_collectreport(report):
    """Note the modules that skip themselves, for want of a package."""
    if report.skipped and report.nodeid.endswith(".py"):
        _outcomes[report.nodeid] = ("skipped", report.longrepr[2])


def pytest_runtest_logreport(report):
    """Note how each test ends, and when each group of tests runs."""
    if report.outcome != "passed" or report.when == "call":
        _outcomes[report.nodeid] = (report.outcome, report.longrepr[2] if report.skipped else "")
    group = "/".join(report.nodeid.split("::")[0].split("/")[:-1])
    began, _, n_tests = _groups.get(group, (report.start, 0, 0))
    _groups[group] = (min(began, report.start), report.stop, n_tests + (report.when == "call"))


def pytest_terminal_summary(terminalreporter):
    """Say how long each group took, the forks and compilations of its modules included."""
    terminalreporter.section("time of each group")
    for group, (began, ended, n_tests) in _groups.items():
        minutes, seconds = divmod(round(ended - began), 60)
        terminalreporter.line(f"{group:20} {n_tests:5} tests {minutes:3}:{seconds:02}")


def pytest_sessionfinish(session):
    """Write how each test ended where SYNKHRONOS_TEST_REPORT says, for the table of engines.

    End the fork server of scripts, and what a failing test may have left, so that it does not outlive the run.
    """
    if not WORKER and "SYNKHRONOS_TEST_REPORT" in os.environ:
        report = {"engine": synk.engine, "tests": _outcomes}
        Path(os.environ["SYNKHRONOS_TEST_REPORT"]).write_text(json.dumps(report, indent=1))
    if not WORKER and session.config.getoption("numprocesses", None):
        return  # this process has run no tests
    fork_server.close()
    for child in psutil.Process().children(recursive=True):
        if child.name().startswith(("python", "synkhronos")):
            child.kill()
