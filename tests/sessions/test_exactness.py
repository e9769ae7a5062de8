"""Deviations from the serial program, and their remedies: one test for each line of docs/exactness.md."""

import numpy as np
import pytest
from backend import MRG_RandomStreams, T, theano
from comparison import close

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function, make_train_function_theano

N = 11
LIMIT = 0.3


@pytest.fixture(params=[2, 3])
def many(request, synchronize):
    """Make a session of more than one rank. With one rank, all results are exact."""
    return synchronize(request.param)


def data():
    rng = np.random.RandomState(2)
    return rng.randn(N, 3) + np.arange(N)[:, None] / 4, rng.randn(N)


class Model:
    """A regression, its loss and its gradient."""

    def __init__(self):
        self.x, self.y = T.dmatrix("x"), T.dvector("y")
        self.w = theano.shared(np.full(3, 0.5), "w")
        self.loss = T.sqr(T.dot(self.x, self.w) - self.y).mean()
        self.grad = T.grad(self.loss, self.w)


def clipped(grad):
    return grad * T.minimum(1, LIMIT / T.sqrt(T.sqr(grad).sum()))


def sgd_clipped(loss, params):
    """Return SGD updates with clipping: the rule gets the gradient of the full minibatch."""
    return [(param, param - clipped(grad)) for param, grad in zip(params, T.grad(loss, params))]


def serial_step(make_updates):
    model = Model()
    theano.function([model.x, model.y], [], updates=make_updates(model))(*data())
    return model.w.get_value()


def test_clipping(many):
    expected = serial_step(lambda model: [(model.w, model.w - clipped(model.grad))])
    model, g = Model(), theano.shared(np.zeros(3), "g")
    f = synk.function([model.x, model.y], updates=[(g, clipped(model.grad))])
    f(*data())
    synk.all_reduce(g, weights=f.counts)
    assert not np.allclose(0.5 - g.get_value(), expected, rtol=1e-6)  # the average of clipped gradients
    make_train_function(model.loss, [model.w], model.x, model.y, sgd_clipped)(*data())
    np.testing.assert_allclose(model.w.get_value(), expected)


def test_statistics_accumulated_with_the_gradients(many):
    def make_updates(model):
        squares = theano.shared(np.zeros(3), "squares")
        new = 0.9 * squares + 0.1 * model.grad**2
        return [(squares, new), (model.w, model.w - 0.1 * model.grad / T.sqrt(new + 1e-6))]

    expected = serial_step(make_updates)
    model = Model()
    g, squares = theano.shared(np.zeros(3), "g"), theano.shared(np.zeros(3), "squares")
    f = synk.function([model.x, model.y], updates=[(g, model.grad), (squares, 0.9 * squares + 0.1 * model.grad**2)])
    f(*data())
    synk.all_reduce([g, squares], weights=f.counts)
    got = 0.5 - 0.1 * g.get_value() / np.sqrt(squares.get_value() + 1e-6)
    assert not np.allclose(got, expected, rtol=1e-6)  # the mean of squares is not the square of the mean
    train = make_train_function(model.loss, [model.w], model.x, model.y, updates.rmsprop, 0.1)
    train(*data())
    np.testing.assert_allclose(model.w.get_value(), expected)


def test_batch_normalisation(many):
    x = T.dmatrix("x")
    mean, variance = theano.shared(np.zeros(3), "mean"), theano.shared(np.ones(3), "variance")
    normal = (x - x.mean(axis=0)) / T.sqrt(x.var(axis=0) + 1e-4)
    f = synk.function([x], T.tanh(normal).mean(), updates=[(mean, x.mean(axis=0)), (variance, x.var(axis=0))])
    values = data()[0]
    assert not np.allclose(f(values), f.as_theano(values), rtol=1e-6, atol=1e-6)  # each rank has its own statistics
    assert mean.get_value().tolist() == values.mean(axis=0).tolist()  # set by the serial call
    f(values)
    synk.all_reduce([mean, variance], weights=f.counts)
    np.testing.assert_allclose(synk.gather(mean), [values.mean(axis=0)] * many)
    copies = synk.gather(variance)
    assert all(np.array_equal(copy, copies[0]) for copy in copies)
    assert (copies[0] < values.var(axis=0)).all()  # the variance between the ranks' means is missing
    applied = synk.function([x], T.tanh((x - mean) / T.sqrt(variance + 1e-4)).mean())
    np.testing.assert_allclose(applied(values), applied.as_theano(values))


