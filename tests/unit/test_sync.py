"""Synchronization of processes: no rank waits forever or continues too early, and every wait can be aborted."""

import os
import time

import psutil
import pytest
from deadline import wait_for
from rank_processes import Ranks

from synkhronos._processes.sync import ANSWERED, POLL, SENT
from synkhronos._processes.timeline import STRAGGLING
from synkhronos._rank import MOST_BARRIERS
from synkhronos.errors import CollectiveAborted

each_spin = pytest.mark.parametrize("spin", [0.0, 100e-6], ids=["parks", "spins"])


@each_spin
def test_no_rank_continues_before_all_have_arrived(ranks, spin):
    def work(me):
        for step in range(1, 400):
            me.board[me.rank] = step
            me.barrier()
            assert (me.board[: me.n_ranks] >= step).all()

    Ranks(ranks, spin).run(work)


@each_spin
def test_no_wake_up_is_lost(ranks, spin):
    """A rank that is not woken sleeps for POLL seconds; this happens in few of many barriers."""

    def work(me):
        slow = 0
        for _ in range(400):
            began = time.monotonic()
            me.barrier()
            slow += time.monotonic() - began > 0.9 * POLL
        assert slow < 40, f"{slow} of 400 barriers were slow"  # a few are slow if other processes use the cores

    Ranks(ranks, spin).run(work)


@each_spin
def test_messages_and_answers(ranks, spin):
    """The controller sends a message to its workers, and waits for their answers."""

    def work(me):
        sync = me.sync
        workers = range(1, me.n_ranks)
        for number in range(1, 300):
            if me.rank == 0:
                me.board[0] = 3 * number
                sync.post(SENT, number)
                sync.wait(ANSWERED, number, me.check)
                assert [me.board[worker] for worker in workers] == [3 * number + worker for worker in workers]
            else:
                sync.wait(SENT, number, me.check)
                me.board[me.rank] = me.board[0] + me.rank
                sync.post(ANSWERED, number)

    Ranks(ranks, spin).run(work)


def test_a_rank_may_work_between_arriving_and_waiting():
    def work(me):
        step = me.barrier.arrive()
        if me.rank == 0:
            wait_for(me.board[1:3].all, "the other ranks, which wait for the arrival only")
        me.barrier.wait(step)
        me.board[me.rank] = 1

    Ranks(3).run(work)


def test_loops_know_how_many_barriers_a_message_can_number():
    def work(me):
        me.barrier.restart(1)
        first = me.barrier.arrive()
        me.barrier.restart(2)
        assert me.barrier.arrive() - first == MOST_BARRIERS

    Ranks(1).run(work)


def test_a_wait_at_a_barrier_is_recorded_as_straggling():
    def work(me):
        me.timeline.start(0)
        if me.rank == 1:
            time.sleep(0.3)
        me.barrier()
        waited = me.timeline.stop().totals[STRAGGLING] / 1e9
        assert waited > 0.2 if me.rank == 0 else waited == 0

    Ranks(2).run(work)


@each_spin
def test_an_abort_releases_waiting_ranks(spin):
    def parked(pid):
        return pid and psutil.Process(int(pid)).status() == psutil.STATUS_SLEEPING

    def work(me):
        me.board[1 + me.rank] = os.getpid()
        if me.rank == 0:
            wait_for(lambda: all(map(parked, me.board[2:4])), "the other ranks, which sleep at the barrier")
            me.board[0] = time.monotonic_ns()
            me.sync.abort()
            return
        with pytest.raises(CollectiveAborted):
            me.barrier()
        assert time.monotonic_ns() - me.board[0] < 1e9

    Ranks(3, spin).run(work)


def test_a_rank_that_left_a_barrier_is_in_step_again_with_the_next_command():
    def work(me):
        for number in range(1, 20):
            me.begin(number)
            for _ in range(number % 4 if me.rank else 0):
                me.barrier.arrive()  # without a wait
            me.begin(100 * number)
            me.board[me.rank] = number
            me.barrier()
            assert me.board[:3].tolist() == [number] * 3
            me.barrier()

    Ranks(3).run(work)


@each_spin
def test_a_wait_calls_its_check_repeatedly(spin):
    class PeerIsDead(Exception):
        pass

    def work(me):
        calls = []

        def check():
            calls.append(time.monotonic())
            if len(calls) == 4:
                raise PeerIsDead

        with pytest.raises(PeerIsDead):
            me.sync.wait(SENT, 1, check)
        assert calls[-1] - calls[0] < 1.0

    Ranks(1, spin).run(work)


def test_a_spurious_wake_up_does_not_end_a_wait():
    def work(me):
        for step in range(1, 30):
            me.board[me.rank] = step
            for _ in range(10 * (me.rank == 2)):
                time.sleep(0.0005)
                me.sync.post(SENT, 0)  # wakes all parked ranks
            me.barrier()
            assert (me.board[:3] >= step).all()

    Ranks(3).run(work)
