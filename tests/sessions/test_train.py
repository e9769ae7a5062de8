"""A training step on any number of ranks against the serial step, parameter by parameter."""

import copy
import functools
import pickle

import numpy as np
import pytest
from backend import T, theano
from comparison import close

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function, make_train_function_theano

N, SIZE, EPOCHS = 23, 6, 2  # the last of the four minibatches of an epoch has 5 points
RULES = {"sgd": (0.3,), "sgd_nonflat": (0.3,), "nesterov_momentum": (0.1, 0.8), "adam": (0.01,)}
TOLERANCES = {"float64": 1e-10, "float32": 1e-4}


def make_problem(dtype):
    """Make a small network with weight decay, and the data that it is trained on."""
    rng = np.random.RandomState(0)
    x, y = T.matrix("x", dtype=dtype), T.ivector("y")
    w = theano.shared(rng.randn(4, 7).astype(dtype), "w")
    b = theano.shared(np.zeros(7, dtype), "b")
    v = theano.shared(rng.randn(7, 3).astype(dtype), "v")
    output = T.nnet.softmax(T.dot(T.tanh(T.dot(x, w) + b), v))
    decay = np.asarray(0.01, dtype) * ((w**2).sum() + (v**2).sum())
    loss = T.nnet.categorical_crossentropy(output, y).mean() + decay
    data = rng.randn(N, 4).astype(dtype), rng.randint(0, 3, N).astype("int32")
    return loss, [w, b, v], x, y, data


def batches():
    """Yield the same minibatches each time: index lists, a slice and a number of rows."""
    rng = np.random.RandomState(1)
    for _ in range(EPOCHS):
        order = rng.permutation(N)
        yield from (order[start : start + SIZE] for start in range(0, N, SIZE))
    yield slice(3, 17, 2)
    yield 4
    yield [7]  # fewer points than ranks


def values(params):
    return [p.get_value() for p in params]


@functools.cache
def serial_history(dtype, rule):
    loss, params, x, y, data = make_problem(dtype)
    train = make_train_function_theano(loss, params, x, y, getattr(updates, rule), *RULES[rule])
    return [(train(*data, batch=batch), values(params)) for batch in batches()]


@functools.cache
def built(dtype, rule):
    """Return a training step, its parameters and data, and the initial values of its variables."""
    loss, params, x, y, data = make_problem(dtype)
    train = make_train_function(loss, params, x, y, getattr(updates, rule), *RULES[rule])
    variables = list(dict.fromkeys(train.gradient.get_shared() + train.update.get_shared()))
    return train, params, data, {var: var.get_value() for var in variables}


def start(dtype, rule):
    """Return the training step of `built`, its parameters and data, with all variables reset on all ranks."""
    train, params, data, values = built(dtype, rule)
    synk.distribute()
    synk.broadcast(list(values), list(values.values()))
    return train, params, data


def test_an_error_before_fork(no_session):
    loss, params, x, y, _ = make_problem("float64")
    with pytest.raises(RuntimeError, match=r"call synkhronos\.fork\(\) first"):
        make_train_function(loss, params, x, y, updates.sgd, 0.1)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_training_follows_the_serial_run(session, rule, dtype):
    expected = serial_history(dtype, rule)
    train, params, data = start(dtype, rule)
    shared_data = [synk.data(array) for array in data]
    for batch, (serial_loss, serial_params) in zip(batches(), expected):
        got = train(*shared_data, batch=batch)
        close([got, *params], [serial_loss, *serial_params], TOLERANCES[dtype], TOLERANCES[dtype])
    # `close` compares the controller's parameters. The other ranks must have the same.
    assert synk.check_replicas(params) == {}


def test_a_rule_by_its_name(two):
    made = []
    for rule in ("nesterov_momentum", updates.nesterov_momentum):
        for make in (make_train_function, make_train_function_theano):
            loss, params, x, y, data = make_problem("float64")
            train = make(loss, params, x, y, rule, learning_rate=0.1)
            made.append([float(train(*data)) for _ in range(3)])
    np.testing.assert_allclose(made, [made[0]] * 4, rtol=1e-12)


