"""A long run with random faults: everything is checked against NumPy, everything that goes wrong is counted.

    python tests/soak.py [SECONDS] [--seed N] [--output docs/soak.md]

Sessions of random sizes, with and without ``restart_workers``, do random work while workers are killed and stopped,
ranks raise, the user presses Ctrl-C, and the kernel refuses memory. What is lost (a wrong result, an error that should
not be, a process, a segment or a descriptor that stays) makes the exit code 1. Other processes on the machine make it
slower, and never wrong.
"""

import argparse
import collections
import contextlib
import gc
import logging
import os
import platform
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import psutil  # noqa: E402

import synkhronos as synk  # noqa: E402

import theano  # noqa: E402  isort: skip
import theano.tensor as T  # noqa: E402
from support import KILL, NOTHING, RAISE, Fault, is_running, wait_until, worker_pids  # noqa: E402


class Lost(Exception):
    """A result that is wrong, or an error that should not be."""


def close():
    """End the session, if an interrupt has left one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        synk.close()


def expect(condition, what):
    if not condition:
        raise Lost(what)


class Soak:
    """One run.

    Parameters
    ----------
    seconds : float
    seed : int
    """

    def __init__(self, seconds, seed):
        self.rng = np.random.RandomState(seed)
        self.deadline = time.monotonic() + seconds
        self.operations = collections.Counter()
        self.faults = collections.Counter()
        self.outcomes = collections.Counter()
        self.lost = []
        self.recovery = 0.0
        self.data = []
        self.functions = []
        self.n_ranks = 0
        self.begun = threading.Event()  # from then on Ctrl-C may come
        self.restart = False
        self.build()

    # -- what there is

    def build(self):
        x, m = T.dvector("x"), T.dmatrix("m")
        synk.fork(1)
        self.fault, self.w = theano.shared(np.int64(NOTHING), "fault"), theano.shared(np.zeros(4), "w")
        self.rows = theano.shared(np.zeros((1, 2)), "rows")
        self.total = synk.function([x], (Fault()(x, self.fault).sum(), "sum"))
        self.both = synk.function(
            [m], [(m * 2, "gather"), m.mean(), (m.max(), "max")], updates=[(self.w, self.w + m.sum())]
        )
        self.picked = synk.function([], (self.rows, "gather"), sliceable_shareds=[self.rows])
        close()

    def fork(self):
        self.n_ranks, self.restart = int(self.rng.choice([2, 3, 3, 5])), bool(self.rng.randint(2))
        synk.fork(self.n_ranks, master_rank=self.rng.randint(self.n_ranks), restart_workers=self.restart)
        self.operations["fork"] += 1
        self.mend()

    def mend(self):
        """Make replicas equal again, as the errors say."""
        synk.broadcast([self.fault, self.w, self.rows], [NOTHING, np.zeros(4), np.zeros((1, 2))])

    # -- work, each checked against NumPy

    def work(self):
        """One random operation."""
        names = ["call", "call", "sliced", "update", "collective", "scatter", "pick", "churn", "data", "bad call"]
        name = names[self.rng.randint(len(names))]
        if self.rng.rand() < 0.02:
            name = "new function"
        if self.rng.rand() < 0.004:
            name = "refork"
        getattr(self, "do_" + name.replace(" ", "_"))()
        self.operations[name] += 1

    def do_call(self):
        values = self.rng.randint(-50, 50, self.rng.randint(1, 3000)).astype("float64")
        expect(self.total(values) == values.sum(), "sum of a call")

    def do_sliced(self):
        values = self.rng.randint(-50, 50, (self.rng.randint(1, 400), 3)).astype("float64")
        batch = [None, slice(len(values) // 2), self.rng.randint(0, len(values), 40)][self.rng.randint(3)]
        chosen = values if batch is None else values[batch]
        if not len(chosen):
            return
        doubled, mean, largest = self.both(values, batch=batch, num_slices=self.rng.randint(1, 4))
        expect(doubled.shape == chosen.shape and (doubled == 2 * chosen).all(), "gather of a sliced call")
        expect(np.isclose(mean, chosen.mean()), "mean of a sliced call")
        expect(largest == chosen.max(), "max of a sliced call")

    def do_update(self):
        start, values = self.rng.randint(0, 9), np.arange(3.0 * self.rng.randint(1, 50)).reshape(-1, 3)
        synk.broadcast(self.w, np.full(4, float(start)))
        self.both(values)
        shares = [part.sum() for part in np.array_split(values, self.n_ranks)]
        expect((synk.gather(self.w)[:, 0] == start + np.array(shares)).all(), "an update on each rank")

    def do_collective(self):
        n = int(self.rng.choice([1, 10, 1000, 200_000]))
        values = [np.arange(n) % 7 + float(rank) for rank in range(self.n_ranks)]
        op = ["sum", "max", "min", "avg", "prod"][self.rng.randint(5)]
        for rank, value in enumerate(values):
            synk.set_value(rank, self.w, value)
        synk.all_reduce(self.w, op=op)
        expected = {"avg": np.mean, "sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}[op](values, axis=0)
        for rank in range(self.n_ranks):
            expect(np.allclose(synk.get_value(rank, self.w), expected), f"all_reduce {op} on rank {rank}")
        synk.broadcast(self.w, np.zeros(4))

    def do_scatter(self):
        values = self.rng.randint(0, 9, (self.rng.randint(1, 60), 2)).astype("float64")
        synk.scatter(self.rows, values)
        expect((synk.gather(self.rows, nd_up=0) == values).all(), "gather of what was scattered")
        synk.all_gather(self.rows)
        expect((synk.gather(self.rows) == values).all(), "all_gather")

    def do_pick(self):
        values = self.rng.randint(0, 9, (self.n_ranks * self.rng.randint(3, 20), 2)).astype("float64")
        synk.scatter(self.rows, values)
        expected = np.concatenate([part[[2, 0]] for part in np.array_split(values, self.n_ranks)])
        expect((self.picked(batch_s=[2, 0]) == expected).all(), "rows picked on each rank")

    def do_churn(self):
        """Make data, change their size, use them, drop them."""
        for each in self.data:
            expect(self.total(each) == each.data.sum(), "sum of data")
        if len(self.data) > 4 or (self.data and self.rng.rand() < 0.5):
            dropped = self.data.pop(self.rng.randint(len(self.data)))
            if self.rng.rand() < 0.5:
                dropped.free_memory()
        else:
            self.data.append(synk.data(self.rng.randint(0, 9, self.rng.randint(1, 100_000)).astype("float64")))

    def do_data(self):
        if self.data:
            data = self.data[self.rng.randint(len(self.data))]
            before, length = data.data.copy(), int(self.rng.randint(1, 100_000))
            data.set_length(length)
            common = min(length, len(before))
            expect((data[:common] == before[:common]).all() and not data[common:].any(), "contents after a resize")
            expect(self.total(data, batch=common) == before[:common].sum(), "sum of resized data")

    def do_bad_call(self):
        for call, errors in (
            (lambda: self.total(np.ones((2, 2))), TypeError),
            (lambda: self.total(np.ones(5), batch=[5]), IndexError),
            (lambda: synk.all_reduce(self.w, op="mean"), ValueError),
            (lambda: synk.set_value(99, self.w, np.ones(4)), ValueError),
        ):
            try:
                call()
            except errors:
                continue
            raise Lost("a bad call was accepted")

    def do_new_function(self):
        x, factor = T.dvector("x"), float(self.rng.randint(1, 9))
        scale = theano.shared(np.full(100, factor), "scale")
        function = synk.function([x], ((x * scale[0]).sum(), "sum"), mode=theano.Mode(linker="py", optimizer=None))
        expect(function(np.ones(7)) == 7 * factor, "a new function")
        self.functions = [*self.functions[-3:], (function, factor)]
        for old, its_factor in self.functions:
            expect(old(np.ones(3)) == 3 * its_factor, "an older function")

    def do_refork(self):
        close()
        expect(not worker_pids(), "a worker after close")
        self.fork()

    # -- faults

    def injure(self):
        """Arrange for one random fault; returns its name, and what undoes it."""
        kinds = ["kill", "kill", "kill later", "kill two", "kill while computing", "stop", "raise", "Ctrl-C", "Ctrl-C"]
        kind = [*kinds, "full memory"][self.rng.randint(len(kinds) + 1)]
        pids = worker_pids()
        pid, delay = pids[self.rng.randint(len(pids))], self.rng.rand() * 0.03
        undo = lambda: None  # noqa: E731
        if kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif kind == "kill two":
            for each in pids[:2]:
                os.kill(each, signal.SIGKILL)
        elif kind == "kill later":
            undo = self.later(delay, lambda: is_running(pid) and os.kill(pid, signal.SIGKILL))
        elif kind in ("kill while computing", "raise"):
            ranks = [rank for rank in range(self.n_ranks) if rank != self.master_rank()]
            synk.set_value(ranks[self.rng.randint(len(ranks))], self.fault, KILL if kind != "raise" else RAISE)
        elif kind == "stop":
            os.kill(pid, signal.SIGSTOP)
            undo = self.later(delay + 0.1, lambda: is_running(pid) and os.kill(pid, signal.SIGCONT))
        elif kind == "Ctrl-C":
            undo = self.later(delay, lambda: self.begun.wait(10) and os.kill(os.getpid(), signal.SIGINT))
        else:
            undo = self.refuse_memory()
        self.faults[kind] += 1
        return kind, undo

    def master_rank(self):
        from synkhronos._session.lifecycle import current

        return current().master_rank

    @staticmethod
    def later(seconds, action):
        timer = threading.Timer(seconds, action)
        timer.start()
        return timer.join

    @staticmethod
    def refuse_memory():
        """Have the kernel refuse new shared memory to all ranks: it counts as a file, and files are limited."""
        pids, limits = [os.getpid(), *worker_pids()], resource.getrlimit(resource.RLIMIT_FSIZE)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))

        def undo():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

        return undo

    def suffer(self):
        """Work while a fault happens, then recover as the documentation says; only documented outcomes may come."""
        self.begun.clear()
        kind, undo = self.injure()
        allowed = {
            "kill": (synk.WorkerDied, synk.WorkerRestarted),
            "raise": (synk.WorkerError,),
            "stop": (),
            "Ctrl-C": (KeyboardInterrupt,),
            "full memory": (MemoryError, synk.WorkerError),
        }[kind.split(" ")[0] if kind != "full memory" else kind]
        began = None
        try:
            try:
                self.begun.set()
                for _ in range(3):
                    self.work()
                if kind in ("raise", "kill while computing"):
                    self.do_call()
                    self.total(np.ones(50))
            finally:
                undo()
            time.sleep(0.001)  # a late signal comes here
        except (KeyboardInterrupt, MemoryError, synk.SynkhronosError) as error:
            began = time.monotonic()
            if isinstance(error, KeyboardInterrupt):
                with contextlib.suppress(KeyboardInterrupt):
                    undo()
            if not isinstance(error, allowed):
                raise Lost(f"{kind}: {type(error).__name__}: {str(error)[:300]}") from error
            if isinstance(error, synk.WorkerError) and kind == "full memory" and "MemoryError" not in str(error):
                raise Lost(f"{kind}: {str(error)[:300]}") from error
            self.outcomes[type(error).__name__] += 1
        if kind == "Ctrl-C" and began is None:
            self.outcomes["Ctrl-C that Python dropped in a finalizer"] += 1
        self.recover(kind, began)

    def recover(self, kind, began):
        for _ in range(5):
            began = began or time.monotonic()
            try:
                if worker_pids():
                    self.mend()
                    self.do_call()
                    break
                raise synk.SessionError("no worker: broken")
            except (synk.WorkerRestarted, synk.WorkerDied) as error:
                # a death that nothing had touched on shows now
                if not kind.startswith("kill"):
                    raise Lost(f"{kind}: {error}") from error
                self.outcomes[type(error).__name__] += 1
            except synk.SessionError as error:
                if "broken" not in str(error):
                    raise Lost(f"{kind}: {error}") from error
                if kind in ("raise", "stop", "full memory"):
                    raise Lost(f"{kind} broke the session: {error}") from error
                self.outcomes["broken, forked again"] += 1
                close()
                expect(not worker_pids(), "a worker after close")
                self.fork()
        else:
            raise Lost(f"{kind}: no recovery in five attempts")
        self.outcomes["recovered"] += 1
        self.recovery = max(self.recovery, time.monotonic() - began)

    # -- the run

    def held(self):
        """Children, names and pages in /dev/shm, descriptors and threads of this process, without a session."""
        gc.collect()
        names = [name for name in os.listdir("/dev/shm") if name.startswith(("synkhronos-", "sem."))]
        with open("/proc/self/maps") as maps:
            mapped = sum("/memfd:synkhronos" in line for line in maps)
        return {
            "processes": len(psutil.Process().children(recursive=True)),
            "names in /dev/shm": len(names),
            "segments mapped": mapped,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }

    def run(self):
        """Until the time is up; returns what is held more than after the first session."""
        self.fork()
        close()
        before = self.held()
        self.memory = psutil.Process().memory_full_info().uss
        self.fork()
        last = time.monotonic()
        while time.monotonic() < self.deadline:
            try:
                if self.rng.rand() < 0.1:
                    self.suffer()
                else:
                    self.work()
            except Exception as error:
                self.lost.append(f"{type(error).__name__}: {error}")
                logging.getLogger("soak").exception("lost something")
                self.data.clear()
                with contextlib.suppress(Exception):
                    close()
                self.fork()
            if time.monotonic() - last > 30:
                last = time.monotonic()
                print(
                    f"{sum(self.operations.values()):,} operations, {sum(self.faults.values())} faults", file=sys.stderr
                )
        self.hundred_thousand_calls()
        self.data.clear()
        self.functions.clear()
        close()
        wait_until(lambda: not worker_pids(), 2)
        after = self.held()
        self.memory = psutil.Process().memory_full_info().uss - self.memory
        return {name: max(0, after[name] - before[name]) for name in before}

    def hundred_thousand_calls(self):
        """With changing batches, in one session; each process may grow by no more than 2 MB."""
        close()
        synk.fork(2)
        self.mend()
        data = synk.data(np.arange(500.0))
        picks = [self.rng.randint(0, 500, n) for n in range(1, 80)]
        sums = [pick.sum() for pick in picks]

        def usage():
            return np.array([psutil.Process(pid).memory_full_info().uss for pid in (os.getpid(), *worker_pids())])

        for i in range(105_000):
            if i == 5_000:
                before = usage()
            n = i % 79
            if i % 2:
                wrong = self.total(data, batch=picks[n]) != sums[n]
            else:
                wrong = self.total(data, batch=n) != n * (n - 1) / 2
            if wrong:
                self.lost.append("a call of the hundred thousand")
        self.growth = int((usage() - before).max())
        if self.growth > 2_000_000:
            self.lost.append(f"memory: a process grew by {self.growth:,} bytes in 100,000 calls")
        self.operations["call with a changing batch"] += 105_000


def table(soak, leaks, seconds):
    """The results, in Markdown."""
    rows = [
        ("operations, each checked", f"{sum(soak.operations.values()):,}"),
        *((f"&nbsp;&nbsp;{name}", f"{count:,}") for name, count in sorted(soak.operations.items())),
        ("faults injected", f"{sum(soak.faults.values()):,}"),
        *((f"&nbsp;&nbsp;{name}", f"{count:,}") for name, count in sorted(soak.faults.items())),
        ("what the user saw", ""),
        *((f"&nbsp;&nbsp;{name}", f"{count:,}") for name, count in sorted(soak.outcomes.items())),
        ("longest recovery", f"{soak.recovery:.2f} s"),
        ("growth of a process in 100,000 calls", f"{max(0, soak.growth) / 1e3:,.0f} kB"),
        ("wrong results and wrong errors", f"{len(soak.lost)}"),
        *((f"left behind: {name}", f"{count}") for name, count in leaks.items()),
    ]
    lines = [
        "# Soak",
        "",
        "Written by `make soak` (`tests/soak.py`): random work with random faults, each result compared with NumPy.",
        f"{seconds:.0f} seconds of faults on {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"NumPy {np.__version__}.",
        "",
        "| | |",
        "| --- | ---: |",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    if soak.lost:
        lines += ["", "Lost:", "", *(f"- {' '.join(one.split())[:300]}" for one in soak.lost)]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", nargs="?", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    logging.getLogger("synkhronos").setLevel(logging.CRITICAL)
    soak = Soak(arguments.seconds, arguments.seed)
    leaks = soak.run()
    text = table(soak, leaks, arguments.seconds)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    return int(bool(soak.lost) or any(leaks.values()))


if __name__ == "__main__":
    sys.exit(main())
