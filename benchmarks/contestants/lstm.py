"""Training steps of an LSTM, in plain Theano or as an exact function."""

import numpy as np

import synkhronos as synk

import lasagne  # isort: skip
import theano  # isort: skip
import theano.tensor as T  # isort: skip
from lasagne import layers  # isort: skip

from benchmarks.contestants._batches import CLASSES
from benchmarks.contestants._serve import compete, timed

TIME, FEATURES, UNITS = 100, 64, 128


def make(ranks):
    """Fork and build an exact function, or a function of plain Theano if `ranks` is 0."""
    if ranks:
        synk.fork(ranks)
    lasagne.random.set_rng(np.random.RandomState(0))
    x, y = T.ftensor3("x"), T.ivector("y")
    net = layers.LSTMLayer(layers.InputLayer((None, TIME, FEATURES), x), UNITS)
    net = layers.DenseLayer(layers.SliceLayer(net, -1, 1), CLASSES, nonlinearity=lasagne.nonlinearities.softmax)
    params = layers.get_all_params(net, trainable=True)
    loss = T.nnet.categorical_crossentropy(layers.get_output(net), y).mean()
    updates = lasagne.updates.adam(T.grad(loss, params), params)
    if ranks:
        train = synk.function([x, y], loss, updates=updates, exact=True)
        synk.distribute()
    else:
        train = theano.function([x, y], loss, updates=updates)
    rng, given = np.random.RandomState(0), {}

    def run(batch, steps):
        if batch not in given:
            rows = rng.standard_normal((batch, TIME, FEATURES)).astype("float32")
            labels = rng.randint(0, CLASSES, batch).astype("int32")
            given[batch] = (synk.data(rows), synk.data(labels)) if ranks else (rows, labels)
        return timed(lambda: float(train(*given[batch])), steps)

    return run, {"parameters": sum(param.get_value().size for param in params)}


if __name__ == "__main__":
    compete(make)
