"""A forked child process: `os.fork`, and knowing how it ended.

`multiprocessing` is not used, because a process that the user forks from the master would end the master's children
at its own exit, and because it forbids children in the workers of its pools.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from typing import Callable, NoReturn

from synkhronos._team.dispositions import leave_signals_to_master
from synkhronos._team.patience import Patience

__all__ = ["Process", "describe_exit"]

_UNKNOWN = 255  # the exit code of a child that somebody else has waited for


class Process:
    """A child that runs ``work()`` and exits with code 0, or 1 if that raises.

    Attributes
    ----------
    pid : int
    """

    def __init__(self, work: Callable[[], None]) -> None:
        _flush_output()
        self._exitcode: int | None = None
        # until the child has left its signals to the master, none must reach it: it has the master's handlers
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():  # since Python 3.12 it warns of any threads: the session looks which matter
                warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
                self.pid = os.fork()
            if self.pid == 0:
                _live(work, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def exitcode(self) -> int | None:
        """The exit code (negative: the signal that ended it), ``None`` while it runs."""
        if self._exitcode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._exitcode = _UNKNOWN
            else:
                if pid:
                    self._exitcode = os.waitstatus_to_exitcode(status)
        return self._exitcode

    def join(self, patience: Patience) -> bool:
        """Wait for its end; returns whether it came before the patience was over."""
        pause = 0.0005
        while self.exitcode is None:
            if patience.is_over():
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def kill(self) -> None:
        """End it by SIGKILL, and wait for that."""
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.join(Patience(None))


def _live(work: Callable[[], None], mask: Iterable[int]) -> NoReturn:
    """The life of a child."""
    code = 1
    try:
        leave_signals_to_master()
        _allow_frames()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            _flush_output()
        finally:
            os._exit(code)


def _allow_frames() -> None:
    """Let this process call functions as deep as a new one: the frames of the fork's callers stay below its own."""
    depth, frame = 1, sys._getframe().f_back
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(sys.getrecursionlimit() + depth)


def _flush_output() -> None:
    """Write out what is buffered; programs may have closed these streams, or put other objects in their places."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def describe_exit(exitcode: int | None) -> str:
    """What an exit code says: "was killed by SIGKILL …", "exited with code 3"."""
    if exitcode is None or exitcode == _UNKNOWN:
        return "ended"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = {"SIGKILL": " (out of memory?)", "SIGSEGV": " (a crash in compiled code)", "SIGBUS": " (a truncated file?)"}
    return f"was killed by {name}{hint.get(name, '')}"
