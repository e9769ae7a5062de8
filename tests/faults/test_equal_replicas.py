"""Calls of exact functions that end early: the next call gives all ranks the controller's values.

The functions here compute by rows, and make their updates themselves, because the variables are small.
"""

import random
import signal
import time

import numpy as np
import pytest
from backend import RandomStreams, T, theano
from comparison import close
from fault_ops import EXIT, NOTHING, RAISE, Fault
from interrupts import Interrupt, handled_by, interrupt

import synkhronos as synk

x, y = T.dmatrix("x"), T.dvector("y")
registered = set()


class Training:
    """A step with normalisation over all rows, dropout, momentum and running averages, on all ranks and serially."""

    def __init__(self, n_ranks, **options):
        synk.fork(n_ranks, plan="rows", **options)
        rng, self.n_ranks = np.random.RandomState(0), n_ranks
        w, v = (theano.shared(rng.randn(30, 50) / 5, name) for name in "wv")
        mean, self.fault = theano.shared(np.zeros(50), "mean"), theano.shared(NOTHING, "fault")
        streams = RandomStreams(1)
        h = x.dot(w)
        of_rows = h.mean(axis=0)
        h = (h - of_rows) * streams.binomial(h.shape, p=0.5)
        loss = T.sqr(h.sum(axis=1) - y).mean()
        gradient = T.grad(loss, w)
        velocity = 0.9 * v - 1e-4 * gradient
        updates = [(w, w + velocity), (v, velocity), (mean, 0.9 * mean + 0.1 * of_rows)]
        if Fault not in registered:
            synk.register_sharding(Fault)(lambda node: [([synk.Shard(0)], [synk.Shard(0), synk.Replicate()])])
            registered.add(Fault)
        rows = Fault()(h + gradient.sum(), self.fault)  # it is computed after all collectives
        self.step = synk.function([x, y], [loss, rows], updates=updates, exact=True)
        self.data = [rng.randn(40, 30), rng.randn(40)]
        self.arrays = [w, v, mean]
        self.state = [var for var in self.step.get_shared() if var is not self.fault]
        assert len(self.state) == 4
        self()
        self.follow()

    def __call__(self):
        return self.step(*self.data)[0]

    def follow(self):
        """Compare two calls with those of the serial program from the controller's values, and all ranks' values."""
        values = [var.get_value() for var in self.state]
        losses = [self(), self()]
        found = [var.get_value() for var in self.arrays]
        for rank in range(1, self.n_ranks):
            for var, value in zip(self.arrays, found):
                np.testing.assert_array_equal(synk.get_value(rank, var), value)
        for var, value in zip(self.state, values):
            var.set_value(value)
        close(losses, [self.step.as_theano(*self.data)[0] for _ in range(2)], 1e-9, 1e-9)
        close(found, self.arrays, 1e-9, 1e-9)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_interrupts_at_random_instants(no_session, n_ranks):
    training, rng = Training(n_ranks), random.Random(0)
    began = time.perf_counter()
    for _ in range(20):
        training()
    seconds, n_hits = (time.perf_counter() - began) / 20, 0
    with handled_by(interrupt):
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(seconds, 3 * seconds))
                for _ in range(1000):
                    training()
            except Interrupt:
                n_hits += 1
            training.follow()
    assert n_hits == 60


@pytest.mark.parametrize("in_sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails(no_session, rank, in_sequence):
    """The other rank has made the updates, as far as it needs no collective after the failure."""
    training = Training(2)
    synk.set_value(rank, training.fault, RAISE)
    with pytest.raises(synk.WorkerError) as caught:
        if in_sequence:
            with synk.sequence():
                training.step(*training.data), training.step(*training.data)
        else:
            training()
    assert "The next call gives all ranks the controller's values." in str(caught.value)
    synk.broadcast(training.fault, NOTHING)
    training.follow()


def test_a_worker_that_dies(no_session):
    training = Training(3, restart_workers=True)
    synk.set_value(1, training.fault, EXIT)
    with pytest.raises(synk.WorkerRestarted) as caught:
        training()
    assert "broadcast" not in str(caught.value)
    synk.broadcast(training.fault, NOTHING)
    training.follow()
