"""`FinalizerQueue`: finalizers are recorded once, whatever interrupts them."""

import contextlib
import gc
import signal

import numpy as np
from interrupts import Interrupt, handled_by, interrupt

from synkhronos._utils.interrupts import FinalizerQueue


class Thing:
    """What ends, in a cycle or not."""

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


def test_a_key_comes_again_if_whoever_acts_on_it_is_interrupted():
    queue = FinalizerQueue()
    for number in range(3):
        queue.watch(Thing(), number)
    for number in queue.take():
        if number == 1:
            break
    assert list(queue.take()) == [1, 2]


def test_interrupts_at_any_moment_lose_no_end():
    """Ten thousand, wherever they come, while things come and go."""
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
    assert len(made - ended) < 5000  # those that were not watched yet when the interrupt came
    assert not queue._watched and not queue.waiting


def test_two_threads_that_take_keys_lose_none():
    """While one of them processes a key, the other takes and removes it."""
    queue = FinalizerQueue()
    for number in range(3):
        queue.watch(Thing(), number)
    one, other = queue.take(), queue.take()
    assert [next(one), next(other)] == [0, 0]
    assert [*one, *other] == [1, 2]
