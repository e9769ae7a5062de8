"""Episodes: random programs in sessions with random faults; a seed determines everything except the times of faults."""

import collections
import contextlib
import gc
import os
import re
import signal
import threading
import time
import warnings

import faults
import numpy as np
import programs
import psutil
from backend import T
from deadline import wait_for
from process_state import shared_memory_names, shared_sizes, worker_pids
from programs import expect

import synkhronos as synk


def close():
    """End the session if one exists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        synk.close()


class Tally:
    """Counts of events in all episodes.

    Attributes
    ----------
    operations, faults, outcomes : Counter
        Number of events by name.
    lost : list of str
        Failures, with the seed of the episode.
    recovery : float
        Longest recovery in seconds.
    """

    def __init__(self):
        self.operations = collections.Counter()
        self.faults = collections.Counter()
        self.outcomes = collections.Counter()
        self.lost = []
        self.recovery = 0.0


class Episode:
    """One random program, its sessions and its faults.

    Parameters
    ----------
    seed : int
        Seed of all random choices.
    tally : Tally
        Counts that the episode increments.
    """

    def __init__(self, seed, tally):
        self.rng = np.random.RandomState(seed)
        self.tally = tally
        self.fork(first=True)
        for number in faults.RAISING:
            signal.signal(number, faults.raise_it)

    def run(self):
        """Run 20 to 59 operations, a fifth with a fault; raise `Lost`, or an unexpected exception, on failure."""
        for _ in range(self.rng.randint(20, 60)):
            if self.rng.rand() < 0.2:
                names = self.faults.names()
                self.suffer(names[self.rng.randint(len(names))])
            elif self.rng.rand() < 0.02:
                self.fork_again()
            else:
                self.work()

    def fork(self, first=False):
        n_ranks = int(self.rng.choice([1, 2, 3, 5]))
        synk.fork(n_ranks, master_rank=self.rng.randint(n_ranks), restart_workers=bool(self.rng.randint(2)))
        self.tally.operations["fork"] += 1
        if first:
            self.program = programs.Program(self.rng)
            self.faults = faults.Faults(self.program)
        self.program.n_ranks = n_ranks
        self.program.restore()

    def fork_again(self):
        close()
        expect(not worker_pids(), "a worker after close")
        self.fork()

    def work(self):
        names = self.program.operations()
        name = names[self.rng.randint(len(names))]
        self.program.work(name)
        self.tally.operations[name] += 1

    def suffer(self, name):
        """Run operations while a fault happens, then recover as the documentation says."""
        self.tally.faults[name] += 1
        undo, began = self.faults.inject(name), None
        try:
            try:
                self.faults.begun.set()
                for _ in range(3):
                    self.work()
                if name in ("an exception", "kill while computing"):
                    self.program.work("call")
                    self.program.total(np.ones(50))
            finally:
                undo()
            time.sleep(0.001)  # handlers of late signals run here
        except (faults.Raised, MemoryError, OSError, synk.SynkhronosError) as error:
            began = time.monotonic()
            if isinstance(error, faults.Raised):
                undo()
            if not faults.fits(name, error):
                raise programs.Lost(f"{name}: {type(error).__name__}: {str(error)[:300]}") from error
            self.tally.outcomes[type(error).__name__] += 1
        if name == "a handler raises" and began is None:
            self.tally.outcomes["raised in a finalizer of Python's, and dropped"] += 1
        self.recover(name, began or time.monotonic())

    def recover(self, name, began):
        may_break = faults.KINDS[name][1]
        for _ in range(5):
            try:
                if self.program.n_ranks > 1 and not worker_pids():
                    raise synk.SessionError("no worker: broken")
                self.program.restore()
                self.program.work("call")
                break
            except (synk.WorkerRestarted, synk.WorkerDied) as error:  # an earlier death that no call has reported yet
                expect(name.startswith("kill"), f"{name}: {error}")
                self.tally.outcomes[type(error).__name__] += 1
            except synk.SessionError as error:
                expect("broken" in str(error) and may_break, f"{name} broke the session: {error}")
                self.tally.outcomes["broken, forked again"] += 1
                self.fork_again()
        else:
            raise programs.Lost(f"{name}: no recovery in five attempts")
        self.tally.outcomes["recovered"] += 1
        self.tally.recovery = max(self.tally.recovery, time.monotonic() - began)

    def end(self):
        """Drop data and functions, end the session, and restore signal handlers."""
        self.program.data.clear()
        self.program.functions.clear()
        close()
        for number in faults.RAISING:
            signal.signal(number, signal.SIG_DFL)
        wait_for(lambda: not worker_pids(), "the end of the workers")


def held():
    """Return the number of resources of each kind that this process holds outside a session."""
    gc.collect()
    return {
        "processes": len(psutil.Process().children(recursive=True)),
        "names in /dev/shm": len(shared_memory_names()),
        "segments mapped": len(shared_sizes(os.getpid())),
        **descriptors(),
        "threads": threading.active_count(),
    }


def descriptors():
    """Return the number of open descriptors of each kind, such as pipes and memfd files."""
    kinds = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself is closed by now
            target = os.readlink(f"/proc/self/fd/{name}")
            kinds["descriptors of " + re.sub(r"[0-9a-f]{6,}|[0-9]+", "N", target)] += 1
    return kinds


def hundred_thousand_calls(tally, rng):
    """Make 100,000 calls with changing batches in one session; return the largest growth of a process in bytes."""
    x = T.dvector("x")
    synk.fork(2)
    total = synk.function([x], (x.sum(), "sum"))
    data = synk.data(np.arange(500.0))
    picks = [rng.randint(0, 500, n) for n in range(1, 80)]
    sums = [pick.sum() for pick in picks]

    def usage():
        return np.array([psutil.Process(pid).memory_full_info().uss for pid in (os.getpid(), *worker_pids())])

    for i in range(105_000):
        if i == 5_000:
            before = usage()
        n = i % 79
        wrong = total(data, batch=picks[n]) != sums[n] if i % 2 else total(data, batch=n) != n * (n - 1) / 2
        if wrong:
            tally.lost.append("a call of the hundred thousand")
    grown = int((usage() - before).max())
    tally.operations["call with a changing batch"] += 105_000
    close()
    return max(0, grown)
