"""Training with any update rule, with symbolic hyperparameters, and with losses that are weighted averages."""

import numpy as np
import pytest
from backend import T, lasagne, theano, theano_only
from comparison import close

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function, make_train_function_theano

N = 13
BATCHES = (None, 6, [12, 0, 3, 3, 7], slice(2, 11), [5])


def make_problem(dtype="float64", second=None):
    """Return the loss of each data point in a small network, the input variables, the parameters and data."""
    rng = np.random.RandomState(0)
    x, y = T.matrix("x", dtype), T.vector("y", dtype)
    w = theano.shared(rng.randn(3, 4).astype(dtype), "w")
    v = theano.shared(rng.randn(4).astype(second or dtype), "v")
    losses = T.sqr(T.dot(T.tanh(T.dot(x, w)), v) - y)
    data = rng.randn(N, 3).astype(dtype), rng.randn(N).astype(dtype)
    return losses, (x, y), [w, v], data


def follow(rule, *args, second=None, given=(), **kwargs):
    """Train on all ranks and in plain Theano, compare the results, and return the step, its parameters and data."""
    made = []
    for make in (make_train_function_theano, make_train_function):
        losses, (x, y), params, data = make_problem(second=second)
        loss = losses.mean() + 0.01 * sum((param**2).sum() for param in params)
        train = make(loss, params, x, y, rule, *args, **kwargs)
        history = [train(*data, batch=batch, **dict(given)) for batch in BATCHES]
        made.append([*history, *(param.get_value() for param in params)])
    close(made[1], made[0], rtol=1e-5 if second else 1e-9, atol=0)
    assert synk.check_replicas(params) == {}
    return train, params, data


# ---------------------------------------------------------------- rules that users write


def of_the_loss(loss, params, rate):
    """Return SGD updates from the loss, as in Theano's tutorials."""
    return [(param, param - rate * T.grad(cost=loss, wrt=param)) for param in params]


def of_gradients(grads, params, rate):
    """Return SGD updates from the gradients, as in programs for reinforcement learning."""
    return {param: param - rate * grad for grad, param in zip(grads, params)}


def with_memory(loss, params, rate):
    """Return updates with state of the rule: a moving average of squared gradients, and a step count."""
    result = []
    for param, grad in zip(params, T.grad(loss, params)):
        squares = theano.shared(np.zeros_like(param.get_value()), "squares")
        new = 0.9 * squares + 0.1 * grad**2
        result += [(squares, new), (param, param - rate * grad / T.sqrt(new + 1e-6))]
    steps = theano.shared(0, "steps")
    return [*result, (steps, steps + 1)]


def clipping(loss, params, rate):
    """Return SGD updates with gradients that are scaled by their common norm."""
    grads = T.grad(loss, params)
    norm = T.sqrt(sum(T.sqr(grad).sum() for grad in grads))
    return [(p, p - rate * g * T.minimum(1, 0.5 / norm)) for p, g in zip(params, grads)]


class Optimizer:
    """An optimizer with the method `get_updates`, as in Keras."""

    def __init__(self, rate):
        self.rate = theano.shared(rate, "rate")

    def get_updates(self, loss, params):
        self.updates = [(self.rate, self.rate * 0.9)]
        self.updates += of_the_loss(loss, params, self.rate)
        return self.updates


@pytest.mark.parametrize("rule", [of_the_loss, of_gradients, with_memory, clipping])
def test_rules_without_knowledge_of_ranks(session, rule):
    follow(rule, 0.1)


def test_a_rule_that_is_a_method(session):
    follow(lambda loss, params: Optimizer(0.1).get_updates(loss, params))


@theano_only("Lasagne")
@pytest.mark.parametrize("name", ["sgd", "nesterov_momentum", "adam", "adadelta"])
def test_rules_of_lasagne(session, name):
    theirs = getattr(lasagne.updates, name)
    train, params, data = follow(theirs, learning_rate=0.05)
    losses, (x, y), own_params, _ = make_problem()
    loss = losses.mean() + 0.01 * sum((param**2).sum() for param in own_params)
    ours = make_train_function_theano(loss, own_params, x, y, getattr(updates, name), learning_rate=0.05)
    for batch in BATCHES:
        ours(*data, batch=batch)
    close(params, own_params, rtol=1e-9, atol=0)
    before = params[0].get_value()
    train(*data, num_slices=3)
    assert not np.array_equal(params[0].get_value(), before)


