"""Threads of BLAS while the controller computes alone: any number of them, in threads and in forked processes."""

import os
import threading

import numpy as np
from backend import T, theano, theano_only
from scripts import run_script

import synkhronos as synk

PROGRAM = """
import os
import numpy as np, threadpoolctl
from backend import T, theano
import synkhronos as synk

x, y = T.dmatrix("x"), T.dmatrix("y")
product = theano.function([x, y], T.dot(x, y))
one = np.random.RandomState(0).randn(300, 300)
expected = product(one, one)
with threadpoolctl.threadpool_limits(2):
    synk.fork(2, use_gpu=False)
    function = synk.function([x], x.dot(x), exact=True, plan="controller")
    for n in (1, 2, 4, 7, 3):  # OpenBLAS may get more threads than it had before
        np.testing.assert_allclose(function(one), expected)
        with threadpoolctl.threadpool_limits(n):
            np.testing.assert_allclose(product(one, one), expected)
np.testing.assert_allclose(product(one, one), expected)
pid = os.fork()
if pid == 0:
    np.testing.assert_allclose(product(one, one), expected)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
synk.close()
np.testing.assert_allclose(product(one, one), expected)
print("done")
"""


def test_products_with_any_number_of_threads():
    out, _ = run_script(PROGRAM)
    assert out == "done\n"


DIVIDED = """
import itertools
import numpy as np, threadpoolctl
from backend import T, theano
import synkhronos as synk

SIZES = (1, 17, 90, 400), (1, 33, 250, 1000), (3, 70, 300)  # rows, columns and terms

def in_layouts(array):
    yield array
    yield np.asfortranarray(array)
    yield np.repeat(array, 2, axis=0)[::2]  # with space between its rows

rng = np.random.RandomState(0)
with threadpoolctl.threadpool_limits(7):
    synk.fork(2, use_gpu=False)
    for dtype, precision in (("float32", 1e-4), ("float64", 1e-12)):
        x, y, z = (T.matrix(name, dtype) for name in "xyz")
        half = np.array(0.5, dtype)
        alone = {"exact": True, "plan": "controller", "shard": {}}
        product = synk.function([], T.dot(x, y), [x, y], **alone)
        added = synk.function([], 2 * z - half * T.dot(x, y), [x, y, z], **alone)
        for m, n, k in itertools.product(*SIZES):
            one, other = rng.randn(m, k).astype(dtype), rng.randn(k, n).astype(dtype)
            third = rng.randn(m, n).astype(dtype)
            expected = one.astype(float).dot(other)
            for first, second in itertools.product(in_layouts(one), in_layouts(other)):
                found = product(first, second)
                np.testing.assert_allclose(found, expected, precision, precision * k)
            found = added(one, other, third)
            np.testing.assert_allclose(found, 2 * third - 0.5 * expected, precision, precision * k)
synk.close()
print("done")
"""


@theano_only("division of products")
def test_products_that_threads_divide():
    out, _ = run_script(DIVIDED)
    assert out == "done\n"


def own_threads():
    """Return how many threads of this process run products for BLAS."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            found.append(file.read())
    return found.count("synk-blas\n")


def test_products_of_several_threads_and_the_end_of_the_session(no_session):
    synk.fork(2, use_gpu=False)
    x = T.dmatrix("x")
    function = synk.function([x], x.dot(x), exact=True, plan="controller")
    product = theano.function([x], x.dot(x))
    one = np.random.RandomState(0).randn(300, 300)
    expected = product(one)
    failed = []

    def multiply():
        for _ in range(20):
            if not np.allclose(product(one), expected):
                failed.append("product")

    threads = [threading.Thread(target=multiply) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        np.testing.assert_allclose(function(one), expected)
    for thread in threads:
        thread.join()
    assert not failed
    synk.close()
    assert own_threads() == 0
    np.testing.assert_allclose(product(one), expected)
