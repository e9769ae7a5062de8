"""Training steps of the MLP 784-800-800-10 with PyTensor's default linker, alone or on ranks."""

import time

import numpy as np
import pytensor
import pytensor.tensor as T

import synkhronos as synk
from benchmarks.contestants._batches import LEARNING_RATE, MOMENTUM, Batches, make_data
from benchmarks.contestants._serve import compete, timed
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function, make_train_function_theano

SIZES = (784, 800, 800, 10)
ROWS = 4000


def network():
    """Return inputs, labels, loss and parameters."""
    rng = np.random.RandomState(0)
    x, y = T.fmatrix("x"), T.ivector("y")
    out, params = x, []
    for n_inputs, n_units in zip(SIZES, SIZES[1:]):
        out = T.maximum(out, 0) if params else out
        weights = pytensor.shared((np.sqrt(2 / n_inputs) * rng.randn(n_inputs, n_units)).astype("float32"))
        offset = pytensor.shared(np.zeros(n_units, "float32"))
        out = T.dot(out, weights) + offset
        params += [weights, offset]
    shifted = out - out.max(axis=1, keepdims=True)
    logarithms = shifted - T.log(T.exp(shifted).sum(axis=1, keepdims=True))
    return x, y, -logarithms[T.arange(y.shape[0]), y].mean(), params


def training(ranks):
    """Return a function that makes a training step on a pair of arrays; 0 ranks is PyTensor alone."""
    if ranks:
        synk.fork(ranks)
    x, y, loss, params = network()
    make_function = make_train_function if ranks else make_train_function_theano
    train = make_function(loss, params, x, y, updates.nesterov_momentum, LEARNING_RATE, MOMENTUM)
    if ranks:
        synk.distribute()
    return train


def images():
    """Return flat images, shape ``(n, 784)``, and their labels."""
    x, y = make_data("mlp", ROWS)
    return x.reshape(len(x), -1), y


def print_first_result(ranks, batch):
    """Make one step, and print the age of this process in seconds; `pytensor_start` runs this in a new process."""
    import psutil

    x, y = images()
    float(training(ranks)(x[:batch], y[:batch]))
    print(time.time() - psutil.Process().create_time())


def make(ranks):
    """Build the function and the data."""
    x, y = images()
    train, batches = training(ranks), Batches(ROWS)
    x_data, y_data = (synk.data(x), synk.data(y)) if ranks else (x, y)

    def run(batch, steps):
        def step():
            rows = batches.next(batch, True)
            float(train(x_data, y_data, batch=rows) if ranks else train(x[rows], y[rows]))

        return timed(step, steps)

    return run, {"parameters": sum(a * b + b for a, b in zip(SIZES, SIZES[1:]))}


if __name__ == "__main__":
    compete(make)
