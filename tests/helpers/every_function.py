"""Functions and shared variables of every kind, and a check of all of them on all ranks."""

import math
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from backend import MRG_RandomStreams, RandomStreams, T, theano
from fault_ops import NOTHING, Fault
from process_state import worker_pids

import synkhronos as synk

built = {}


def build():
    """Build functions and shared variables of every kind, and reset the variables on all ranks."""
    if not built:
        x, m = T.dvector("x"), T.dmatrix("m")
        fault, w = theano.shared(np.int64(NOTHING), "fault"), theano.shared(np.zeros(3), "w")
        rows, count = theano.shared(np.zeros((1, 2)), "rows"), theano.shared(np.int64(0), "count")
        mrg = MRG_RandomStreams(7).uniform((4,))
        twister = RandomStreams(7).uniform((4,))
        built.update(
            fault=fault,
            w=w,
            rows=rows,
            count=count,
            f=synk.function([x], (Fault()(x, fault).sum(), "sum"), updates=[(count, count + 1)]),
            step=synk.function([m], [(m.sum(), "sum"), (m * 2, "gather")], updates=[(w, w + m.sum())]),
            picked=synk.function([], (rows, "gather"), sliceable_shareds=[rows]),
            random=synk.function([], [(mrg, "gather"), (twister, "gather")]),
        )
    synk.distribute()
    synk.broadcast([built["fault"], built["w"]], [NOTHING, np.zeros(3)])
    return built["f"], built["fault"]


def restarted(call, *arguments):
    """Return the `WorkerRestarted` error that a call raises."""
    with pytest.raises(synk.WorkerRestarted) as caught:
        call(*arguments)
    return caught.value


class RandomKills:
    """Kills of workers at random instants of calls: a number of them, and more until a tenth of them hit a call.

    Parameters
    ----------
    number : int
    """

    def __init__(self, number):
        self.number, self.n_hits = number, 0
        self._seconds, self._chance = {}, random.Random(os.urandom(4))

    def __iter__(self):
        kill = 0
        while kill < self.number or 10 * self.n_hits <= self.number:
            yield kill
            kill += 1

    def measure(self, attempt, kind=None):
        """Note how long ``attempt()`` takes: the shortest time of a kind of attempts counts."""
        start = time.perf_counter()
        attempt()
        self._seconds[kind] = min(self._seconds.get(kind, math.inf), time.perf_counter() - start)

    def hit(self, attempt, kind=None):
        """Kill a worker during or just after ``attempt()``, which was measured; return whether the attempt failed."""
        pid = self._chance.choice(worker_pids())
        killer = threading.Timer(self._chance.uniform(0, 1.3 * self._seconds[kind]), os.kill, (pid, signal.SIGKILL))
        killer.start()
        try:
            self.measure(attempt, kind)
        except synk.WorkerRestarted as error:
            assert len(error.ranks) == 1
            assert f"pid {pid}" in str(error)
            self.n_hits += 1
            return True
        finally:
            killer.join()
        return False


def check_everything(n_ranks):
    """Assert that all functions in all variants, and all collectives, return the right results on every rank."""
    f, step, picked, w, rows = (built[name] for name in ("f", "step", "picked", "w", "rows"))
    values = np.arange(22.0).reshape(11, 2)
    assert f(np.ones(10)) == 10
    assert f(np.arange(10.0), batch=[9, 0, 9], num_slices=2) == 18
    for arguments in ({}, {"num_slices": 3}, {"batch": slice(2, 9)}, {"batch": [8, 1, 1], "num_slices": 2}):
        synk.broadcast(w, np.zeros(3))
        total, doubled = step(values, **arguments)
        chosen = values if "batch" not in arguments else values[arguments["batch"]]
        assert total == chosen.sum()
        np.testing.assert_array_equal(doubled, 2 * chosen)
        if arguments == {}:
            shares = [part.sum() for part in np.array_split(values, n_ranks)]
            np.testing.assert_array_equal(synk.gather(w)[:, 0], shares)
    synk.scatter(rows, values)
    np.testing.assert_array_equal(picked(), values)
    parts = np.array_split(values, n_ranks)
    np.testing.assert_array_equal(picked(batch_s=slice(0, 2)), np.concatenate([part[:2] for part in parts]))
    np.testing.assert_array_equal(picked(batch_s=[1, 0, 1]), np.concatenate([part[[1, 0, 1]] for part in parts]))
    synk.all_gather(rows)
    np.testing.assert_array_equal(synk.gather(rows), [values] * n_ranks)
    for rank in range(n_ranks):
        synk.set_value(rank, w, np.full(3, rank + 1.0))
    synk.all_reduce(w, op="sum")
    np.testing.assert_array_equal(synk.gather(w), np.full((n_ranks, 3), n_ranks * (n_ranks + 1) / 2))
