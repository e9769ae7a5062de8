"""Training steps of the demos' MLP and CNN as an exact function or with flat gradients, and compile times."""

import time

import synkhronos as synk  # imported before Theano, which it patches

import lasagne  # isort: skip
import theano
import theano.tensor as T
from lasagne.init import Constant
from lasagne.layers import Conv2DLayer, DenseLayer, InputLayer, Layer, MaxPool2DLayer
from lasagne.nonlinearities import rectify, softmax

from benchmarks.contestants._batches import CLASSES, LEARNING_RATE, MOMENTUM, Batches, make_data
from benchmarks.contestants._kernels import of_theano
from benchmarks.contestants._serve import compete, timed
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function


class BatchNorm(Layer):
    """Batch normalisation, followed by rectification."""

    def __init__(self, incoming):
        super().__init__(incoming)
        self.gamma = self.add_param(Constant(1), self.input_shape[1:2], name="gamma")
        self.beta = self.add_param(Constant(0), self.input_shape[1:2], name="beta")

    def get_output_for(self, value, **kwargs):
        """Normalise by the statistics of the minibatch."""
        kind, order = ("spatial", ("x", 0, "x", "x")) if value.ndim == 4 else ("per-activation", ("x", 0))
        gamma, beta = (one.dimshuffle(*order) for one in (self.gamma, self.beta))
        return rectify(T.nnet.bn.batch_normalization_train(value, gamma, beta, kind)[0])


def hidden(kind, layer, *arguments, normalised):
    """Return a layer with rectified outputs, and optionally with batch normalisation before the rectifier."""
    if normalised:
        return BatchNorm(kind(layer, *arguments, nonlinearity=None, b=None))
    return kind(layer, *arguments, nonlinearity=rectify)


def build(model, normalised):
    """Return inputs, loss and parameters of a network like the demos', with or without batch normalisation."""
    x, y = T.ftensor4("x"), T.ivector("y")
    layer = InputLayer((None, 1, 28, 28), x)
    for _ in range(2):
        if model == "cnn":
            layer = MaxPool2DLayer(hidden(Conv2DLayer, layer, 32, 5, normalised=normalised), 2)
        else:
            layer = hidden(DenseLayer, layer, 800, normalised=normalised)
    if model == "cnn":
        layer = hidden(DenseLayer, layer, 256, normalised=normalised)
    layer = DenseLayer(layer, CLASSES, nonlinearity=softmax)
    loss = lasagne.objectives.categorical_crossentropy(lasagne.layers.get_output(layer), y).mean()
    return x, y, loss, lasagne.layers.get_all_params(layer, trainable=True)


def make(kind, model, n, ranks=0, normalised=False):
    """Build a training step and `n` rows of data; `kind` is ``"theano"``, ``"flat"`` or ``"exact"``."""
    theano.config.floatX = "float32"
    if ranks:
        synk.fork(ranks)
    x, y, loss, params = build(model, normalised)
    start = time.perf_counter()
    if kind == "flat":
        train = make_train_function(loss, params, x, y, updates.nesterov_momentum, LEARNING_RATE, MOMENTUM)
    else:
        options = {"exact": True} if kind == "exact" else {}
        rule = lasagne.updates.nesterov_momentum(loss, params, LEARNING_RATE, MOMENTUM)
        train = (synk.function if options else theano.function)([x, y], loss, updates=rule, **options)
    seconds = time.perf_counter() - start
    arrays = make_data(model, n)
    if ranks:
        synk.distribute()
        inputs = [synk.data(array) for array in arrays]
    batches = Batches(n)

    def run(batch=0, steps=0):
        def step():
            rows = batches.next(batch, shuffle=True)
            float(train(*inputs, batch=rows) if ranks else train(*(array[rows] for array in arrays)))

        return timed(step, steps) if steps else [seconds]

    return run, {"parameters": sum(param.get_value(borrow=True).size for param in params), "kernels": of_theano()}


if __name__ == "__main__":
    compete(make)
