"""Telling the user's program what happened, without making anything worse.

A forked child process: `os.fork`, and knowing how it ended.

`multiprocessing` is not used, because a process that the user forks from the master would end the master's children
at its own exit, and because it forbids children in the workers of its pools.

Processes that end with another one.

A worker ends with its controller, even if it computes and cannot look, and however the controller ended. A thread of
the worker, in C, waits for that (``pidfd_open``; where the kernel or a sandbox does not offer it, the thread looks
every tenth of a second). The controller holds no descriptor for this, so nothing that a program closes ends its
workers. A worker that the main thread has forked is killed with that thread, too (``PR_SET_PDEATHSIG``), which works
for a stopped process; other threads may end before the controller does.

What a worker does when a signal comes: next to nothing, since signals are the master's to handle.

A terminal, ``timeout``, Slurm or a machine that shuts down send their signals to all processes of a program. The master
may have a handler that saves what it has, and needs its workers for that; if it has none it ends, and they with it.

A worker, seen from the master.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable
from typing import Callable, NoReturn

from synkhronos._memory import Descriptor, Passage
from synkhronos._native import native
from synkhronos._processes.sync import Patience
from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["Member", "Process", "describe_exit", "end_with", "leave_signals_to_master", "log", "start_apart"]


def log(level: int, message: str, *args: object) -> None:
    """Log a message where the work must go on whatever comes of it.

    The stream of a logging handler may be closed by now; and logging swallows what a signal's handler raises meanwhile.
    """
    with deferred_interrupts(), contextlib.suppress(AttributeError, OSError, ValueError):
        logging.getLogger("synkhronos").log(level, message, *args, stacklevel=2)


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


#: By default these end a process, and are sent to ask it for something.
_REQUESTS = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPOLL,
    signal.SIGPWR,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
}

#: These tell of a fault of the process itself.
_FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGSYS,
    signal.SIGTRAP,
}

_UNCHANGEABLE = {signal.SIGKILL, signal.SIGSTOP}


def leave_signals_to_master() -> None:
    """In a worker: ignore requests, and whatever else the master ignores or handles.

    What is left: faults, the end of children, job control, and handlers that are not Python's (`faulthandler`).
    """
    signal.set_wakeup_fd(-1)  # it leads to the master's event loop
    is_set = ctypes.pythonapi.PyOS_getsig
    is_set.argtypes, is_set.restype = (ctypes.c_int,), ctypes.c_void_p
    for number in sorted(signal.valid_signals() - _UNCHANGEABLE):
        handler = signal.getsignal(number)
        foreign = not callable(handler) and is_set(number) not in (None, signal.SIG_DFL, signal.SIG_IGN)
        if foreign or handler == signal.SIG_IGN:
            continue
        if number in _FAULTS or number == signal.SIGCHLD:
            signal.signal(number, signal.SIG_DFL)
        elif number in _REQUESTS or callable(handler):
            signal.signal(number, signal.SIG_IGN)


class Member:
    """A worker's process, and the way for memory to and from it.

    Parameters
    ----------
    live : callable
        ``live(passage)`` is the worker's life; it is given its end of that way.
    others : iterable of Member
        Those that were forked before.

    Attributes
    ----------
    process : Process
    passage : Passage
        The master's end.
    """

    def __init__(self, live: Callable[[Passage], None], others: Iterable[Member]) -> None:
        by_main_thread = threading.current_thread() is threading.main_thread()
        self.passage, its_own = Passage.pair()
        master = os.getpid()

        def begin() -> None:
            end_with(master, by_main_thread)
            for member in (*others, self):
                member.passage.close()
            live(its_own)

        try:
            self.process = Process(begin)
        except BaseException:  # there can be no process more
            self.let_go()
            raise
        finally:
            its_own.close()

    def let_go(self) -> None:
        """Its process has ended."""
        self.passage.close()
