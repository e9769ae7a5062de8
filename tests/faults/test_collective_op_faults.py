"""Faults in collectives inside a function: all ranks fail with an error, and no rank waits forever."""

import functools
import os
import time

import numpy as np
import pytest
from backend import T, ifelse, theano
from deadline import scaled
from every_function import RandomKills, restarted
from fault_ops import KILL, LONG_SLEEP, NOTHING, RAISE, Fault

import synkhronos as synk

KILLS = int(os.environ.get("SYNKHRONOS_KILLS", "25"))


@functools.cache
def where_flags_decide():
    """Build functions whose branches, loop steps or shapes depend on each rank's own value of `flag`."""
    x, flag = T.dvector("x"), theano.shared(np.int64(0), "flag")
    total = x.sum()
    steps, _ = theano.scan(lambda one: synk.averaged(one * 2), outputs_info=total, n_steps=flag + 2)
    outputs = {
        "ifelse": ifelse(T.gt(flag, 0), synk.summed(total), total),
        "after": synk.summed(ifelse(T.gt(flag, 0), synk.reduced(total, "max"), total) + 1),
        "scan": steps[-1],
        "shape": synk.averaged(T.zeros((flag + 2, 3)) + total),
        "rows": synk.gathered(T.zeros((flag + 2, 3)) + total).sum(),
        "columns": synk.gathered(T.zeros((2, flag + 3)) + total).sum(),
    }
    return flag, {name: synk.function([x], (output, None)) for name, output in outputs.items()}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ifelse", "reached different collectives of a function: (?=.*rank {rank} is at number 1).*is at the end"),
        ("after", "reached different collectives of a function"),
        ("scan", "reached different collectives of a function: .*at the end"),
        ("shape", r"got the shapes \[\(\d, 3\), \(\d, 3\)"),
        ("columns", r"gathered: got the shapes \[\(2, \d\), \(2, \d\)"),
    ],
)
def test_ranks_that_reach_different_collectives(synchronize, n, rank, name, message):
    synchronize(n)
    flag, functions = where_flags_decide()
    synk.distribute()
    synk.broadcast(flag, 0)
    expected = functions[name](np.ones(6))
    synk.set_value(rank, flag, 1)
    start = time.monotonic()
    with pytest.raises(synk.WorkerError, match=message.format(rank=rank)):
        functions[name](np.ones(6))
    assert time.monotonic() - start < scaled(5)
    synk.broadcast(flag, 0)
    assert np.array_equal(functions[name](np.ones(6)), expected)  # the session still works


def test_differences_between_ranks_that_are_allowed(synchronize):
    synchronize(3)
    flag, functions = where_flags_decide()
    synk.distribute()
    synk.broadcast(flag, 0)
    assert functions["scan"](np.ones(6)) == 8 and functions["ifelse"](np.ones(6)) == 2
    synk.set_value(1, flag, 4)
    assert functions["rows"](np.ones(6)) == 3 * 2 * (2 + 6 + 2)
    synk.broadcast(flag, 1)
    assert functions["scan"](np.ones(6)) == 16 and functions["ifelse"](np.ones(6)) == 6


@functools.cache
def faulty():
    x, fault = T.dvector("x"), theano.shared(np.int64(NOTHING), "fault")
    total = synk.averaged(Fault()(x, fault).sum()) * 2
    seen = theano.shared(np.zeros(()), "seen")
    return fault, synk.function([x], (total, None), updates=[(seen, seen + synk.summed(total))])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_raises_releases_the_others(synchronize, rank):
    synchronize(3)
    fault, function = faulty()
    synk.distribute()
    synk.broadcast(fault, NOTHING)
    synk.set_value(rank, fault, RAISE)
    with pytest.raises(synk.WorkerError, match=rf"rank {rank} \(cpu\).*the fault that the test ordered"):
        function(np.ones(6))
    synk.broadcast(fault, NOTHING)
    assert function(np.ones(6)) == 4


def test_a_worker_that_dies_before_a_collective(no_session):
    synk.fork(3)
    fault, function = faulty()
    synk.distribute()
    synk.set_value(1, fault, KILL)
    with pytest.raises(synk.WorkerDied, match=r"rank 1.*SIGKILL"):
        function(np.ones(6))
    synk.close()


def test_a_silent_rank_and_a_timeout(no_session):
    synk.fork(2, timeout=scaled(4))
    fault, function = faulty()
    synk.distribute()
    synk.set_value(1, fault, LONG_SLEEP)
    with pytest.raises(synk.WorkerTimeout, match="rank 1 "):
        function(np.ones(6))
    synk.close()


@pytest.mark.timeout(60 + 3 * KILLS)
@pytest.mark.parametrize("n", [2, 3])
def test_a_worker_is_killed_at_a_random_instant(no_session, n):
    kills = RandomKills(KILLS)
    synk.fork(n, restart_workers=True)
    x, large = T.dvector("x"), theano.shared(np.zeros(300_000), "large")
    mean = synk.averaged(large + x.mean())
    function = synk.function([x], (synk.gathered(mean[:10]), None), updates=[(large, synk.reduced(mean * 2, "max"))])

    def attempt():
        synk.broadcast(large, np.arange(300_000.0))
        return function(np.ones(n))

    def check():
        assert np.array_equal(attempt(), expected)

    expected = attempt()
    kills.measure(attempt)
    for _ in kills:
        if not kills.hit(check):
            restarted(attempt)
        check()
        assert not synk.check_replicas([large])
    synk.close()
