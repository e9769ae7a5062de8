"""Processes that end with another one.

A worker ends with its controller, even if it computes and cannot look, and however the controller ended. A thread of
the worker, in C, waits for that (``pidfd_open``; where the kernel or a sandbox does not offer it, the thread looks
every tenth of a second). The controller holds no descriptor for this, so nothing that a program closes ends its
workers. A worker that the main thread has forked is killed with that thread, too (``PR_SET_PDEATHSIG``), which works
for a stopped process; other threads may end before the controller does.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterable
from typing import Callable

from synkhronos._core import native
from synkhronos._team.patience import Patience
from synkhronos._team.process import Process

__all__ = ["end_with", "start_apart"]

_STDERR = 2
_MOST_DESCRIPTORS = 65536


def end_with(pid: int, by_main_thread: bool = False) -> None:
    """Have the kernel kill this process when another one ends.

    Parameters
    ----------
    pid : int
        The other process.
    by_main_thread : bool
        Whether that is the parent, and its main thread has forked this process.
    """
    native.end_with(pid, by_main_thread)


def start_apart(work: Callable[[], None], descriptors: Iterable[int]) -> None:
    """Start a process that ends with this one and is not its child: a program may wait for its children, or kill them.

    Parameters
    ----------
    work : callable
        What it does.
    descriptors : iterable of int
        Those that it keeps, in addition to standard error. A launcher waits until nobody holds its pipes: that of
        standard error is closed when this process ends.
    """
    leader, kept = os.getpid(), sorted({_STDERR, *descriptors})

    def begin() -> None:
        if os.fork():
            return
        gc.disable()  # garbage that was inherited is not this process's to collect
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for start, end in zip((-1, *kept), (*kept, _MOST_DESCRIPTORS)):
            os.closerange(start + 1, end)
        end_with(leader)
        work()

    Process(begin).join(Patience(None))
