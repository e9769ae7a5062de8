"""Failures in a sequence: errors report which parts failed or are complete, later parts do not begin, calls work."""

import functools
import os
import signal
import threading
import time

import numpy as np
import pytest
from backend import T, theano
from deadline import scaled
from fault_ops import KILL, LONG_SLEEP, NOTHING, RAISE, RAISE_LATE, SLEEP, Fault
from process_state import wait_for_a_call, worker_pids

import synkhronos as synk

DATA = np.ones((6, 2))


@functools.cache
def built():
    """Build a function that counts its calls on each rank, one that fails on request, and a second one that counts."""
    x = T.dmatrix("x")
    fault = theano.shared(np.int64(NOTHING), "fault")
    before, between, after = (theano.shared(np.zeros(2), name) for name in ("before", "between", "after"))
    first = synk.function([x], (x.sum(), "sum"), updates=[(before, before + 1)], name="first")
    faulty = Fault()(x, fault)
    updates = [(between, between + faulty.max())]  # + 1, after the fault in each linker's order
    second = synk.function([x], (faulty.sum(), "sum"), updates=updates, name="second")
    third = synk.function([], updates=[(after, after + 1)], name="third")
    return first, second, third, fault, [before, between, after]


def prepared():
    *_, fault, counts = built()
    synk.distribute()
    synk.broadcast([fault, *counts], [NOTHING, *[np.zeros(2)] * 3])
    return built()


def counted(counts):
    return [synk.gather(var)[:, 0].tolist() for var in counts]


def run_all(first, second, third, counts):
    with synk.sequence():
        futures = [first(DATA), second(DATA)]
        synk.all_reduce(counts[1], op="max")
        third()
    return [future.result() for future in futures]


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("how", [RAISE, RAISE_LATE])
def test_a_rank_that_raises_in_a_part(synchronize, n_ranks, how):
    synchronize(n_ranks)
    first, second, third, fault, counts = prepared()
    for rank in range(n_ranks):
        synk.set_value(rank, fault, how)
        with pytest.raises(synk.WorkerError, match=rf"rank {rank} \(cpu\) failed in Call second: ") as caught:
            run_all(first, second, third, counts)
        assert caught.value.part == 1
        assert "part 2 of a sequence of 4. Complete on all ranks: Call first; no rank" in str(caught.value)
        assert ("broadcast" in str(caught.value)) == (n_ranks > 1)
        before, between, after = counted(counts)
        assert before == [1.0] * n_ranks
        assert between[rank] == 0
        assert after == [0.0] * n_ranks
        prepared()
    assert run_all(first, second, third, counts) == [12, 12]
    assert counted(counts) == [[1.0] * n_ranks] * 3


def test_a_part_begins_when_all_ranks_have_completed_the_previous_one(synchronize):
    synchronize(3)
    first, second, third, fault, counts = prepared()
    synk.set_value(2, fault, SLEEP)
    with synk.sequence():
        second(DATA)
        third()
        synk.all_reduce(counts[2], op="sum")
    assert counted(counts)[1:] == [[1.0] * 3, [3.0] * 3]
    prepared()
    synk.set_value(2, fault, RAISE_LATE)  # the others are done by then; no barrier lies in between
    with pytest.raises(synk.WorkerError, match="failed in Call second") as caught, synk.sequence():
        second(DATA)
        third()
        first(DATA)
    assert "part 1 of a sequence of 3. Complete on all ranks: none" in str(caught.value)
    assert counted(counts) == [[0.0] * 3, [1.0, 1.0, 0.0], [0.0] * 3]


def test_shapes_that_differ_are_reported_and_nothing_follows(synchronize):
    synchronize(2)
    first, second, third, _, counts = prepared()
    synk.set_value(1, counts[1], np.zeros(3))
    with pytest.raises(ValueError, match="all_reduce: between has the shapes"):
        run_all(first, second, third, counts)
    assert synk.get_value(0, counts[2])[0] == synk.get_value(1, counts[2])[0] == 0
    prepared()
    assert run_all(first, second, third, counts) == [12, 12]


