"""Kernels of Theano on one thread, on grids of sizes and at sizes between; facts of this process are their seconds."""

import itertools
import statistics
import time

import numpy as np
import theano
import theano.tensor as T

import synkhronos  # noqa: F401  links Theano to a BLAS
from benchmarks.contestants._kernels import of_theano
from benchmarks.contestants._serve import compete, timed
from benchmarks.kernel_models import KINDS

SECONDS = 0.01  # of the calls of one kernel in one sweep
MOST = 50


def compiled():
    """Return a function for each kind of kernel, and one that returns its arguments for some sizes."""
    a, b = T.fmatrices("a", "b")
    images, filters = T.tensor4("images", "float32"), T.tensor4("filters", "float32")
    vector = T.fvector("vector")
    random = np.random.RandomState(0)

    def arrays(*shapes):
        return [random.rand(*map(int, shape)).astype("float32") for shape in shapes]

    def function(inputs, output):
        return theano.function([theano.In(one, borrow=True) for one in inputs], theano.Out(output, borrow=True))

    return {
        "product": (function([a, b], a.dot(b)), lambda m, n, k: arrays((m, k), (k, n))),
        "convolution": (
            function([images, filters], T.nnet.conv2d(images, filters, border_mode="half")),
            lambda rows, channels, length, side: arrays(
                (rows, channels, length, length), (channels, channels, side, side)
            ),
        ),
        "elementwise": (function([vector], 2 * vector + 1), lambda n_bytes: arrays((n_bytes // 4,))),
    }


def seconds_of(function, arguments):
    """Return the median seconds of some calls."""
    function(*arguments)
    start = time.perf_counter()
    function(*arguments)
    calls = min(MOST, max(3, int(SECONDS / (time.perf_counter() - start))))
    return statistics.median(timed(lambda: function(*arguments), calls, untimed=0))


def make(sweeps):
    """Measure all kernels in some sweeps; the facts have the medians."""
    functions, facts = compiled(), {"kernels": of_theano()}
    for kind, (axes, between) in KINDS.items():
        function, make_arrays = functions[kind]
        for name, sizes in (("seconds", axes), ("expected", between)):
            found = [
                [seconds_of(function, make_arrays(*one)) for one in itertools.product(*sizes)] for _ in range(sweeps)
            ]
            facts[f"{kind}/{name}"] = [statistics.median(one) for one in zip(*found)]
    return lambda: [0.0], facts


if __name__ == "__main__":
    compete(make)
