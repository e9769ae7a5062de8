"""What a worker does when a signal comes: next to nothing, since signals are the master's to handle.

A terminal, ``timeout``, Slurm or a machine that shuts down send their signals to all processes of a program. The master
may have a handler that saves what it has, and needs its workers for that; if it has none it ends, and they with it.
"""

from __future__ import annotations

import ctypes
import signal

__all__ = ["leave_signals_to_master"]

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
