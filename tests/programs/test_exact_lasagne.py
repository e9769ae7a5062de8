"""Programs like Lasagne's examples and recipes: results on all ranks equal those on one process."""

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import theano_only
from lasagne import layers
from lasagne.nonlinearities import rectify, softmax
from serial_comparison import Program, check_alike

pytestmark = theano_only("Lasagne")

N_CLASSES = 3


class Normalization(layers.Layer):
    """Batch normalization as in the recipe: default updates of clones of the variables compute the moving averages."""

    def __init__(self, incoming):
        super().__init__(incoming)
        n = self.input_shape[1]
        constant = lasagne.init.Constant
        self.gamma, self.beta = (self.add_param(constant(value), (n,)) for value in (1.0, 0.0))
        self.mean, self.deviation = (self.add_param(constant(value), (n,), trainable=False) for value in (0.0, 1.0))

    def get_output_for(self, input, deterministic=False, **kwargs):
        axes = (0, *range(2, input.ndim))
        mean, deviation = self.mean, self.deviation
        if not deterministic:
            mean, deviation = input.mean(axes), T.sqrt(input.var(axes) + 1e-4)
            for var, value in ((self.mean, mean), (self.deviation, deviation)):
                moving = theano.clone(var, share_inputs=False)
                moving.default_update = 0.8 * moving + 0.2 * value
                mean = mean + 0 * moving
        pattern = ["x", 0, *["x"] * (input.ndim - 2)]
        mean, deviation, gamma, beta = (one.dimshuffle(pattern) for one in (mean, deviation, self.gamma, self.beta))
        return (input - mean) * (gamma / deviation) + beta


class Example(Program):
    """Training and evaluation as in the MNIST example; subclasses define the network."""

    shape = (None, 1, 6, 6)
    new_input = staticmethod(T.tensor4)

    def __init__(self):
        lasagne.random.set_rng(np.random.RandomState(1))
        x, y = self.new_input("inputs"), T.ivector("targets")
        network = layers.DenseLayer(self.network(layers.InputLayer(self.shape, x)), N_CLASSES, nonlinearity=softmax)
        prediction = layers.get_output(network)
        loss = lasagne.objectives.categorical_crossentropy(prediction, y).mean()
        loss += 1e-3 * lasagne.regularization.regularize_network_params(network, lasagne.regularization.l2)
        params = layers.get_all_params(network, trainable=True)
        updates = self.rule(loss, params)
        test_prediction = layers.get_output(network, deterministic=True)
        test_loss = lasagne.objectives.categorical_crossentropy(test_prediction, y).mean()
        accuracy = T.mean(T.eq(T.argmax(test_prediction, axis=1), y), dtype=theano.config.floatX)
        train = theano.function([x, y], loss, updates=updates)
        validate = theano.function([x, y], [test_loss, accuracy])
        self.functions, self.variables = [train, validate], [*layers.get_all_params(network), *updates]

    def network(self, layer):
        raise NotImplementedError

    def rule(self, loss, params):
        return lasagne.updates.nesterov_momentum(loss, params, learning_rate=0.02, momentum=0.9)

    def batch(self, i):
        rng = np.random.RandomState(i)
        return rng.randn(11 + i % 2, *self.shape[1:]), rng.randint(0, N_CLASSES, 11 + i % 2).astype("int32")

    def step(self, i):
        train, validate = self.functions
        return [train(*self.batch(i)), *validate(*self.batch(99))]


class Dropout(Example):
    def network(self, layer):
        layer = layers.DropoutLayer(layer, p=0.2)
        return layers.DropoutLayer(layers.DenseLayer(layer, 8, nonlinearity=rectify), p=0.5)


class ConvolutionsAndBatchNormalisation(Example):
    def network(self, layer):
        return layers.MaxPool2DLayer(Normalization(layers.Conv2DLayer(layer, 3, (3, 3), b=None)), (2, 2))

    def rule(self, loss, params):
        return lasagne.updates.adam(loss, params, 0.01)


class ClippedRecurrent(Example):
    """A network as in the recipes for text, with an embedding, an LSTM and clipped gradients."""

    shape = (None, 5)
    new_input = staticmethod(T.imatrix)

    def network(self, layer):
        layer = layers.LSTMLayer(layers.EmbeddingLayer(layer, 9, 4), 5, grad_clipping=10.0)
        return layers.SliceLayer(layer, -1, 1)

    def rule(self, loss, params):
        gradients = lasagne.updates.total_norm_constraint(T.grad(loss, params), 1.0)
        return lasagne.updates.apply_momentum(lasagne.updates.rmsprop(gradients, params, 0.01), params, 0.5)

    def batch(self, i):
        x, y = super().batch(i)
        return (abs(x) * 4 % 9).astype("int32"), y


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("program", [Dropout, ConvolutionsAndBatchNormalisation, ClippedRecurrent])
def test_program(synchronize, n_ranks, program):
    synchronize(n_ranks)
    check_alike(program)
