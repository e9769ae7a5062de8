"""The update rules, compared with Lasagne's in plain Theano, without ranks."""

from collections import OrderedDict

import numpy as np
import pytest
from backend import T, theano, theano_only

from synkhronos.extensions import updates

STEPS = 6
MODE = theano.Mode(linker="py", optimizer="fast_compile")  # the C code of 100 graphs takes minutes
RULES = {
    "sgd": {"learning_rate": 0.1},
    "sgd_nonflat": {"learning_rate": 0.1},
    "momentum": {"learning_rate": 0.1, "momentum": 0.8},
    "nesterov_momentum": {"learning_rate": 0.1, "momentum": 0.8},
    "adagrad": {"learning_rate": 0.3, "epsilon": 1e-5},
    "rmsprop": {"learning_rate": 0.05, "rho": 0.8, "epsilon": 1e-5},
    "adadelta": {"learning_rate": 1.5, "rho": 0.9, "epsilon": 1e-5},
    "adam": {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-7},
    "adamax": {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-7},
}
NEEDS_RATE = {"sgd", "sgd_nonflat", "momentum", "nesterov_momentum"}


def make_params(dtype):
    """Make a matrix, a row that broadcasts, an array with an axis of length 1, and a scalar."""
    rng = np.random.RandomState(1)
    return [
        theano.shared(rng.randn(4, 3).astype(dtype), "W"),
        theano.shared(rng.randn(1, 3).astype(dtype), "row", broadcastable=(True, False)),
        theano.shared(rng.randn(2, 1, 3).astype(dtype), "C"),
        theano.shared(np.asarray(0.5, dtype), "scale"),
    ]


def make_loss(params, dtype):
    weights, row, cube, scale = params
    data = np.random.RandomState(2).randn(5, 4).astype(dtype)
    hidden = T.tanh(T.dot(data, weights) + row)
    return (scale * hidden**2).mean() + (cube**2).sum() + scale**4


def train(divided, params, steps=STEPS):
    """Train with the gradient and parameter updates, or one of them; return all parameters after each step."""
    functions = [theano.function([], updates=one, mode=MODE) for one in divided[:2]]
    history = []
    for _ in range(steps):
        for function in functions:
            function()
        history.append([p.get_value() for p in params])
    return history


def adamax_reference(loss, params, learning_rate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """Return Adamax's updates (section 7.1 of arXiv:1412.6980), which Lasagne 0.1 does not have."""
    result, t = OrderedDict(), theano.shared(np.asarray(0.0, theano.config.floatX))
    result[t] = t + 1
    for p, g in zip(params, theano.grad(loss, params)):
        zeros = np.zeros_like(p.get_value())
        m, u = (theano.shared(zeros, broadcastable=p.broadcastable) for _ in range(2))
        result[m] = beta1 * m + (1 - beta1) * g
        result[u] = T.maximum(beta2 * u, abs(g))
        result[p] = p - learning_rate / (1 - beta1 ** (t + 1)) * result[m] / (result[u] + epsilon)
    return result


def reference(name):
    from lasagne import updates as lasagne_updates

    return getattr(lasagne_updates, "sgd" if name == "sgd_nonflat" else name, globals().get(f"{name}_reference"))


def assert_equal_histories(got, expected, dtype):
    rtol = 1e-10 if dtype == "float64" else 2e-5
    for step, (ours, theirs) in enumerate(zip(got, expected)):
        for index, (a, b) in enumerate(zip(ours, theirs)):
            assert a.dtype == dtype
            where = f"step {step}, parameter {index}"
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=where)


@pytest.fixture(params=["float64", "float32"])
def dtype(request):
    """Yield each dtype, set as floatX, because Lasagne requires it of parameters."""
    before = theano.config.floatX
    theano.config.floatX = request.param
    yield request.param
    theano.config.floatX = before


def test_all_rules_are_public():
    applied = {"apply_momentum", "apply_nesterov_momentum"}
    assert set(updates.__all__) == set(RULES) | applied


@theano_only("Lasagne, whose numbers they are compared with")
@pytest.mark.parametrize("defaults", [False, True], ids=["arguments", "defaults"])
@pytest.mark.parametrize("name", sorted(RULES))
def test_rule_equals_lasagnes(name, defaults, dtype):
    arguments = dict(RULES[name])
    if defaults:
        arguments = {k: v for k, v in arguments.items() if name in NEEDS_RATE and k[0] == "l"}
    serial, ours = make_params(dtype), make_params(dtype)
    expected = train([reference(name)(make_loss(serial, dtype), serial, **arguments)], serial)
    got = train(getattr(updates, name)(make_loss(ours, dtype), ours, **arguments), ours)
    assert_equal_histories(got, expected, dtype)


