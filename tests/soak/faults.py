"""Random faults of ranks, and the exceptions that the user may get for them.

Each fault is a method of `Faults`, which returns a function that undoes it or None, and an entry in `KINDS`.
"""

import contextlib
import os
import resource
import signal
import threading

from fault_ops import KILL, RAISE
from process_state import is_running, worker_pids

import synkhronos as synk

#: Signals whose handlers raise.
RAISING = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1)


class Raised(Exception):
    """The exception that signal handlers raise."""


_ordered = set()


def raise_it(number, frame):
    """Raise `Raised` for a signal that a fault sent; a signal from outside ends the soak test."""
    if number not in _ordered:
        raise KeyboardInterrupt
    _ordered.discard(number)
    raise Raised(signal.Signals(number).name)


def send(number):
    _ordered.add(number)
    os.kill(os.getpid(), number)


def later(seconds, action):
    """Call `action` after some seconds, while ranks compute; return a function that waits for the end of the call."""
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer.join


#: Allowed exceptions for each fault, and whether the session may break.
KINDS = {
    "kill": ((synk.WorkerDied, synk.WorkerRestarted), True),
    "kill later": ((synk.WorkerDied, synk.WorkerRestarted), True),
    "kill two": ((synk.WorkerDied, synk.WorkerRestarted), True),
    "kill while computing": ((synk.WorkerDied, synk.WorkerRestarted), True),
    "stop": ((), False),
    "an exception": ((synk.WorkerError,), False),
    "a handler raises": ((Raised,), True),  # a rank that does not abort in time is killed
    "a signal to workers": ((), False),
    "no memory, full disk": ((MemoryError, synk.WorkerError, OSError), False),
}


class Faults:
    """Faults of the ranks of a program.

    Parameters
    ----------
    program : Program
        The program that runs on the ranks.
    """

    def __init__(self, program):
        self.program = program
        self.rng = program.rng
        self.begun = threading.Event()  # set when handlers may raise

    def names(self):
        """Return the names of the faults that are possible in the current session."""
        alone = ["an exception", "a handler raises", "no memory, full disk"]
        return sorted(KINDS) if self.program.n_ranks > 1 else alone

    def inject(self, name):
        """Cause a fault now or soon; return a function that undoes it."""
        self.begun.clear()
        undo = getattr(self, name.replace(",", "").replace(" ", "_"))(self.pids())
        return undo or (lambda: None)

    def pids(self):
        """Return the process ids of the workers in random order."""
        pids = worker_pids()
        self.rng.shuffle(pids)
        return pids

    def moment(self):
        """Return a random number of seconds, so that the fault happens within an operation."""
        return self.rng.rand() * 0.03

    def kill(self, pids):
        os.kill(pids[0], signal.SIGKILL)

    def kill_two(self, pids):
        for pid in pids[:2]:
            os.kill(pid, signal.SIGKILL)

    def kill_later(self, pids):
        return later(self.moment(), lambda: is_running(pids[0]) and os.kill(pids[0], signal.SIGKILL))

    def kill_while_computing(self, pids):
        from synkhronos._session.lifecycle import current

        others = [rank for rank in range(self.program.n_ranks) if rank != current("soak").master_rank]
        synk.set_value(int(self.rng.choice(others)), self.program.fault, KILL)

    def stop(self, pids):
        chosen = pids[: self.rng.randint(1, len(pids) + 1)]
        for pid in chosen:
            os.kill(pid, signal.SIGSTOP)
        return later(self.moment() + 0.1, lambda: [os.kill(pid, signal.SIGCONT) for pid in chosen if is_running(pid)])

    def an_exception(self, pids):
        synk.set_value(self.rng.randint(self.program.n_ranks), self.program.fault, RAISE)

    def a_handler_raises(self, pids):
        number = RAISING[self.rng.randint(len(RAISING))]
        return later(self.moment(), lambda: self.begun.wait(10) and send(number))

    def a_signal_to_workers(self, pids):
        for pid in pids:
            os.kill(pid, RAISING[self.rng.randint(len(RAISING))])

    def no_memory_full_disk(self, pids):
        """Make the kernel refuse to enlarge any file; new shared memory counts as a file."""
        chosen, limits = [os.getpid(), *pids], resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit(pair):
            for pid in chosen:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, pair)

        limit((0, limits[1]))
        return lambda: limit(limits)


def fits(name, error):
    """Return whether a fault may cause this exception."""
    if not isinstance(error, KINDS[name][0]):
        return False
    if name == "no memory, full disk" and isinstance(error, synk.WorkerError):
        return "MemoryError" in str(error)
    return True
