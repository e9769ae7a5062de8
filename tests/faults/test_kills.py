"""Workers killed at random instants of collectives: results are right, and errors can be recovered from.

SYNKHRONOS_KILLS is the number of kills for each number of ranks.
"""

import functools
import os

import numpy as np
import pytest
from backend import theano
from every_function import RandomKills, restarted

import synkhronos as synk

KILLS = int(os.environ.get("SYNKHRONOS_KILLS", "25"))
SMALL, LARGE = 100, 1_000_000


def value_of(rank, size):
    return np.arange(size, dtype="float64") % 97 + rank


def all_reduce(n, small, large):
    synk.all_reduce([small, large], op="sum")
    for var, size in ((small, SMALL), (large, LARGE)):
        expected = sum(value_of(rank, size) for rank in range(n))
        assert all((got == expected).all() for got in synk.gather(var))


def reduce(n, small, large):
    for var, size in ((small, SMALL), (large, LARGE)):
        assert (synk.reduce(var, op="max", in_place=False) == value_of(n - 1, size)).all()


def all_gather(n, small, large):
    synk.all_gather([small, large])
    for var, size in ((small, SMALL), (large, LARGE)):
        expected = np.concatenate([value_of(rank, size) for rank in range(n)])
        assert all((got == expected).all() for got in synk.gather(var))


def gather(n, small, large):
    assert (synk.gather(large) == [value_of(rank, LARGE) for rank in range(n)]).all()


def scatter(n, small, large):
    synk.scatter([small, large], [value_of(0, SMALL * n), value_of(0, LARGE * n)])
    assert (synk.gather(large, nd_up=0) == value_of(0, LARGE * n)).all()


COLLECTIVES = [all_reduce, reduce, all_gather, gather, scatter]


@pytest.mark.timeout(60 + 3 * KILLS)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_worker_is_killed_at_a_random_instant_of_a_collective(no_session, n):
    kills = RandomKills(KILLS)
    synk.fork(n, restart_workers=True)
    small, large = theano.shared(np.zeros(SMALL), "small"), theano.shared(np.zeros(LARGE), "large")
    synk.broadcast([small, large])

    def prepare():
        for rank in range(n):
            for var, size in ((small, SMALL), (large, LARGE)):
                synk.set_value(rank, var, value_of(rank, size))

    for kill in kills:
        collective = functools.partial(COLLECTIVES[kill % 5], n, small, large)
        prepare()
        if kill < 5:
            kills.measure(collective, kill)
            prepare()
        if not kills.hit(collective, kill % 5):
            restarted(synk.broadcast, [small, large])
        prepare()
        collective()  # the session still works, and results are right
    synk.close()
