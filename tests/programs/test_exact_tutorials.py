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


class Classifier(Program):
    """Minibatches as inputs; a subclass has the layers."""

    rate = 0.2

    def __init__(self):
        rng = np.random.RandomState(123)
        x, y = T.matrix("x"), T.ivector("y")
        scores, self.variables, penalty = self.layers(rng, x)
        p_y_given_x = T.nnet.softmax(scores)
        cost = -T.mean(T.log(p_y_given_x)[T.arange(y.shape[0]), y]) + penalty
        errors = T.mean(T.neq(T.argmax(p_y_given_x, axis=1), y))
        updates = [(param, param - self.rate * T.grad(cost, param)) for param in self.variables]
        train = theano.function(inputs=[x, y], outputs=cost, updates=updates)
        validate = theano.function(inputs=[x, y], outputs=[errors, p_y_given_x])
        self.functions = [train, validate]

    def layers(self, rng, x):
        raise NotImplementedError

    def step(self, i):
        train, validate = self.functions
        x, y = data()
        here = slice(i % 3 * BATCH, (i % 3 + 1) * BATCH - i % 2)  # some batches are shorter
        return [train(x[here], y[here]), *validate(x, y)]


class LogisticRegression(Classifier):
    def layers(self, rng, x):
        w, b = theano.shared(np.zeros((N_FEATURES, N_CLASSES))), theano.shared(np.zeros(N_CLASSES))
        return T.dot(x, w) + b, [w, b], 0


class Perceptron(Classifier):
    def layers(self, rng, x):
        params = [weights(rng, N_FEATURES, 7), weights(rng, 7), weights(rng, 7, N_CLASSES), weights(rng, N_CLASSES)]
        w, b, v, c = params
        penalty = 1e-3 * (abs(w).sum() + abs(v).sum()) + 1e-4 * ((w**2).sum() + (v**2).sum())
        return T.dot(T.tanh(T.dot(x, w) + b), v) + c, params, penalty


class LeNet(Classifier):
    def layers(self, rng, x):
        filters, b, w, c = params = [
            weights(rng, 2, 1, 2, 2),
            weights(rng, 2),
            weights(rng, 2, N_CLASSES),
            weights(rng, N_CLASSES),
        ]
        images = x.reshape((x.shape[0], 1, 3, 3))
        pooled = pool_2d(T.nnet.conv2d(images, filters), ws=(2, 2), ignore_border=True)
        return T.dot(T.tanh(pooled + b.dimshuffle("x", 0, "x", "x")).flatten(2), w) + c, params, 0


class GivensAndIndex(Program):
    """The data lie in shared variables, and the minibatch, which is divided, is chosen by its number."""

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
    """Every rank computes the whole."""

    options = ()


class ContrastiveDivergence(Program):
    """A restricted Boltzmann machine, trained by CD-2: a chain of Gibbs sampling in a scan, with a random stream."""

    def __init__(self):
        rng = np.random.RandomState(4)
        self.w, self.hidden, self.visible = self.variables = [
            weights(rng, N_FEATURES, 5),
            weights(rng, 5),
            weights(rng, N_FEATURES),
        ]
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


class Recurrent(Program):
    """Sentences of one length, of words; an Elman net that reads one word after the other."""

    def __init__(self):
        rng = np.random.RandomState(2)
        words, y, mask = T.imatrix("words"), T.ivector("y"), T.matrix("mask")
        table, inside, self.variables = weights(rng, 11, 4), weights(rng, 4, 4), []
        scores, params = self.read(rng, table[words.T], mask.T, inside)
        out = weights(rng, 4, N_CLASSES)
        self.variables = [table, inside, out, *params]
        cost = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(scores, out)), y).mean()
        gradients = T.grad(cost, self.variables)
        norm = T.sqrt(sum((one**2).sum() for one in gradients))
        updates = [(p, p - 0.3 * T.switch(norm > 1, 1 / norm, 1) * g) for p, g in zip(self.variables, gradients)]
        self.functions = [theano.function([words, mask, y], [cost, norm], updates=updates)]

    def read(self, rng, sequence, mask, inside):
        def step(x, here, h):
            return here[:, None] * T.tanh(x + T.dot(h, inside)) + (1 - here)[:, None] * h

        states, _ = theano.scan(step, [sequence, mask], T.zeros_like(sequence[0]))
        return states[-1], []

    def step(self, i):
        rng = np.random.RandomState(i)
        lengths = rng.randint(1, 5, 10 + i % 3)
        mask = (np.arange(4) < lengths[:, None]) * 1.0
        return self.functions[0](rng.randint(0, 11, mask.shape).astype("int32"), mask, lengths.astype("int32") % 3)


class LongShortTerm(Recurrent):
    """As `Recurrent`, with gates, and the mean of all states."""

    def read(self, rng, sequence, mask, inside):
        gates, kept = weights(rng, 4, 16), weights(rng, 4, 16)

        def step(x, here, h, c):
            all_gates = T.dot(x, gates) + T.dot(h, kept)
            i, f, o = (T.nnet.sigmoid(all_gates[:, 4 * k : 4 * (k + 1)]) for k in range(3))
            new = here[:, None] * (f * c + i * T.tanh(all_gates[:, 12:])) + (1 - here)[:, None] * c
            return here[:, None] * (o * T.tanh(new)) + (1 - here)[:, None] * h, new

        start = T.zeros((sequence.shape[1], 4))
        (states, _), _ = theano.scan(step, [sequence, mask], [start, start])
        mean = (states * mask[:, :, None]).sum(axis=0) / mask.sum(axis=0)[:, None]
        return T.dot(mean, inside), [gates, kept]


PROGRAMS = [
    LogisticRegression,
    Perceptron,
    LeNet,
    GivensAndIndex,
    Undivided,
    ContrastiveDivergence,
    Recurrent,
    LongShortTerm,
]


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(synchronize, n_ranks, program):
    synchronize(n_ranks)
    check_alike(program)
