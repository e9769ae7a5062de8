"""Training steps of an MLP with Adam: in plain Theano, on ranks in three commands, or in one with collectives."""

import synkhronos as synk  # imported before Theano, which it patches

import lasagne  # isort: skip
import numpy as np
import theano
import theano.tensor as T

from benchmarks.contestants._batches import CLASSES, Batches
from benchmarks.contestants._kernels import of_theano
from benchmarks.contestants._serve import compete, timed
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function

ROWS = 4096


def build(widths):
    """Return inputs, loss and parameters of a network."""
    rng = np.random.RandomState(0)
    x, y = T.fmatrix("x"), T.ivector("y")
    params, value = [], x
    for width, next_width in zip(widths, widths[1:]):
        scale = (2 / width) ** 0.5
        weights = theano.shared((rng.randn(width, next_width) * scale).astype("float32"), f"w{len(params)}")
        bias = theano.shared(np.zeros(next_width, "float32"), f"b{len(params)}")
        value = T.dot(T.nnet.relu(value) if params else value, weights) + bias
        params += [weights, bias]
    return x, y, T.nnet.categorical_crossentropy(T.nnet.softmax(value), y).mean(), params


def make(kind, widths, ranks=0):
    """Build the network and its data; `kind` is ``"theano"``, ``"apart"``, ``"apart, Lasagne"`` or ``"inside"``."""
    theano.config.floatX = "float32"
    if ranks:
        synk.fork(ranks)
    x, y, loss, params = build(widths)
    rng = np.random.RandomState(1)
    arrays = rng.standard_normal((ROWS, widths[0])).astype("float32"), rng.randint(0, CLASSES, ROWS).astype("int32")
    if kind == "theano":
        plain = theano.function([x, y], loss, updates=lasagne.updates.adam(loss, params))
    elif kind.startswith("apart"):
        rule = updates.adam if kind == "apart" else lasagne.updates.adam
        train = make_train_function(loss, params, x, y, rule)
    else:
        grads = [synk.averaged(grad) for grad in T.grad(loss, params)]
        train = synk.function([x, y], (synk.averaged(loss), None), updates=lasagne.updates.adam(grads, params))
    if ranks:
        synk.distribute()
        inputs = [synk.data(array) for array in arrays]
    batches = Batches(ROWS)

    def run(batch, steps, shuffle=True):
        def step():
            rows = batches.next(batch, shuffle)
            if ranks:
                float(train(*inputs, batch=rows))
            else:
                float(plain(*(array[rows] for array in arrays)))

        return timed(step, steps)

    return run, {"parameters": sum(param.get_value(borrow=True).size for param in params), "kernels": of_theano()}


if __name__ == "__main__":
    compete(make)
