"""Learning-rate schedules: values of the serial formula, on every rank."""

import numpy as np
import pytest
from backend import T, theano

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.schedules import Schedule, linear_scaling, warm_up
from synkhronos.extensions.train import make_train_function

N, STEPS = 24, 7
X = np.random.RandomState(0).rand(N, 3)
Y = X.sum(axis=1)


def serial_weights(factor):
    """Compute the weights after all steps with NumPy, by the warm-up formula of Goyal et al."""
    w = np.zeros(3)
    for step in range(STEPS):
        rate = 0.05 + (0.05 * factor - 0.05) * (step / 4 if step < 4 else 1)
        w = w - rate * 2 * X.T.dot(X.dot(w) - Y) / N
    return w


def test_training_with_warm_up_is_that_of_the_serial_formula(session, ranks):
    x, y = T.dmatrix("x"), T.dvector("y")
    w = theano.shared(np.zeros(3), "w")
    rate = Schedule(warm_up(0.05, ranks + 1, 4))
    train = make_train_function(T.sqr(T.dot(x, w) - y).mean(), [w], x, y, updates.sgd, rate.variable)
    for _ in range(STEPS):
        train(X, Y)
        rate.advance()
    for rank in range(ranks):
        np.testing.assert_allclose(synk.get_value(rank, w), serial_weights(ranks + 1), rtol=1e-12)
        assert synk.get_value(rank, rate.variable) == linear_scaling(0.05, ranks + 1)
    assert rate.step == STEPS


def test_a_continued_schedule_begins_at_its_step():
    by_step = warm_up(0.1, 4, 10)
    assert (by_step(0), by_step(5), by_step(10), by_step(99)) == (0.1, 0.25, 0.4, 0.4)
    rate = Schedule(by_step, step=5, dtype="float32")
    assert rate.variable.get_value() == np.float32(0.25) and rate.variable.dtype == "float32"


@pytest.mark.parametrize("wrong", [(0, 2, 3), (0.1, -1, 3), (0.1, np.inf, 3), (0.1, 2, 0), (0.1, 2, 1.5), ("1", 2, 3)])
def test_invalid_warm_ups_are_refused(wrong):
    with pytest.raises(ValueError, match="expected a"):
        warm_up(*wrong)
