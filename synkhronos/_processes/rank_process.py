"""Worker processes: fork them, end them with the controller, and make them ignore signals.

`Process` forks with `os.fork` instead of `multiprocessing`. With `multiprocessing`, a process that the user forks from
the controller would end the controller's children when it exits, and workers of `multiprocessing` pools could not have
children.

Workers end with the controller, however the controller ends, and even while they compute. A C thread in each worker
waits for the end of the controller, by ``pidfd_open``. Where the kernel or a sandbox does not support that, the thread
checks every 0.1 s. The controller holds no descriptor for this, so a program that closes descriptors does not end its
workers. If the main thread has forked the worker, the kernel also kills the worker when that thread ends
(``PR_SET_PDEATHSIG``). This also works for a stopped worker. It is not used for other threads, because these may end
before the controller does.

Workers ignore nearly all signals, because the controller handles them. Terminals, ``timeout``, Slurm and a shutdown
send their signals to all processes of a program. The controller may have a signal handler that saves results, and that
handler needs the workers. Without a handler the controller ends, and its workers end with it.
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

from synkhronos._memory import Descriptor, FdChannel
from synkhronos._native import native
from synkhronos._processes.sync import Deadline
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rendezvous import flush_output


def log(level: int, message: str, *args: object) -> None:
    """Log a message, and ignore failures of logging: the stream of a logging handler may be closed.

    Signals are deferred, because `logging` swallows exceptions that signal handlers raise.
    """
    with deferred_interrupts(), contextlib.suppress(AttributeError, OSError, ValueError):
        logging.getLogger("synkhronos").log(level, message, *args, stacklevel=2)


# -- forked processes

_UNKNOWN = 255  # exit code of a child if other code has called waitpid for it


class Process:
    """Child process that runs ``work()`` and exits with code 0, or with 1 if ``work`` raises.

    Parameters
    ----------
    work : callable
        Function to run in the child.

    Attributes
    ----------
    pid : int
        Process id of the child.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        flush_output()
        self._exitcode: int | None = None
        # the child inherits the controller's signal handlers: block all signals until it has removed them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():  # Python >= 3.12 warns of any thread; `fork` has its own check
                warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
                self.pid = os.fork()
            if self.pid == 0:
                _live(work, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def exitcode(self) -> int | None:
        """Exit code, ``-n`` if signal ``n`` ended the child, or ``None`` while the child runs."""
        if self._exitcode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._exitcode = _UNKNOWN
            else:
                if pid:
                    self._exitcode = os.waitstatus_to_exitcode(status)
        return self._exitcode

    def join(self, deadline: Deadline) -> bool:
        """Wait until the child has ended; return ``False`` if ``deadline`` is over first."""
        pause = 0.0005
        while self.exitcode is None:
            if deadline.is_over():
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def kill(self) -> None:
        """End the child with SIGKILL, and wait until it has ended."""
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.join(Deadline(None))


def _live(work: Callable[[], None], mask: Iterable[int]) -> NoReturn:
    """Run ``work`` in the child, and exit."""
    code = 1
    try:
        leave_signals_to_controller()
        _allow_frames()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            flush_output()
        finally:
            os._exit(code)


def _allow_frames() -> None:
    """Raise the recursion limit by the current depth, because the frames that called the fork stay on the stack."""
    depth = sum(1 for _ in traceback.walk_stack(sys._getframe()))
    sys.setrecursionlimit(sys.getrecursionlimit() + depth)


def describe_exit(exitcode: int | None) -> str:
    """Describe an exit code in words, such as "was killed by SIGKILL (out of memory?)" or "exited with code 3"."""
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


# -- processes that end with another one

_STDERR = 2
_MOST_DESCRIPTORS = 65536
_F_SETSIG = 10  # value on Linux; the `fcntl` module defines it only since Python 3.12


def end_with(pid: int, by_main_thread: bool = False) -> None:
    """Kill this process when another process ends; see the module's docstring.

    Parameters
    ----------
    pid : int
        Process id of the other process.
    by_main_thread : bool
        Whether the other process is the parent, and its main thread has forked this process.
    """
    native.die_with(pid, by_main_thread)


def start_detached(
    work: Callable[[], None], descriptors: Iterable[int], while_stopped: bool = False
) -> Descriptor | None:
    """Start a process that ends with this one but is not its child.

    A program that waits for its children, or kills them, therefore does not affect it.

    Parameters
    ----------
    work : callable
        Function to run in the new process.
    descriptors : iterable of int
        Descriptors that the process keeps open, in addition to standard error. All others are closed, because a
        launcher waits until all of its pipes are closed.
    while_stopped : bool
        Have the kernel kill the process, and the processes that it forks, even while they are stopped (SIGSTOP). It
        takes a descriptor in this process; do not use it where the program could close that descriptor.

    Returns
    -------
    Descriptor or None
        With ``while_stopped``, the descriptor to keep: the process is killed when it is closed.
    """
    leader, kept = os.getpid(), {_STDERR, *descriptors}
    reader, writer = map(Descriptor, os.pipe()) if while_stopped else (None, None)
    if reader is not None:
        kept.add(reader.fileno())

    def begin() -> None:
        if os.fork():
            return
        gc.disable()  # so that no finalizers of inherited objects run
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        numbers = sorted(kept)
        for start, end in zip((-1, *numbers), (*numbers, _MOST_DESCRIPTORS)):
            os.closerange(start + 1, end)
        end_with(leader)
        if reader is not None:
            _kill_group_at_end_of(reader.fileno())
        work()

    Process(begin).join(Deadline(None))
    return writer


def _kill_group_at_end_of(reader: int) -> None:
    """Have the kernel send SIGKILL to this process group when the last write end of a pipe is closed."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        fcntl.fcntl(reader, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(reader, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


# -- signals of workers

#: Signals that request something of a process; their default action ends it.
_REQUESTS: set[int] = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPWR}
_REQUESTS |= {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGPOLL}  # of timers and files
_REQUESTS |= {signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)}

#: Signals that report a fault of the process itself.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP}

_UNCHANGEABLE = {signal.SIGKILL, signal.SIGSTOP}


def leave_signals_to_controller() -> None:
    """Make this worker ignore requests, and all signals that the controller ignores or handles.

    Exceptions are faults, SIGCHLD, job control, and handlers in C, such as those of `faulthandler`: they stay active.
    """
    signal.set_wakeup_fd(-1)  # the inherited descriptor belongs to the controller's event loop
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


# -- workers, in the controller


class RankProcess:
    """Worker process, and the controller's end of the channel that passes memory to and from it.

    Parameters
    ----------
    live : callable
        ``live(channel)`` runs in the worker, with the worker's end of the channel.
    others : iterable of RankProcess
        Workers that were forked before; the new worker closes their channels, which it has inherited.

    Attributes
    ----------
    process : Process
    channel : FdChannel
        The controller's end of the channel.
    """

    def __init__(self, live: Callable[[FdChannel], None], others: Iterable[RankProcess]) -> None:
        by_main_thread = threading.current_thread() is threading.main_thread()
        self.channel, its_own = FdChannel.pair()
        controller = os.getpid()

        def begin() -> None:
            end_with(controller, by_main_thread)
            for member in (*others, self):
                member.channel.close()
            live(its_own)

        try:
            self.process = Process(begin)
        except BaseException:  # the fork failed
            self.channel.close()
            raise
        finally:
            its_own.close()
