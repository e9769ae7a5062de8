"""Calls near Python's recursion limit leave a session usable."""

import functools
import itertools
import sys

import numpy as np
import pytest
from backend import T, theano
from fault_ops import Fault
from process_state import worker_pids

import synkhronos as synk


def deep(action, n_frames):
    return action() if n_frames == 0 else deep(action, n_frames - 1)


def frames_left():
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return sys.getrecursionlimit() - depth


@functools.cache
def functions_for_recursion():
    x, s = T.dmatrix("x"), theano.shared(np.zeros(3), "s")
    exact = synk.function([x], x.sum(), updates=[(s, s + x.sum(0))], exact=True, mode="FAST_COMPILE")
    plain = synk.function([x], [(x.sum(), "sum"), (x.mean(0), "avg")], mode="FAST_COMPILE")
    return exact, plain, s


def in_sequence(exact, plain, s):
    with synk.sequence():
        exact(np.ones((7, 3)))
        synk.all_reduce(s)


LIMITED = {
    "exact": lambda exact, plain, s: exact(np.ones((7, 3))),
    "new memory": lambda exact, plain, s: exact(np.ones((7 + next(_lengths), 3))),
    "in slices": lambda exact, plain, s: plain(np.ones((7, 3)), num_slices=2),
    "data": lambda exact, plain, s: plain(synk.data(np.ones((7 + next(_lengths), 3)))),
    "collectives": lambda exact, plain, s: (synk.broadcast(s, np.ones(3)), synk.all_reduce(s)),
    "a sequence": in_sequence,
    "new function": lambda exact, plain, s: synk.function([], s.sum(), exact=True, mode="FAST_COMPILE")(),
}
_lengths = itertools.count(1000, 1000)


@pytest.mark.parametrize("what", LIMITED)
def test_a_call_near_the_recursion_limit_leaves_the_session_usable(what, synchronize):
    synchronize(3)
    functions = exact, plain, _ = functions_for_recursion()
    synk.distribute()
    pids, outcomes = worker_pids(), set()
    for left in range(10, 300, 29 if what == "new function" else 3):
        try:
            deep(lambda: LIMITED[what](*functions), frames_left() - left)
        except RecursionError:
            outcomes.add("refused")
        else:
            outcomes.add("done")
    assert outcomes == {"refused", "done"}
    assert worker_pids() == pids
    assert exact(np.ones((7, 3))) == plain(np.ones((7, 3)))[0] == 21
    assert synk.check_replicas() == {}


def test_sessions_that_begin_and_end_near_the_recursion_limit(no_session):
    """Workers can use the full recursion limit, even if the controller forked them near its own limit."""
    x = T.dmatrix("x")
    outcomes = set()
    for left in range(10, 320, 31):
        try:
            deep(lambda: synk.fork(3), frames_left() - left)
        except RecursionError:
            outcomes.add("refused")
            assert not worker_pids()
            continue
        outcomes.add("done")
        function = synk.function([x], x.sum(), exact=True, mode="FAST_COMPILE")
        assert function(np.ones((7, 3))) == 21
        for fewer in (10, 100):
            with pytest.raises(RecursionError):
                deep(synk.close, frames_left() - fewer)
        assert function(np.ones((7, 3))) == 21
        synk.close()
        assert not worker_pids()
    assert outcomes == {"refused", "done"}


class Endless(Fault):
    """An operation that calls itself without end on ranks whose second input is not 0."""

    def perform(self, node, inputs, outputs):
        if inputs[1]:
            self.perform(node, inputs, outputs)
        super().perform(node, inputs, outputs)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_op_that_exceeds_the_recursion_limit(rank, synchronize):
    synchronize(3)
    x, is_endless = T.dvector("x"), theano.shared(np.int64(0), "is_endless")
    f = synk.function([x], (Endless()(x, is_endless).sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    pids = worker_pids()
    synk.set_value(rank, is_endless, 1)
    with pytest.raises(synk.WorkerError, match="RecursionError") as caught:
        f(np.ones(6))
    assert caught.value.rank == rank
    synk.broadcast(is_endless, 0)
    assert f(np.ones(6)) == 6
    assert worker_pids() == pids
