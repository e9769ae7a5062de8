"""Training steps that are one exact function, compared with the same steps in plain Theano."""

import functools

import numpy as np
import pytest
from backend import T, lasagne, theano
from comparison import close

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function, make_train_function_theano

N = 23
RULES = {"flat": updates.nesterov_momentum, "lasagne": lasagne.updates.adam}


@functools.cache
def made(rule):
    """Return a step on all ranks and a serial one, with parameters, of a net with batch normalisation and a mask."""
    both = []
    for make in (functools.partial(make_train_function, exact=True), make_train_function_theano):
        rng = np.random.RandomState(0)
        x, mask, y, rate = T.dmatrix("x"), T.dvector("mask"), T.ivector("y"), T.dscalar("rate")
        w, v = (theano.shared(rng.randn(*shape)) for shape in ((4, 7), (7, 3)))
        h = x.dot(w)
        h = T.tanh((h - h.mean(0)) / T.sqrt(h.var(0) + 1e-3))
        out = T.nnet.softmax(h.dot(v))
        losses = T.nnet.categorical_crossentropy(out, y)
        loss = (mask * losses).sum() / mask.sum() + out.std()
        both.append((make(loss, [w, v], [x, mask], y, RULES[rule], rate), [w, v]))
    return both


def data():
    rng = np.random.RandomState(1)
    return [rng.randn(N, 4), (np.arange(N) % 5 > 0) * 1.0], rng.randint(0, 3, N).astype("int32")


@pytest.mark.parametrize("rule", RULES)
def test_steps_are_the_serial_ones(session, rule):
    (train, ours), (alone, theirs) = made(rule)
    x, y = data()  # variables keep their values between sessions, so that training continues
    for batch in (slice(0, 9), [3, 1, 4, 15, 9, 2], 5, slice(9, 23)):
        np.testing.assert_allclose(train(x, y, batch=batch, rate=0.01), alone(x, y, batch=batch, rate=0.01), 1e-9)
        close(ours, theirs)
    before = [var.get_value() for var in ours]
    with pytest.raises((ValueError, synk.WorkerError), match="no data points"):
        train(x, y, batch=[], rate=0.05)
    close(ours, before, 0, 0)
    with pytest.raises(TypeError, match="rate"):
        train(x, y)
    assert not synk.check_replicas(ours)
    assert repr(train).startswith("<synkhronos ExactTrainFunction: <synkhronos.Function train(")


def test_weights_are_refused(session):
    x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.ones(2))
    with pytest.raises(ValueError, match="leave out weights"):
        make_train_function(x.dot(w).mean(), [w], x, y, "sgd", 0.1, weights=y.sum(), exact=True)
