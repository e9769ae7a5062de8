"""`FinalizerQueue`: each finalizer is recorded once, even if it is interrupted."""

import contextlib
import gc
import signal

import numpy as np
from interrupts import Interrupt, handled_by, interrupt

from synkhronos._utils.interrupts import FinalizerQueue


class Thing:
    """An object to finalize, in a reference cycle or not."""

    def __init__(self, cycle=False):
        self.self = self if cycle else None


def test_keys_come_in_the_order_of_the_ends():
    queue = FinalizerQueue()
    things = [Thing(cycle=number == 2) for number in range(4)]
    for number, thing in enumerate(things):
        queue.watch(thing, number)
    assert list(queue.take()) == []
    del thing, things[3], things[0]
    assert list(queue.take()) == [3, 0]
    assert list(queue.take()) == []
    things.clear()
    gc.collect()
    assert list(queue.take()) == [1, 2]


def test_a_key_is_returned_again_if_its_processing_was_interrupted():
    queue = FinalizerQueue()
    for number in range(3):
        queue.watch(Thing(), number)
    for number in queue.take():
        if number == 1:
            break
    assert list(queue.take()) == [1, 2]


def test_interrupts_at_any_moment_lose_no_end():
    """10,000 interrupts come at random moments while objects are created and finalized."""
    queue, made, ended = FinalizerQueue(), set(), set()

    def work():
        while True:
            thing, key = Thing(), len(made)
            made.add(key)
            queue.watch(thing, key)
            thing = None
            for one in queue.take():
                ended.add(one)

    with handled_by(interrupt):
        for delay in np.random.RandomState(0).uniform(5e-6, 60e-6, 10_000):
            with contextlib.suppress(Interrupt):
                signal.setitimer(signal.ITIMER_REAL, delay)
                work()
    ended.update(queue.take())
    assert len(made) > 10_000
    assert len(made - ended) < 5000  # interrupted before `watch` recorded them
    assert not queue._watched and not queue.waiting


def test_two_threads_that_take_keys_lose_none():
    """A thread may take and remove a key that another thread is processing."""
    queue = FinalizerQueue()
    for number in range(3):
        queue.watch(Thing(), number)
    one, other = queue.take(), queue.take()
    assert [next(one), next(other)] == [0, 0]
    assert [*one, *other] == [1, 2]
