"""A function that fails on request, and checks of sessions with a slow call and of broken sessions."""

import concurrent.futures
import contextlib
import time

import numpy as np
import pytest
from backend import T, theano
from deadline import scaled
from fault_ops import NOTHING, SLEEP, Fault
from process_state import is_running, shared_memory_names, wait_for_a_call

import synkhronos as synk

built = {}


def build():
    """Build a function that fails on request; return it and the variables that it uses."""
    if "f" not in built:
        x = T.dvector("x")
        fault, big = theano.shared(np.int64(NOTHING), "fault"), theano.shared(np.ones(1), "big")
        built["fault"], built["big"] = fault, big
        built["f"] = synk.function([x], (Fault()(x, fault).sum() + 0 * big.sum(), "sum"), name="counting")
    synk.distribute()
    synk.broadcast([built["fault"], built["big"]], [NOTHING, np.ones(1)])
    assert built["f"](np.ones(9)) == 9
    return built["f"], built["fault"], built["big"]


@contextlib.contextmanager
def slow_call():
    """Run a call that takes a second in another thread within the block, and check its result."""
    synk.set_value(1, built["fault"], SLEEP)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        result = pool.submit(built["f"], np.ones(6))
        wait_for_a_call()
        yield
        assert result.result(20) == 6


def assert_broken(pids):
    """Assert that each call reports a broken session, and that `close` returns soon and leaves nothing behind."""
    function, fault, big = built["f"], built["fault"], built["big"]
    for call in (
        lambda: function(np.ones(6)),
        lambda: synk.broadcast(fault),
        lambda: synk.all_reduce(big),
        lambda: synk.scatter(big, np.ones(5)),
        lambda: synk.get_value(1, fault),
        synk.distribute,
    ):
        with pytest.raises(synk.SessionError, match=r"broken.*close\(\).*fork\(\)"):
            call()
    began = time.monotonic()
    synk.close()
    assert time.monotonic() - began < scaled(10)
    assert not any(map(is_running, pids))
    assert not shared_memory_names()