def test_parameters_of_two_dtypes(session):
    train, params, _ = follow(of_the_loss, np.float32(0.1), second="float32")
    assert [grad.dtype for grad in train.grad_shared] == ["float64", "float32"]
    assert [param.dtype for param in params] == ["float64", "float32"]


def test_invalid_rules_are_refused(two):
    losses, (x, y), params, _ = make_problem()

    def nothing(loss, params):
        return None

    def by_name(loss, params):
        return {"w": params[0]}

    def of_the_value(loss, params):
        return [(param, param - loss * T.grad(loss, param)) for param in params]

    def broken(loss, params):
        raise LookupError("the rule's own error")

    for rule, error, words in (
        (nothing, TypeError, "the update rule nothing returned None; expected updates"),
        (by_name, TypeError, "expected updates, as a dict"),
        (of_the_value, TypeError, "the update rule of_the_value uses the value of the loss"),
        (broken, LookupError, "the rule's own error"),
    ):
        for make in (make_train_function, make_train_function_theano):
            with pytest.raises(error, match=words):
                make(losses.mean(), params, x, y, rule)
    made = {param: param for param in params}
    for given in (made, list(made.items()), updates.sgd(losses.mean(), params, 0.1)):
        words = f"^update_rule is updates, as a {type(given).__name__}; expected the rule itself, and its arguments"
        for make in (make_train_function, make_train_function_theano):
            with pytest.raises(TypeError, match=words):
                make(losses.mean(), params, x, y, given)
    with pytest.raises(TypeError, match=r"sgd: missing a required argument: .learning_rate.; it takes \(loss_or_grads"):
        make_train_function(losses.mean(), params, x, y, updates.sgd)


# ---------------------------------------------------------------- symbolic hyperparameters


@pytest.mark.parametrize("rule", [updates.adam, of_the_loss], ids=["ours", "another"])
def test_a_symbolic_learning_rate(session, rule):
    train, params, data = follow(rule, T.dscalar("rate"), given={"rate": 0.05})
    before = [param.get_value() for param in params]
    train(*data, rate=0.0)
    close(params, before, 0, 0)
    for wrong in ({}, {"rat": 0.1}, {"rate": 0.1, "more": 1}):
        with pytest.raises(TypeError, match=r"got the keyword arguments .*; expected \['rate'\]"):
            train(*data, **wrong)


