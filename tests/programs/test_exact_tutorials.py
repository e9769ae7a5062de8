"""Programs with the structure of Theano's tutorials: results on all ranks equal those on one process."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import theano_only
from serial_comparison import Program, check_alike
from theano.tensor.shared_randomstreams import RandomStreams
from theano.tensor.signal.pool import pool_2d

pytestmark = theano_only("Theano's tutorials")

N_ROWS, N_FEATURES, N_CLASSES, BATCH = 66, 9, 3, 22


def weights(rng, *shape):
    return theano.shared(rng.uniform(-0.5, 0.5, shape), borrow=True)


def data(seed=1):
    rng = np.random.RandomState(seed)
    return rng.rand(N_ROWS, N_FEATURES), rng.randint(0, N_CLASSES, N_ROWS).astype("int32")


class LeNet(Program):
    """A convolutional network with minibatches as inputs."""

    def __init__(self):
        rng = np.random.RandomState(123)
        x, y = T.matrix("x"), T.ivector("y")
        shapes = (2, 1, 2, 2), (2,), (2, N_CLASSES), (N_CLASSES,)
        filters, b, w, c = self.variables = [weights(rng, *shape) for shape in shapes]
        images = x.reshape((x.shape[0], 1, 3, 3))
        pooled = pool_2d(T.nnet.conv2d(images, filters), ws=(2, 2), ignore_border=True)
        p_y_given_x = T.nnet.softmax(T.dot(T.tanh(pooled + b.dimshuffle("x", 0, "x", "x")).flatten(2), w) + c)
        penalty = 1e-3 * abs(w).sum() + 1e-4 * (w**2).sum()
        cost = -T.mean(T.log(p_y_given_x)[T.arange(y.shape[0]), y]) + penalty
        errors = T.mean(T.neq(T.argmax(p_y_given_x, axis=1), y))
        updates = [(param, param - 0.2 * T.grad(cost, param)) for param in self.variables]
        train = theano.function(inputs=[x, y], outputs=cost, updates=updates)
        validate = theano.function(inputs=[x, y], outputs=[errors, p_y_given_x])
        self.functions = [train, validate]

    def step(self, i):
        train, validate = self.functions
        x, y = data()
        here = slice(i % 3 * BATCH, (i % 3 + 1) * BATCH - i % 2)  # some batches are shorter
        return [train(x[here], y[here]), *validate(x, y)]


class GivensAndIndex(Program):
    """Data in shared variables. A number selects the minibatch, which is sharded."""

    options = (("shard", ("x", "y")),)

    def __init__(self):
        x, y, index = T.matrix("x"), T.ivector("y"), T.lscalar("index")
        rows, labels = (theano.shared(value, borrow=True) for value in data())
        w, b = self.variables = [theano.shared(np.zeros((N_FEATURES, N_CLASSES))), theano.shared(np.zeros(N_CLASSES))]
        cost = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(x, w) + b), y).mean()
        here = slice(index * BATCH, (index + 1) * BATCH)
        updates = [(param, param - 0.2 * T.grad(cost, param)) for param in self.variables]
        self.functions = [
            theano.function([index], cost, updates=updates, givens={x: rows[here], y: labels[here]}),
            theano.function([index], T.dot(x, w), givens={x: rows[here]}),
        ]

    def step(self, i):
        return [function(i % 3) for function in self.functions]


class Undivided(GivensAndIndex):
    """The same program without sharding: every rank computes the full minibatch."""

    options = ()


class ContrastiveDivergence(Program):
    """A restricted Boltzmann machine, trained by CD-2: Gibbs sampling in a scan, with a random stream."""

    def __init__(self):
        rng = np.random.RandomState(4)
        shapes = (N_FEATURES, 5), (5,), (N_FEATURES,)
        self.w, self.hidden, self.visible = self.variables = [weights(rng, *shape) for shape in shapes]
        self.streams = RandomStreams(8)
        x, rate = T.matrix("x"), T.scalar("rate")
        _, start = self.sample(x, self.w, self.hidden)
        (_, chain), updates = theano.scan(self.gibbs, outputs_info=[None, start], n_steps=2)
        means, _ = self.sample(chain[-1], self.w.T, self.visible)
        end = theano.gradient.disconnected_grad(means)
        cost = T.mean(self.free_energy(x)) - T.mean(self.free_energy(end))
        for param in self.variables:
            updates[param] = param - rate * T.grad(cost, param, consider_constant=[end])
        self.functions = [theano.function([x, theano.In(rate, value=0.1)], [cost, end], updates=updates)]

    def sample(self, values, w, bias):
        mean = T.nnet.sigmoid(T.dot(values, w) + bias)
        return mean, self.streams.binomial(size=mean.shape, n=1, p=mean, dtype=theano.config.floatX)

    def gibbs(self, hidden):
        _, visible = self.sample(hidden, self.w.T, self.visible)
        _, hidden = self.sample(visible, self.w, self.hidden)
        return visible, hidden

    def free_energy(self, x):
        return -T.dot(x, self.visible) - T.sum(T.log(1 + T.exp(T.dot(x, self.w) + self.hidden)), axis=1)

    def step(self, i):
        x, _ = data()
        return self.functions[0]((x[i % 3 :: 3] > 0.5) * 1.0)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("program", [LeNet, GivensAndIndex, Undivided, ContrastiveDivergence])
def test_program(synchronize, n_ranks, program):
    synchronize(n_ranks)
    check_alike(program)
