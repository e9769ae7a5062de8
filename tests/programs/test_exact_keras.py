"""Programs with the structure of Keras 1 and 2 on Theano: results on all ranks equal those on one process.

This module has a small library with that structure: a backend with functions that take updates, a scalar that
distinguishes training from testing, moving averages as updates of layers, a model that compiles its functions late,
an optimizer with its own learning rate and number of steps, sample weights, and metrics.
"""

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import theano_only
from serial_comparison import Program, check_alike
from theano.ifelse import ifelse
from theano.sandbox.rng_mrg import MRG_RandomStreams

pytestmark = theano_only("programs of Keras on Theano")


class Function:
    """A function like those of Keras's backend, which takes a list."""

    def __init__(self, inputs, outputs, updates=(), name=None):
        options = {"allow_input_downcast": True, "on_unused_input": "ignore", "name": name}
        self.function = theano.function(inputs, outputs, updates=updates, **options)

    def __call__(self, inputs):
        assert isinstance(inputs, (list, tuple))
        return self.function(*inputs)


class Layer:
    def __init__(self, backend):
        self.backend, self.weights, self.trained, self.updates = backend, [], [], []

    def add(self, value, trained=True):
        var = theano.shared(np.asarray(value, theano.config.floatX))
        self.weights.append(var)
        self.trained += [var] * trained
        return var


class Dense(Layer):
    def __init__(self, backend, n_in, n_out, activation):
        super().__init__(backend)
        rng = np.random.RandomState(n_in)
        self.kernel, self.bias = self.add(rng.uniform(-0.5, 0.5, (n_in, n_out))), self.add(np.zeros(n_out))
        self.activation = activation

    def __call__(self, x):
        return self.activation(T.dot(x, self.kernel) + self.bias.dimshuffle("x", 0))


class Normalization(Layer):
    def __init__(self, backend, n):
        super().__init__(backend)
        self.gamma, self.beta = self.add(np.ones(n)), self.add(np.zeros(n))
        self.mean, self.variance = self.add(np.zeros(n), False), self.add(np.ones(n), False)

    def __call__(self, x):
        mean, variance = x.mean(0), x.var(0)
        n = T.cast(x.shape[0], theano.config.floatX)
        unbiased = variance * n / (n - 1.001)
        for moving, new in ((self.mean, mean), (self.variance, unbiased)):
            self.updates.append((moving, moving * 0.9 + new * 0.1))
        then, else_ = self.normalized(x, mean, variance), self.normalized(x, self.mean, self.variance)
        return self.backend.in_train_phase(then, else_)

    def normalized(self, x, mean, variance):
        return T.nnet.bn.batch_normalization(x, self.gamma, self.beta, mean, T.sqrt(variance + 1e-3), mode="high_mem")


class Dropout(Layer):
    def __call__(self, x):
        streams = MRG_RandomStreams(seed=7)
        kept = x * streams.binomial(x.shape, p=0.7, dtype=x.dtype) / 0.7
        return self.backend.in_train_phase(kept, x)


class Adam:
    def __init__(self, limit):
        self.limit = limit
        self.iterations, self.rate = theano.shared(np.float64(0)), theano.shared(np.float64(0.01))
        self.weights = []

    def updates(self, loss, params):
        gradients = T.grad(loss, params)
        norm = T.sqrt(sum(T.sum(T.square(g)) for g in gradients))
        gradients = [T.switch(norm >= self.limit, g * self.limit / norm, g) for g in gradients]
        t = self.iterations + 1
        rate = self.rate * T.sqrt(1 - T.pow(0.999, t)) / (1 - T.pow(0.9, t))
        found = [(self.iterations, t)]
        for p, g in zip(params, gradients):
            m, v = (theano.shared(np.zeros_like(p.get_value())) for _ in range(2))
            new_m, new_v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * T.square(g)
            found += [(m, new_m), (v, new_v), (p, p - rate * new_m / (T.sqrt(new_v) + 1e-8))]
            self.weights += [m, v]
        return found


class Keras(Program):
    """A classifier. Keras 2 selects the phase by a switch, Keras 1 by a condition."""

    def __init__(self):
        self.phase = T.scalar(dtype="uint8", name="keras_learning_phase")
        x, y, weights = T.matrix("input_1"), T.matrix("target"), T.vector("sample_weights")
        layers = [
            Dense(self, 5, 7, lambda h: h),
            Normalization(self, 7),
            Dropout(self),
            Dense(self, 7, 3, T.nnet.softmax),
        ]
        out = x
        for layer in layers:
            out = layer(out)
        params = [var for layer in layers for var in layer.trained]
        out_clipped = T.clip(out, 1e-7, 1.0 - 1e-7)
        score = T.nnet.categorical_crossentropy(out_clipped, y) * weights
        score /= T.mean(T.cast(T.neq(weights, 0), theano.config.floatX))
        loss = T.mean(score) + 1e-3 * T.sum(T.square(params[0]))
        accuracy = T.mean(T.eq(T.argmax(y, axis=-1), T.argmax(out, axis=-1)))
        self.optimizer = Adam(limit=0.5)
        updates = self.optimizer.updates(loss, params) + [one for layer in layers for one in layer.updates]
        inputs = [x, y, weights, self.phase]
        self.train = Function(inputs, [loss, accuracy], updates, "train_function")
        self.test = Function(inputs, [loss, accuracy], name="test_function")
        self.predict = Function([x, self.phase], [out], name="predict_function")
        self.functions = [one.function for one in (self.train, self.test, self.predict)]
        self.weights = [var for layer in layers for var in layer.weights]
        self.variables = [*self.weights, *self.optimizer.weights, self.optimizer.iterations]

    def in_train_phase(self, x, alt):
        return T.switch(self.phase, x, alt)

    def step(self, i):
        rng = np.random.RandomState(i)
        n = 10 + i % 3
        x, y, weights = rng.randn(n, 5).astype("float32"), np.eye(3)[rng.randint(0, 3, n)], rng.randint(0, 3, n) * 0.5
        results = [*self.train([x, y, weights, 1]), *self.test([x, y, np.ones(n), 0]), *self.predict([x, 0])]
        if i == 5:  # as callbacks change the learning rate
            self.optimizer.rate.set_value(0.5 * self.optimizer.rate.get_value())
        if i == 9:
            for var in self.weights[:2]:
                var.set_value(var.get_value() * 0.9)
        return results


class KerasOne(Keras):
    def in_train_phase(self, x, alt):
        return ifelse(self.phase, x, alt)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("program", [Keras, KerasOne])
def test_program(synchronize, n_ranks, program):
    synchronize(n_ranks)
    check_alike(program)
