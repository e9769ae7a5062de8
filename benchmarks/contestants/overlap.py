"""Training steps with large gradients: an exact function on ranks, Theano alone, and Theano up to a first gradient."""

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.signal.pool import pool_2d

import synkhronos as synk
from benchmarks.contestants._kernels import of_theano
from benchmarks.contestants._serve import compete, timed
from benchmarks.contestants._wide import CHANNELS, LEARNING_RATE, WIDTHS, make_rows

LARGE = 1 << 18  # numbers of the first large gradient


def build(model):
    """Return the inputs, the loss and the weights of a network."""
    random, params = np.random.RandomState(0), []

    def weights(*shape):
        value = random.randn(*shape) / np.sqrt(np.prod(shape[1:] if len(shape) == 4 else shape[:1]))
        params.append(theano.shared(value.astype("float32")))
        return params[-1]

    y, channels = T.ivector("y"), CHANNELS.get(model, ())
    x = out = T.tensor4("x", "float32") if channels else T.fmatrix("x")
    for one, other in zip(channels, channels[1:]):
        out = pool_2d(T.nnet.relu(T.nnet.conv2d(out, weights(other, one, 5, 5))), (2, 2), ignore_border=True)
    out = out.flatten(2) if channels else out
    *inner, last = zip(WIDTHS[model], WIDTHS[model][1:])
    for widths in inner:
        out = T.nnet.relu(out.dot(weights(*widths)))
    out = T.nnet.softmax(out.dot(weights(*last)))
    return [x, y], T.nnet.categorical_crossentropy(out, y).mean(), params


def make(model, rows, ranks=0, until_first=False, **options):
    """Build a step of `rows` rows in all; 0 ranks is Theano alone."""
    if ranks:
        synk.fork(ranks, **options)
    inputs, loss, params = build(model)
    updates = [(w, w - np.float32(LEARNING_RATE) * g) for w, g in zip(params, T.grad(loss, params))]
    if ranks:
        step = synk.function(inputs, loss, updates=updates, exact=True)
        synk.distribute()
        data = [synk.data(array) for array in make_rows(model, rows)]
    else:
        data = make_rows(model, rows)
        first = next(w for w in reversed(params) if w.get_value(borrow=True).size >= LARGE)
        step = (
            theano.function(inputs, T.grad(loss, first))
            if until_first
            else theano.function(inputs, loss, updates=updates)
        )
    facts = {"parameters": sum(w.get_value(borrow=True).size for w in params), "kernels": of_theano()}
    return lambda steps: timed(lambda: float(np.asarray(step(*data)).flat[0]), steps), facts


if __name__ == "__main__":
    compete(make)
