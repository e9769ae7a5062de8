"""Calls of ten programs, in plain Theano or as exact functions with one of the plans."""

import numpy as np

import synkhronos as synk

import lasagne  # isort: skip
import theano  # isort: skip
import theano.tensor as T  # isort: skip
from lasagne import layers  # isort: skip
from lasagne.nonlinearities import rectify, softmax  # isort: skip

from benchmarks.contestants._batches import CLASSES
from benchmarks.contestants._kernels import of_theano
from benchmarks.contestants._serve import compete, timed_turn


def classify(layer, x, y, rule):
    """Return inputs, outputs and updates of a training step with a softmax layer on top."""
    top = layers.DenseLayer(layer, CLASSES, nonlinearity=softmax)
    params = layers.get_all_params(top, trainable=True)
    loss = T.nnet.categorical_crossentropy(layers.get_output(top), y).mean()
    return [x, y], loss, rule(loss, params)


def sgd(loss, params):
    """Return the updates of stochastic gradient descent."""
    return lasagne.updates.sgd(loss, params, 0.01)


def adam(loss, params):
    """Return the updates of Adam, from gradients that Theano computes for the parameters."""
    return lasagne.updates.adam(T.grad(loss, params), params)


def dense(widths, rule):
    """Return a maker of a network of dense layers for 784 numbers in each row."""

    def make():
        x, y = T.fmatrix("x"), T.ivector("y")
        layer = layers.InputLayer((None, 784), x)
        for width in widths:
            layer = layers.DenseLayer(layer, width, nonlinearity=rectify)
        return classify(layer, x, y, rule)

    return make


def autoencoder():
    """Return a step of an autoencoder 784-256-784 with Adam."""
    x = T.fmatrix("x")
    layer = layers.DenseLayer(layers.InputLayer((None, 784), x), 256)
    layer = layers.DenseLayer(layer, 784, nonlinearity=lasagne.nonlinearities.sigmoid)
    loss = T.sqr(layers.get_output(layer) - x).mean()
    return [x], loss, adam(loss, layers.get_all_params(layer))


def cnn():
    """Return a step of a network of two convolutions of 5 x 5 and a dense layer."""
    x, y = T.ftensor4("x"), T.ivector("y")
    layer = layers.InputLayer((None, 1, 28, 28), x)
    for channels in (16, 32):
        layer = layers.MaxPool2DLayer(layers.Conv2DLayer(layer, channels, 5), 2)
    return classify(layers.DenseLayer(layer, 128), x, y, sgd)


def lstm():
    """Return a step of an LSTM of 128 units over 20 time steps."""
    x, y = T.ftensor3("x"), T.ivector("y")
    layer = layers.LSTMLayer(layers.InputLayer((None, 20, 64), x), 128)
    return classify(layers.SliceLayer(layer, -1, 1), x, y, adam)


def transformer():
    """Return a step of a block of self-attention over 16 tokens of 64 numbers, with 2 heads."""
    x, y = T.ftensor3("x"), T.ivector("y")
    rng = np.random.RandomState(0)
    shapes = {"q": (64, 64), "k": (64, 64), "v": (64, 64), "o": (64, 64), "a": (64, 256), "b": (256, 64)}
    w = {name: theano.shared((0.1 * rng.randn(*shape)).astype("float32"), name) for name, shape in shapes.items()}
    out = theano.shared((0.1 * rng.randn(64, CLASSES)).astype("float32"), "out")
    heads = []
    for head in range(2):
        part = slice(32 * head, 32 * head + 32)
        q, k, v = (T.dot(x, w[name][:, part]) for name in "qkv")
        scores = T.batched_dot(q, k.dimshuffle(0, 2, 1)) / np.float32(32**0.5)
        weights = T.exp(scores - scores.max(axis=2, keepdims=True))
        heads.append(T.batched_dot(weights / weights.sum(axis=2, keepdims=True), v))
    h = x + T.dot(T.concatenate(heads, axis=2), w["o"])
    h += T.dot(T.nnet.relu(T.dot(h, w["a"])), w["b"])
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(h.mean(axis=1), out)), y).mean()
    return [x, y], loss, sgd(loss, [*w.values(), out])


def k_means():
    """Return a step of k-means with 50 centres."""
    x = T.fmatrix("x")
    rng = np.random.RandomState(0)
    centres = theano.shared(rng.rand(50, 64).astype("float32"), "centres")
    distances = T.sqr(x).sum(axis=1, keepdims=True) - 2 * T.dot(x, centres.T) + T.sqr(centres).sum(axis=1)
    chosen = T.eq(distances, distances.min(axis=1, keepdims=True)).astype("float32")
    new = T.dot(chosen.T, x) / (chosen.sum(axis=0)[:, None] + np.float32(1e-3))
    return [x], distances.min(axis=1).mean(), [(centres, new)]


def tiny():
    """Return a function of one elementwise operation and a sum."""
    x = T.fmatrix("x")
    return [x], T.sqr(x).sum(), []


def regression():
    """Return the log-likelihood of a Poisson regression, and its gradient."""
    x, y = T.fmatrix("x"), T.ivector("y")
    weights = theano.shared(np.zeros(32, np.float32), "weights")
    rate = T.dot(x, weights)
    likelihood = (y * rate - T.exp(rate) - T.gammaln(y + np.float32(1))).sum()
    return [x, y], [likelihood, T.grad(likelihood, weights)], []


#: For each program: the maker, and the shape of a row.
PROGRAMS = {
    "mlp": (dense([800, 800], sgd), (784,)),
    "mlp-adam": (dense([512, 512], adam), (784,)),
    "logistic": (dense([], sgd), (784,)),
    "autoencoder": (autoencoder, (784,)),
    "cnn": (cnn, (1, 28, 28)),
    "lstm": (lstm, (20, 64)),
    "transformer": (transformer, (16, 64)),
    "k-means": (k_means, (64,)),
    "tiny": (tiny, (10,)),
    "regression": (regression, (32,)),
}


def make(plan="", ranks=0):
    """Fork, if `ranks` is not 0; functions are built when they are first needed.

    With ``which_plan``, a round returns whether the controller computed the last call, which had as many rows.
    """
    theano.config.floatX = "float32"
    if ranks:
        synk.fork(ranks, plan=plan)
    functions, given = {}, {}

    def run(program, rows, which_plan=False):
        if program not in functions:
            lasagne.random.set_rng(np.random.RandomState(0))
            inputs, outputs, updates = PROGRAMS[program][0]()
            options = {"exact": True} if ranks else {}
            functions[program] = (synk.function if ranks else theano.function)(
                inputs, outputs, updates=updates, **options
            )
        if (program, rows) not in given:
            rng = np.random.RandomState(0)
            x = rng.random_sample((rows, *PROGRAMS[program][1])).astype("float32")
            given[program, rows] = [x, rng.randint(0, CLASSES, rows).astype("int32")]
        function = functions[program]
        arrays = given[program, rows][: 1 if program in ("autoencoder", "k-means", "tiny") else 2]
        if which_plan:
            return [float(function.counts[0] == rows)]
        return timed_turn(lambda: function(*arrays))

    return run, {"kernels": of_theano()}


if __name__ == "__main__":
    compete(make)