@theano_only("Lasagne, whose numbers they are compared with")
@pytest.mark.parametrize("name", ["apply_momentum", "apply_nesterov_momentum"])
@pytest.mark.parametrize("rule", ["sgd", "rmsprop"])
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_momentum_added_to_a_rule(name, rule, some, dtype):
    serial, ours = make_params(dtype), make_params(dtype)
    chosen = slice(1, 3) if some else slice(0, 4)
    their_updates = reference(rule)(make_loss(serial, dtype), serial, 0.01)
    their_updates = reference(name)(their_updates, serial[chosen], momentum=0.7)
    grads, params, flat = getattr(updates, rule)(make_loss(ours, dtype), ours, 0.01)
    before = dict(params)
    with_momentum = getattr(updates, name)(params, ours[chosen], momentum=0.7)
    assert dict(params) == before
    assert_equal_histories(train((grads, with_momentum, flat), ours), train([their_updates], serial), dtype)


@theano_only("Lasagne, whose numbers they are compared with")
@pytest.mark.parametrize("name", ["apply_momentum", "apply_nesterov_momentum"])
def test_momentum_added_to_everything_that_a_rule_changes(name, dtype):
    serial, ours = make_params(dtype), make_params(dtype)
    theirs = reference(name)(reference("adagrad")(make_loss(serial, dtype), serial, 0.01))
    grads, params, flat = updates.adagrad(make_loss(ours, dtype), ours, 0.01)
    got = train((grads, getattr(updates, name)(params), flat), ours)
    assert_equal_histories(got, train([theirs], serial), dtype)


def test_gradients_lie_in_one_vector_in_order():
    params = make_params("float64")
    loss = make_loss(params, "float64")
    grad_updates, param_updates, grad_shared = updates.sgd(loss, params, 0.5)
    assert list(grad_updates) == [grad_shared] and list(param_updates) == params
    grads = theano.grad(loss, params)
    gradient = theano.function([], grads, updates=grad_updates, mode=MODE)
    expected = np.concatenate([g.ravel() for g in gradient()])
    assert grad_shared.ndim == 1 and grad_shared.dtype == "float64"
    np.testing.assert_array_equal(grad_shared.get_value(), expected)


def test_nonflat_keeps_a_gradient_for_each_parameter():
    params = make_params("float32")
    params[0] = theano.shared(params[0].get_value().astype("float64"), "W64")
    grad_updates, _, grad_shared = updates.sgd_nonflat(make_loss(params, "float64"), params, 0.5)
    assert list(grad_updates) == grad_shared
    assert [g.type for g in grad_shared] == [p.type for p in params]


def test_list_of_gradient_expressions():
    from_loss, from_grads = make_params("float64"), make_params("float64")
    expected = train(updates.adam(make_loss(from_loss, "float64"), from_loss), from_loss)
    grads = theano.grad(make_loss(from_grads, "float64"), from_grads)
    got = train(updates.adam(grads, from_grads), from_grads)
    assert_equal_histories(got, expected, "float64")


def test_dtype_may_differ_from_floatx(dtype):
    other = {"float32": "float64", "float64": "float32"}[dtype]
    for name, arguments in RULES.items():
        params = make_params(other)
        train(getattr(updates, name)(make_loss(params, other), params, **arguments), params, 1)


def test_learning_rate_may_be_shared():
    rate = theano.shared(np.asarray(0.1, "float64"), "learning_rate")
    params, fixed = make_params("float64"), make_params("float64")
    divided = updates.nesterov_momentum(make_loss(params, "float64"), params, rate)
    expected = updates.nesterov_momentum(make_loss(fixed, "float64"), fixed, 0.1)
    assert_equal_histories(train(divided, params), train(expected, fixed), "float64")
    rate.set_value(0.0)
    before = params[0].get_value()
    updates_of_rate_0 = updates.sgd(make_loss(params, "float64"), params, rate)
    np.testing.assert_array_equal(train(updates_of_rate_0, params)[-1][0], before)


def test_errors_say_what_to_do():
    params = make_params("float64")
    loss = make_loss(params, "float64")
    with pytest.raises(ValueError, match="params is empty"):
        updates.sgd(loss, [], 0.1)
    with pytest.raises(TypeError, match=r"params has 'W'; expected .* shared variables"):
        updates.adam(loss, ["W"])
    with pytest.raises(ValueError, match="got 2 gradients for 4 parameters"):
        updates.sgd(theano.grad(loss, params[:2]), params, 0.1)
    mixed = [*params, theano.shared(np.float32(1), "narrow")]
    with pytest.raises(TypeError, match=r"W is float64.*narrow is float32.*use sgd_nonflat"):
        updates.momentum(loss, mixed, 0.1)
    with pytest.raises(TypeError, match=r"gradient of scale is float32; expected"):
        updates.sgd([p.astype("float32") for p in params[3:]], params[3:], 0.1)
    with pytest.raises(ValueError, match="params has row, which is not in updates"):
        updates.apply_momentum({params[0]: params[0] * 2}, [params[1]])
