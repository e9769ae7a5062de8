"""Steps of a large dense network with Adam: in plain Theano, or as an exact function."""

import numpy as np
import psutil

import synkhronos as synk

import lasagne  # isort: skip
import theano  # isort: skip
import theano.tensor as T  # isort: skip

from benchmarks.contestants._kernels import of_theano
from benchmarks.contestants._peak import total_memory
from benchmarks.contestants._serve import compete, timed_turn


def make(width, ranks=0, plan="auto"):
    """Fork, if `ranks` is not 0, and build the network. With no rows, a round returns the memory of all processes."""
    theano.config.floatX = "float32"
    if ranks:
        synk.fork(ranks, plan=plan)
    rng = np.random.RandomState(0)
    x, y = T.fmatrix("x"), T.fmatrix("y")
    weights = [theano.shared((rng.randn(width, width) * np.sqrt(2 / width)).astype("float32"), "w") for _ in range(4)]
    biases = [theano.shared(np.zeros(width, "float32"), "b") for _ in weights]
    h = x
    for i, (w, b) in enumerate(zip(weights, biases)):
        h = h.dot(w) + b
        h = h if i == len(weights) - 1 else T.nnet.relu(h)
    loss = T.sqr(h - y).mean()
    params = [*weights, *biases]
    updates = lasagne.updates.adam(T.grad(loss, params), params)
    exact = {"exact": True} if ranks else {}
    function = (synk.function if ranks else theano.function)([x, y], loss, updates=updates, **exact)

    def run(rows):
        this = psutil.Process()
        if not rows:
            return [float(total_memory([this, *this.children()]))]
        arrays = [rng.randn(rows, width).astype("float32") for _ in range(2)]
        return timed_turn(lambda: function(*arrays))

    return run, {"kernels": of_theano()}


if __name__ == "__main__":
    compete(make)