def test_a_worker_that_is_killed(synchronize):
    synchronize(2)
    first, second, third, fault, counts = prepared()
    synk.set_value(1, fault, KILL)
    with pytest.raises(
        synk.WorkerDied, match=r"SIGKILL.* \(in Sequence \(Call first, Call second, AllReduce, Call thi"
    ):
        run_all(first, second, third, counts)
    with pytest.raises(synk.SessionError, match="broken"), synk.sequence():
        raise AssertionError
    synk.close()


def test_a_worker_that_is_replaced(synchronize):
    synchronize(3, restart_workers=True)
    first, second, third, fault, counts = prepared()
    synk.set_value(1, fault, KILL)
    with pytest.raises(synk.WorkerRestarted, match=r"in Sequence \(Call first, .*not completed") as caught:
        run_all(first, second, third, counts)
    assert caught.value.ranks == (1,)
    assert counted(counts)[2] == [0.0] * 3
    prepared()
    assert run_all(first, second, third, counts) == [12, 12]
    assert counted(counts) == [[1.0] * 3] * 3


def test_a_worker_that_is_replaced_between_sequences_gets_all_inputs_again(synchronize):
    synchronize(2, restart_workers=True)
    first = prepared()[0]
    data = [np.full((8, 2), float(i)) for i in range(3)]
    for kill in (False, True, False):
        try:
            with synk.sequence():
                futures = [first(one) for one in data]
                if kill:
                    os.kill(worker_pids()[0], signal.SIGKILL)
            assert [future.result() for future in futures] == [0, 16, 32]
        except synk.WorkerRestarted:
            assert kill


@pytest.mark.parametrize(("rank", "delay"), [(1, 0.6), (0, 0.4)])
def test_ctrl_c_in_a_part(synchronize, handled, rank, delay):
    synchronize(2)
    first, second, third, fault, counts = prepared()
    handled(signal.SIGALRM, signal.default_int_handler)
    synk.set_value(rank, fault, SLEEP)
    signal.setitimer(signal.ITIMER_REAL, delay)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_all(first, second, third, counts)
    assert time.monotonic() - begun < scaled(20)
    prepared()
    assert run_all(first, second, third, counts) == [12, 12]
    assert counted(counts) == [[1.0] * 2] * 3


def test_ctrl_c_in_the_block(synchronize):
    synchronize(2)
    first, _, third, _, counts = prepared()
    with pytest.raises(KeyboardInterrupt), synk.sequence():
        future = first(DATA)
        third()
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(synk.SessionError, match="KeyboardInterrupt"):
        future.result()
    assert counted(counts) == [[0.0] * 2] * 3


def test_a_handler_with_a_sequence_while_another_waits_to_be_sent(synchronize, handled):
    synchronize(2)
    first, second, third, fault, counts = prepared()
    synk.broadcast(fault, SLEEP)
    raised = []

    def handler(*_):
        try:
            with synk.sequence():
                first(7 * DATA)
        except synk.SessionError as error:
            raised.append(str(error))

    slow = threading.Thread(target=second, args=(DATA,))
    handled(signal.SIGALRM, handler)
    with synk.sequence():
        future = first(DATA)
        third()
        slow.start()
        wait_for_a_call()  # the end of the block then has to wait
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    slow.join()
    assert len(raised) == 1 and "another sequence is open" in raised[0]
    assert future.result() == DATA.sum()
    assert counted(counts) == [[1.0] * 2] * 3


def test_a_rank_that_keeps_the_others_waiting(synchronize):
    synchronize(2, timeout=scaled(4))
    first, second, third, fault, counts = prepared()
    synk.set_value(1, fault, LONG_SLEEP)
    with pytest.raises(synk.WorkerTimeout, match=r"rank 1 .*in Sequence"):
        run_all(first, second, third, counts)
    synk.close()
