"""`_memory.mapping`: memory is unmapped with the last array that views it, even if interrupted."""

import contextlib
import signal
import time

import numpy as np
import pytest
from interrupts import Interrupt, handled_by, interrupt
from scripts import run_script

from synkhronos._memory import Arena, SegmentTable
from synkhronos._memory.segments import Segment, map_shared


def n_mappings():
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def test_views_keep_a_mapping():
    segment = Segment.create(1 << 16)
    before = n_mappings()
    views = [map_shared(segment.fileno(), 5000, offset=4099, writable=writable) for writable in (True, False)]
    assert n_mappings() == before + 2
    views[0][:] = 7
    assert views[1].flags.writeable is False
    assert (views[1] == 7).all()
    assert segment.bytes[4098:4100].tolist() == [0, 7]
    kept = views[0][10:20]
    views.clear()
    assert n_mappings() == before + 1
    assert (kept == 7).all()
    del kept
    assert n_mappings() == before
    segment.close_fd()


def test_no_python_objects_are_placed():
    made = []
    arena = Arena(SegmentTable(), made.append, made.append)
    arena.reserve(1024)
    with pytest.raises(TypeError, match="holds Python objects; expected numbers or bytes"):
        arena.place(np.array([{}]))
    arena.free()
    made[0].close_fd()


def test_interrupts_at_any_moment_lose_no_mapping(no_garbage_collection):
    """10,000 interrupts come at random moments while memory is mapped and unmapped."""
    segment = Segment.create(1 << 16)
    delays = np.random.RandomState(0).uniform(20e-6, 120e-6, 10_000)
    before, made = n_mappings(), 0
    with handled_by(interrupt):
        for delay in delays:
            with contextlib.suppress(Interrupt):
                signal.setitimer(signal.ITIMER_REAL, delay)
                end = time.monotonic() + 1
                while True:  # not a condition: see tests/faults/test_user_signals.py
                    map_shared(segment.fileno(), 5000)
                    made += 1
                    if time.monotonic() > end:
                        break
    assert made > 10_000
    assert n_mappings() <= before + 2
    segment.close_fd()


def test_a_limit_of_address_space_is_named():
    out, _ = run_script(
        """
        import resource
        synk.fork(2)
        resource.setrlimit(resource.RLIMIT_AS, (2**33, resource.RLIM_INFINITY))
        try:
            from synkhronos._memory.segments import map_shared
            map_shared(0, 2**34)
        except MemoryError as error:
            print(error)
        """
    )
    assert "17,179,869,184 bytes" in out
    assert "ulimit -v" in out


@pytest.mark.parametrize("size", [2**62, 2**64])
def test_a_size_beyond_the_address_space_is_a_memory_error(size):
    with pytest.raises(MemoryError, match="cannot map"):
        map_shared(0, size)
