"""A program with the structure of nolearn on Lasagne: results on all ranks equal those on one process."""

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import theano_only
from lasagne.layers import DenseLayer, DropoutLayer, InputLayer, get_all_params, get_output
from serial_comparison import Program, check_alike

pytestmark = theano_only("Lasagne")


class BatchIterator:
    """Minibatches of a data set, the last of which may be shorter."""

    def __init__(self, size):
        self.size = size

    def __call__(self, x, y=None):
        for start in range(0, len(x), self.size):
            here = slice(start, start + self.size)
            yield self.transform(x[here], None if y is None else y[here])

    def transform(self, x, y):
        return x, y


class Flipped(BatchIterator):
    def transform(self, x, y):
        x = x.copy()
        x[::2] = x[::2, ::-1]
        return x, y


def objective(layers, loss_function, target, deterministic=False, **kwargs):
    prediction = get_output(layers[-1], deterministic=deterministic)
    return lasagne.objectives.aggregate(loss_function(prediction, target), mode="mean")


class NeuralNet(Program):
    def __init__(self):
        lasagne.random.set_rng(np.random.RandomState(3))
        self.rate = theano.shared(np.asarray(0.1, theano.config.floatX))
        layers = [InputLayer((None, 6))]
        layers += [DenseLayer(layers[-1], 8)]
        layers += [DropoutLayer(layers[-1], 0.3)]
        layers += [DenseLayer(layers[-1], 3, nonlinearity=lasagne.nonlinearities.softmax)]
        self.layers = layers
        self.variables = [*get_all_params(layers[-1]), self.rate]
        self.iterators = Flipped(8), BatchIterator(8)
        self.functions = self.train_function, self.evaluate_function, self.predict_function = self.create()

    def create(self):
        x, y = self.layers[0].input_var, T.ivector("y")
        function = lasagne.objectives.categorical_crossentropy
        loss = objective(self.layers, function, y)
        evaluated = objective(self.layers, function, y, deterministic=True)
        prediction = get_output(self.layers[-1], deterministic=True)
        params = get_all_params(self.layers[-1], trainable=True)
        updates = lasagne.updates.nesterov_momentum(T.grad(loss, params), params, learning_rate=self.rate)
        self.variables += list(updates)
        x_batch, y_batch = T.matrix("x_batch"), T.ivector("y_batch")
        options = {"givens": {x: x_batch, y: y_batch}, "allow_input_downcast": True, "on_unused_input": "ignore"}
        inputs = [theano.In(x_batch, name="x"), theano.In(y_batch, name="y")]
        accuracy = T.mean(T.eq(T.argmax(prediction, axis=1), y))
        train = theano.function(inputs, [loss], updates=updates, **options)
        evaluate = theano.function(inputs, [evaluated, accuracy], **options)
        return train, evaluate, theano.function(inputs[:1], prediction, **{**options, "givens": {x: x_batch}})

    def step(self, i):
        rng = np.random.RandomState(i)
        x, y = rng.randn(20, 6), rng.randint(0, 3, 20).astype("int32")
        of_training, of_validation = self.iterators
        self.rate.set_value(self.rate.get_value() * 0.95)  # as its callbacks do between epochs
        losses = [self.train_function(x=some, y=labels)[0] for some, labels in of_training(x, y)]
        scores = [self.evaluate_function(some, labels) for some, labels in of_validation(x[:9], y[:9])]
        probabilities = np.concatenate([self.predict_function(some) for some, _ in of_validation(x)])
        return [np.array(losses), np.array(scores), probabilities]


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_program(synchronize, n_ranks):
    synchronize(n_ranks)
    check_alike(NeuralNet)
