"""Generative models: results on all ranks equal those on one process."""

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import theano_only
from serial_comparison import Program, check_alike
from theano.sandbox.rng_mrg import MRG_RandomStreams

pytestmark = theano_only("Lasagne")

N = 11


def weights(rng, *shape):
    return theano.shared(rng.uniform(-0.4, 0.4, shape))


def normalized(h, gain):
    """Apply batch normalization over rows or images."""
    axes = (0,) if h.ndim == 2 else (0, 2, 3)
    gain = gain if h.ndim == 2 else gain.dimshuffle("x", 0, "x", "x")
    return gain * (h - h.mean(axes, keepdims=True)) / T.sqrt(h.var(axes, keepdims=True) + 1e-4)


class Autoencoder(Program):
    """A variational autoencoder with noise for each row, a loss of two terms, and Adam."""

    def __init__(self):
        rng = np.random.RandomState(5)
        shapes = (8, 6), (6, 2), (6, 2), (2, 6), (6, 8)
        w, mean_of, deviation_of, back, out = params = [weights(rng, *shape) for shape in shapes]
        x, streams = T.matrix("x"), MRG_RandomStreams(9)
        h = T.nnet.softplus(T.dot(x, w))
        mean, log_deviation = T.dot(h, mean_of), T.dot(h, deviation_of)
        z = mean + T.exp(log_deviation) * streams.normal(mean.shape, dtype=theano.config.floatX)
        again = T.nnet.sigmoid(T.dot(T.tanh(T.dot(z, back)), out))
        divergence = -0.5 * T.sum(1 + 2 * log_deviation - mean**2 - T.exp(2 * log_deviation), axis=1)
        bound = T.mean(divergence + T.sum(T.nnet.binary_crossentropy(again, x), axis=1))
        updates = lasagne.updates.adam(bound, params, 0.01)
        n = T.iscalar("n")
        sampled = T.nnet.sigmoid(T.dot(T.tanh(T.dot(streams.normal((n, 2), dtype=theano.config.floatX), back)), out))
        self.functions = [theano.function([x], [bound, z], updates=updates), theano.function([n], sampled)]
        self.variables = list(updates)

    def step(self, i):
        train, sample = self.functions
        return [*train((np.random.RandomState(i).rand(N, 8) > 0.5) * 1.0), sample(3)]


class Adversaries(Program):
    """A generator and a discriminator with batch normalization, trained alternately by two functions."""

    def __init__(self):
        rng = np.random.RandomState(6)
        self.streams = MRG_RandomStreams(2)
        shapes = (4, 18), (2, 1, 3, 3), (2,), (2, 1, 3, 3), (2,), (8,)
        params = [weights(rng, *shape) for shape in shapes]
        self.project, self.up, self.gain = of_generator = params[:3]
        self.filters, self.gain_2, self.out = of_critic = params[3:]
        x, z = T.tensor4("x"), T.matrix("z")
        fake = self.generate(z)
        (p_real, features), (p_fake, features_of_fakes) = self.judge(x), self.judge(fake)
        critic_cost = T.nnet.binary_crossentropy(p_real, 1).mean() + T.nnet.binary_crossentropy(p_fake, 0).mean()
        generator_cost = self.cost(features, features_of_fakes)
        critic = lasagne.updates.adam(critic_cost, of_critic, 0.01, beta1=0.5)
        generator = lasagne.updates.adam(generator_cost, of_generator, 0.01, beta1=0.5)
        self.functions = [
            theano.function([x, z], [critic_cost, p_fake], updates=critic),
            theano.function([x, z], generator_cost, updates=generator, on_unused_input="ignore"),
            theano.function([z], fake),
        ]
        self.variables = [*critic, *generator]

    def generate(self, z):
        h = T.nnet.relu(normalized(T.dot(z, self.project).reshape((z.shape[0], 2, 3, 3)), self.gain))
        options = {"filter_shape": (2, 1, 3, 3), "border_mode": (1, 1), "subsample": (2, 2)}
        return T.tanh(T.nnet.abstract_conv.conv2d_grad_wrt_inputs(h, self.up, (None, 1, 6, 6), **options))

    def judge(self, images):
        h = T.nnet.relu(T.nnet.conv2d(images, self.filters, subsample=(2, 2)), 0.2)
        features = normalized(h, self.gain_2).flatten(2)
        return T.nnet.sigmoid(T.dot(features, self.out)), features

    def cost(self, features, features_of_fakes):
        """Return the cost of differences between the mean features of minibatches, and between their deviations."""
        spread = abs(features.std(axis=0) - features_of_fakes.std(axis=0)).mean()
        return T.mean(abs(features.mean(axis=0) - features_of_fakes.mean(axis=0))) + 0.1 * spread

    def step(self, i):
        critic, generator, generate = self.functions
        rng = np.random.RandomState(i)
        x, z = rng.uniform(-1, 1, (N, 1, 6, 6)), rng.uniform(-1, 1, (N, 4))
        results = [*critic(x, z)]
        return [*results, generator(x, z)] if i % 2 else [*results, generate(z[:5])]


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("program", [Autoencoder, Adversaries])
def test_program(synchronize, n_ranks, program):
    synchronize(n_ranks)
    check_alike(program)