@pytest.mark.parametrize("make", [make_train_function, make_train_function_theano])
def test_unknown_rules_are_refused(two, make):
    loss, params, x, y, _ = make_problem("float64")
    names = "adadelta, adagrad, adam, adamax, momentum, nesterov_momentum, rmsprop, sgd, sgd_nonflat"
    with pytest.raises(ValueError, match=f"^update_rule is 'adams'; expected one of {names}$"):
        make(loss, params, x, y, "adams")
    with pytest.raises(ValueError, match="'apply_momentum'; expected one of"):
        make(loss, params, x, y, "apply_momentum")
    with pytest.raises(TypeError, match=f"^update_rule is 0.1; expected a function, or one of {names}$"):
        make(loss, params, x, y, 0.1)
    takes = r"it takes \(loss_or_grads, params, learning_rate, beta1, beta2, epsilon\)$"
    with pytest.raises(TypeError, match=f"^adam: got an unexpected keyword argument 'lr'; {takes}"):
        make(loss, params, x, y, "adam", lr=0.1)
    with pytest.raises(TypeError, match="sgd: missing a required argument: 'learning_rate'"):
        make(loss, params, x, y, "sgd")


def test_description(two):
    loss, params, x, y, _ = make_problem("float64")
    text = repr(make_train_function(loss, params, x, y, "sgd", 0.1))
    rest = " (avg); 2 ranks>, all-reduce of grad_shared, <synkhronos.Function update() -> nothing; 2 ranks>>"
    assert text.startswith("<synkhronos TrainFunction: <synkhronos.Function gradient(x, y) -> ")
    assert text.endswith(rest)


@pytest.mark.numba
@pytest.mark.parametrize("num_slices", [2, 4])
def test_slicing_changes_nothing(session, num_slices):
    expected = serial_history("float64", "adam")
    train, params, data = start("float64", "adam")
    for batch, (serial_loss, serial_params) in zip(batches(), expected):
        got = train(*data, batch=batch, num_slices=num_slices)
        close([got, *params], [serial_loss, *serial_params], 1e-10, 1e-10)


def test_data_in_shared_variables(session):
    """Training with ``batch_s``, by which each rank selects from its own rows, follows the serial run."""
    loss, params, x, y, data = make_problem("float64")
    serial_loss, serial_params, serial_x, serial_y, _ = make_problem("float64")
    serial = make_train_function_theano(serial_loss, serial_params, serial_x, serial_y, updates.adam)

    grad_updates, param_updates, grad_shared = updates.adam(loss, params)
    parts = [theano.shared(array[:1], name) for array, name in zip(data, ["x_part", "y_part"])]
    gradient = synk.function([], loss, updates=grad_updates, givens=list(zip([x, y], parts)), sliceable_shareds=parts)
    update = synk.function([], updates=param_updates)
    synk.distribute()
    synk.scatter(parts, list(data))
    lengths = synk.get_lengths(parts[1])
    starts = np.cumsum([0, *lengths[:-1]])
    rng = np.random.RandomState(3)
    orders = [rng.permutation(length) for length in lengths]
    for step in range(-(-max(lengths) // 3)):  # in the last steps, some ranks have fewer points, or none
        chosen = [order[3 * step : 3 * step + 3] for order in orders]
        rows = np.concatenate([start + part for start, part in zip(starts, chosen)])
        got = gradient(batch_s=chosen)
        synk.all_reduce(grad_shared, weights=gradient.counts)
        update()
        close([got, *params], [serial(*data, batch=rows), *serial_params], 1e-10, 1e-10)


def test_lists_of_inputs_and_givens(session):
    x1, x2, y = T.dmatrix("x1"), T.dvector("x2"), T.dvector("y")
    factor = T.dscalar("factor")
    rng = np.random.RandomState(4)
    data = [rng.randn(7, 3), rng.randn(7)], rng.randn(7)
    results = []
    for make in (make_train_function_theano, make_train_function):
        w = theano.shared(np.ones(3), "w")
        loss = T.sqr(factor * T.dot(x1, w) + x2 - y).mean()
        two = theano.shared(np.asarray(2.0), "two")
        train = make(loss, [w], [x1, x2], y, updates.sgd, learning_rate=0.1, givens={factor: two})
        results.append([train(*data), train(*data, batch=5), w.get_value()])
        with pytest.raises(TypeError, match="got one value for x_data; expected a list of 2"):
            train(data[0][0], data[1])
    close(results[1], results[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_training_steps_are_not_copied(two, copied):
    loss, params, x, y, _ = make_problem("float64")
    train = make_train_function(loss, params, x, y, updates.sgd, 0.1)
    with pytest.raises(TypeError, match=r"make_train_function.*checkpoint"):
        copied(train)


def test_bad_batch_leaves_the_parameters_alone(session):
    loss, params, x, y, data = make_problem("float64")
    train = make_train_function(loss, params, x, y, updates.sgd, 0.1)
    before = values(params)
    with pytest.raises((IndexError, ValueError)):
        train(*data, batch=[0, N])
    assert all(np.array_equal(a, b) for a, b in zip(before, values(params)))
    train(*data)
    assert not np.array_equal(before[0], params[0].get_value())