def test_symbolic_variables_in_loss_and_rule(session):
    decay, rate = T.dscalar("decay"), T.dscalar("rate")
    results = []
    for make in (make_train_function_theano, make_train_function):
        losses, (x, y), params, data = make_problem()
        train = make(losses.mean() + decay * (params[0] ** 2).sum(), params, x, y, updates.sgd, rate * decay)
        step = [train(*data, batch=batch, rate=0.1, decay=decay_now) for batch, decay_now in zip(BATCHES, (2, 0, 1))]
        results.append([*step, *(param.get_value() for param in params)])
    close(results[1], results[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", [None, "batch"])
def test_symbolic_variables_need_names(two, name):
    losses, (x, y), params, _ = make_problem()
    with pytest.raises(TypeError, match="expected a name for each"):
        make_train_function(losses.mean(), params, x, y, updates.sgd, T.dscalar(name))


# ---------------------------------------------------------------- weighted averages


def weighted(make, rule=updates.momentum, weights=True):
    """Return a training step for the weighted loss (m * l).sum() / m.sum(), its parameters and data."""
    losses, (x, y), params, data = make_problem()
    m = T.dvector("m")
    loss = (m * losses).sum() / m.sum() + 0.01 * (params[0] ** 2).sum()  # NaN where all of m is 0
    keywords = {"weights": m.sum()} if weights else {}
    train = make(loss, params, [x, m], y, rule, 0.1, **keywords)
    return train, params, data


def masks():
    """Return weights of data points. On 2, 3 and 5 ranks, some are 0 in all rows of a rank."""
    rng = np.random.RandomState(1)
    ends = (np.arange(N) < 2) * 1.0, (np.arange(N) >= 11) * 0.25
    return [rng.rand(N), (rng.rand(N) < 0.5) * 1.0, *ends, np.ones(N)]


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("rule", [updates.momentum, of_the_loss, updates.sgd_nonflat], ids=lambda rule: rule.__name__)
def test_a_weighted_loss_is_that_of_the_serial_step(session, rule, num_slices):
    serial, serial_params, data = weighted(make_train_function_theano, rule)
    train, params, _ = weighted(make_train_function, rule)
    for mask in masks():
        expected = serial([data[0], mask], data[1])
        got = train([data[0], mask], data[1], num_slices=num_slices)
        close([got, *params], [expected, *serial_params], rtol=1e-9, atol=0)
    for batch in ([0, 1, 2], [12], slice(3, 9)):  # ranks without data points
        expected = serial([data[0], masks()[0]], data[1], batch=batch)
        np.testing.assert_allclose(train([data[0], masks()[0]], data[1], batch=batch), expected, rtol=1e-9)
    close(params, serial_params, rtol=1e-9, atol=0)
    assert synk.check_replicas(params) == {}


def test_grad_shared_holds_the_gradient_of_the_weighted_loss(session):
    train, _, data = weighted(make_train_function)
    losses, (x, y), others, _ = make_problem()
    m = T.vector("m", dtype="float64")
    gradient = theano.grad((m * losses).sum() / m.sum() + 0.01 * (others[0] ** 2).sum(), others)
    expected = theano.function([x, m, y], gradient)(data[0], masks()[1], data[1])
    train([data[0], masks()[1]], data[1])
    flat = np.concatenate([one.ravel() for one in expected])
    np.testing.assert_allclose(synk.gather(train.grad_shared), [flat] * session, rtol=1e-9)


def test_a_weighted_loss_without_its_weights_gives_another_step(two):
    serial, serial_params, data = weighted(make_train_function_theano)
    train, params, _ = weighted(make_train_function, weights=False)
    mask = masks()[2]  # 0 in all rows of the second rank
    serial([data[0], mask], data[1])
    train([data[0], mask], data[1])
    assert not np.isfinite(params[0].get_value()).all()
    assert np.isfinite(serial_params[0].get_value()).all()


def test_invalid_weights_are_refused_and_change_nothing(session):
    train, params, data = weighted(make_train_function)
    before = [param.get_value() for param in params]
    few = np.zeros(N)
    few[0] = np.nan
    mixed = np.where(np.arange(N) < N / 2, -1.0, 9.0 if session > 1 else 0.0)  # a rank's sum is negative
    for mask, batch in ((np.zeros(N), None), (few, None), (-np.ones(N), None), (mixed, None), (np.ones(N), [])):
        wrong = "with no data points" if batch == [] else "expected finite weights of at least 0, not all 0"
        with pytest.raises(ValueError, match=wrong):
            train([data[0], mask], data[1], batch=batch)
        close(params, before, 0, 0)
    assert np.isfinite(train([data[0], np.ones(N)], data[1]))
    losses, (x, y), params, _ = make_problem()
    with pytest.raises(TypeError, match="expected a scalar expression"):
        make_train_function(losses.mean(), params, x, y, updates.sgd, 0.1, weights=y)


def test_integer_weights_of_float32(session):
    results = []
    for make in (make_train_function_theano, make_train_function):
        losses, (x, y), params, data = make_problem("float32")
        m = T.ivector("m")
        loss = (m.astype("float32") * losses).sum() / m.sum().astype("float32")
        train = make(loss, params, x, [y, m], updates.adam, 0.1, weights=m.sum())
        counts = np.arange(N, dtype="int32") % 4
        got = [train(data[0], [data[1], counts], batch=batch) for batch in (None, 7, [12, 1, 2])]
        assert got[0].dtype == np.float32
        results.append([*got, *(param.get_value() for param in params)])
    close(results[1], results[0], rtol=2e-4, atol=0)
