"""Processes that end with another one.

A worker ends with its controller, even if it computes and cannot look, and however the controller ended. A thread of
the worker, in C, waits for that (``pidfd_open``; where the kernel or a sandbox does not offer it, the thread looks
every tenth of a second). The controller holds no descriptor for this, so nothing that a program closes ends its
workers. A worker that the main thread has forked is killed with that thread, too (``PR_SET_PDEATHSIG``), which works
for a stopped process; other threads may end before the controller does.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
from collections.abc import Iterable
from typing import Callable

from synkhronos._memory import Descriptor
from synkhronos._native import native
from synkhronos._team.patience import Patience
from synkhronos._team.process import Process

__all__ = ["end_with", "start_apart"]

_STDERR = 2
_MOST_DESCRIPTORS = 65536
_F_SETSIG = 10  # that of Linux; Python has no name for it before 3.12


def end_with(pid: int, by_main_thread: bool = False) -> None:
    """Have the kernel kill this process when another one ends.

    Parameters
    ----------
    pid : int
        The other process.
    by_main_thread : bool
        Whether that is the parent, and its main thread has forked this process.
    """
    native.die_with(pid, by_main_thread)


def start_apart(work: Callable[[], None], descriptors: Iterable[int], while_stopped: bool = False) -> Descriptor | None:
    """Start a process that ends with this one and is not its child: a program may wait for its children, or kill them.

    Parameters
    ----------
    work : callable
        What it does.
    descriptors : iterable of int
        Those that it keeps, in addition to standard error. A launcher waits until nobody holds its pipes: that of
        standard error is closed when this process ends.
    while_stopped : bool
        Have the kernel kill the process, and those that it forks, even while they are stopped (SIGSTOP). Not for a
        process in which the program could close the descriptor that this takes.

    Returns
    -------
    Descriptor or None
        With ``while_stopped``: keep it, because the process is killed when it is closed.
    """
    leader, kept = os.getpid(), {_STDERR, *descriptors}
    reader, writer = map(Descriptor, os.pipe()) if while_stopped else (None, None)
    if reader is not None:
        kept.add(reader.fileno())

    def begin() -> None:
        if os.fork():
            return
        gc.disable()  # garbage that was inherited is not this process's to collect
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        numbers = sorted(kept)
        for start, end in zip((-1, *numbers), (*numbers, _MOST_DESCRIPTORS)):
            os.closerange(start + 1, end)
        end_with(leader)
        if reader is not None:
            _kill_group_at_end_of(reader.fileno())
        work()

    Process(begin).join(Patience(None))
    return writer


def _kill_group_at_end_of(reader: int) -> None:
    """Have the kernel send SIGKILL to this process's group when the last writer of a pipe is closed."""
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        fcntl.fcntl(reader, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(reader, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
