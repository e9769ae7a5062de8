"""Training steps in plain Theano: one function computes the full step, with Lasagne's update rule."""

import synkhronos  # noqa: F401  patches Theano, which otherwise links no BLAS or does not start

import lasagne  # isort: skip
import theano  # isort: skip

from benchmarks.contestants._batches import LEARNING_RATE, MOMENTUM, Batches, make_data
from benchmarks.contestants._networks import build_network, describe
from benchmarks.contestants._serve import compete, timed


def make(model, n):
    """Build the network and `n` rows of data."""
    graph = build_network(model)
    updates = lasagne.updates.nesterov_momentum(graph.loss, graph.params, LEARNING_RATE, MOMENTUM)
    train = theano.function([graph.x, graph.y], graph.loss, updates=updates)
    x, y = make_data(model, n)
    batches = Batches(n)

    def run(batch, steps, shuffle=True):
        def step():
            rows = batches.next(batch, shuffle)
            float(train(x[rows], y[rows]))

        return timed(step, steps)

    return run, describe(graph)


if __name__ == "__main__":
    compete(make)