def test_random_noise(many):
    def build(seed):
        x = T.dmatrix("x")
        noise = MRG_RandomStreams(seed).uniform(x.shape, dtype="float64")
        return synk.function([x], [((x * (noise > 0.5)), "gather")])

    values = data()[0]
    f = build(3)
    got, again, serial = f(values)[0], build(3)(values)[0], build(3).as_theano(values)[0]
    assert not np.array_equal(got, serial)
    assert np.array_equal(got, again)  # draws depend on the seed and the number of ranks
    x, noise = T.dmatrix("x"), T.dmatrix("noise")
    g = synk.function([x, noise], [((x * (noise > 0.5)), "gather")])
    drawn = np.random.RandomState(3).rand(*values.shape)
    np.testing.assert_array_equal(g(values, drawn)[0], values * (drawn > 0.5))


def test_functions_of_means(many):
    x = T.dmatrix("x")
    f = synk.function([x], [x.std(), x.mean(), T.sqr(x).mean()])
    values = data()[0]
    std, mean, square = f(values)
    assert not np.allclose(std, values.std(), rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(square - mean**2), values.std())


def test_sums(many):
    x = T.dmatrix("x")
    f = synk.function([x], [x.sum(), (x.sum(), "sum")])
    values = data()[0]
    averaged, added = f(values)
    assert not np.allclose(averaged, values.sum(), rtol=1e-6)
    np.testing.assert_allclose(added, values.sum())


def test_losses_that_compare_data_points_with_each_other(many):
    x, others = T.dmatrix("x"), T.dmatrix("others")
    f = synk.function([x], T.tanh(T.dot(x, x.T)).mean())
    values = data()[0]
    expected = np.tanh(values @ values.T).mean()
    assert not np.allclose(f(values), expected, rtol=1e-6)  # pairs of points on different ranks are missing
    g = synk.function([x], T.tanh(T.dot(x, others.T)).mean(), bcast_inputs=[others])
    np.testing.assert_allclose(g(values, values), expected)


def test_averages_by_other_weights(many):
    mask = (np.arange(N) % 3 == 0) * np.arange(N)
    results = []
    for make, weighted in (
        (make_train_function_theano, False),
        (make_train_function, False),
        (make_train_function, True),
    ):
        model, m = Model(), T.dvector("m")
        loss = (m * T.sqr(T.dot(model.x, model.w) - model.y)).sum() / m.sum()
        keywords = {"weights": m.sum()} if weighted else {}
        make(loss, [model.w], [model.x, m], model.y, updates.sgd, 0.1, **keywords)([data()[0], mask], data()[1])
        results.append(model.w.get_value())
    assert not np.allclose(results[1], results[0], rtol=1e-6)
    np.testing.assert_allclose(results[2], results[0])


def test_updates_of_inputs_that_are_local(many):
    x, seen = T.dmatrix("x"), theano.shared(np.zeros(3), "seen")
    f = synk.function([x], updates=[(seen, seen + x.sum(axis=0))])
    values = data()[0]
    f(values)
    assert not np.allclose(seen.get_value(), values.sum(axis=0), rtol=1e-6)
    synk.all_reduce(seen, op="sum")
    np.testing.assert_allclose(synk.gather(seen), [values.sum(axis=0)] * many)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_what_is_exact(many, num_slices):
    x, y = T.dmatrix("x"), T.dvector("y")
    row = T.tanh(x.sum(axis=1))
    outputs = [
        row.mean(),
        T.sqr(y).mean(),
        (row.sum(), "sum"),
        (x.max(axis=0), "max"),
        (y.min(), "min"),
        (row, "gather"),
    ]
    f = synk.function([x, y], outputs)
    for batch in (None, 7, [10, 0, 0], slice(1, 10, 3), [4]):
        got = f(*data(), batch=batch, num_slices=num_slices)
        rows = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
        close(got, f.as_theano(*(array[rows] for array in data())), rtol=1e-7, atol=0)
    trained = []
    for make in (make_train_function_theano, make_train_function):
        model = Model()
        decayed = model.loss + 0.1 * (model.w**2).sum()
        train = make(decayed, [model.w], model.x, model.y, updates.adam, 0.1)
        keywords = {"num_slices": num_slices} if make is make_train_function else {}
        trained.append([train(*data(), batch=batch, **keywords) for batch in (None, 7, [10, 0, 0], [4])])
        trained[-1].append(model.w.get_value())
    close(*trained, rtol=1e-7, atol=0)
