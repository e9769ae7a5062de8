"""A worker ends with its master, even if it computes and cannot look, and whatever the master ended of.

The kernel sends SIGKILL when the last writer of a pipe is gone (``O_ASYNC``), and the master alone is its writer: other
processes that Python forks from it close their copy at once, and programs that it starts never get one. A worker that
the main thread has forked is killed with that thread, too; other threads may end before the master does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import weakref

from synkhronos._memory import clear_of_streams

__all__ = ["Lifeline"]

_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10


class Lifeline:
    """What ties one worker to its master; made by the master before it forks."""

    def __init__(self) -> None:
        self._reader, self._writer = map(clear_of_streams, os.pipe())
        _lifelines.add(self)

    def hold(self, by_main_thread: bool, with_group: bool = False) -> None:
        """In the worker: be killed when the master ends; ``with_group``: and all of its process group, too."""
        # Where the signal cannot be chosen, it is SIGIO, which ends a process, too; where there is none, looking helps.
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._reader, fcntl.F_SETOWN, -os.getpgrp() if with_group else os.getpid())
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._reader, _F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self._reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        if by_main_thread:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def fileno(self) -> int:
        """In the worker: the descriptor that can be read once the master has ended."""
        return self._reader

    def forked(self) -> None:
        """In the master: the worker holds its end."""
        self._reader = _closed(self._reader)

    def let_go(self) -> None:
        """Be no master of that worker, or no longer."""
        self._writer = _closed(self._writer)

    def close(self) -> None:
        """The worker has ended."""
        self.forked()
        self.let_go()


def _closed(fd: int) -> int:
    if fd >= 0:
        os.close(fd)
    return -1


_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for lifeline in list(_lifelines):
        lifeline.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
