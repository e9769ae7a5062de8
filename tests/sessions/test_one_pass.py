"""Updates in one pass: exact functions have the values of Theano's separate passes."""

import logging
import pickle

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import lasagne, theano_only
from scripts import run_script

import synkhronos as synk
from synkhronos.extensions.train import make_train_function

pytestmark = theano_only("updates in one pass")

SHAPES = (60, 70), (70,), (70, 3), (3,)
RULES = {
    "momentum": lambda loss, params: lasagne.updates.momentum(loss, params, 0.1),
    "nesterov": lambda loss, params: lasagne.updates.nesterov_momentum(loss, params, 0.1),
    "adagrad": lambda loss, params: lasagne.updates.adagrad(loss, params, 0.1),
    "rmsprop": lambda loss, params: lasagne.updates.rmsprop(loss, params, 0.01),
    "adadelta": lasagne.updates.adadelta,
    "adam": lasagne.updates.adam,
    "weight decay": lambda loss, params: lasagne.updates.adam(loss + sum((p**2).sum() for p in params), params),
    "clipped norm": lambda loss, params: lasagne.updates.adam(
        lasagne.updates.total_norm_constraint(T.grad(loss, params), 0.1), params
    ),
    "averages": lambda loss, params: with_averages(lasagne.updates.adam(loss, params), params),
}


def with_averages(updates, params):
    for param in params:
        average = theano.shared(param.get_value(), f"average of {param}")
        updates[average] = 0.99 * average + 0.01 * updates[param]
    return updates


def passes(function):
    """Return the operations of a function that compute updates in one pass."""
    nodes = function.maker.fgraph.toposort()
    return [node.op for node in nodes if isinstance(node.op, T.elemwise.OnePass)]


def compiled(function):
    """Return the compiled function that computes a call."""
    return function._theano if function.plan != "controller" else function._user.compile()


@pytest.mark.parametrize("rule", RULES)
def test_rules_update_as_theano_does_and_each_parameter_in_one_pass(two, rule):
    rng = np.random.RandomState(0)
    initial = [rng.randn(*shape) * 0.1 for shape in SHAPES]
    data = [(rng.randn(20, 60), rng.randint(0, 3, 20).astype("int32")) for _ in range(3)]
    results = {}
    for plan in (None, "rows", "controller"):
        x, y = T.dmatrix("x"), T.ivector("y")
        params = [theano.shared(value) for value in initial]
        scores = T.nnet.softmax(T.tanh(x.dot(params[0]) + params[1]).dot(params[2]) + params[3])
        loss = T.nnet.categorical_crossentropy(scores, y).mean()
        updates = RULES[rule](loss, params)
        if plan is None:
            step = theano.function([x, y], loss, updates=updates)
        else:
            step = synk.function([x, y], loss, updates=updates, exact=True, plan=plan)
            assert len(passes(compiled(step))) == len(params)
            n_states = sum(var.ndim > 0 for var in updates)
            assert sum(len(op.over) for op in passes(compiled(step))) == n_states
        losses = [step(*batch) for batch in data]
        results[plan] = losses, [var.get_value() for var in updates]
    for plan in ("rows", "controller"):
        for one, other in zip(results[plan][0], results[None][0]):
            np.testing.assert_allclose(one, other, rtol=1e-10)
        for one, other in zip(results[plan][1], results[None][1]):
            np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-12)
    assert not synk.check_replicas()


def test_train_functions(two):
    rng = np.random.RandomState(0)
    given = rng.randn(30, 8), rng.randn(30)
    values = []
    for exact in (True, False):
        x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.full((8, 5), 0.1))
        loss = T.sqr(T.tanh(x.dot(w)).sum(axis=1) - y).mean()
        step = make_train_function(loss, [w], x, y, "adam", 0.01, exact=exact)
        for _ in range(3):
            step(*given)
        values.append(w.get_value())
    np.testing.assert_allclose(*values, rtol=1e-9)


LAYOUTS = {
    "C order": lambda value: value,
    "Fortran order": np.asfortranarray,
    "transposed": lambda value: value.T.copy().T,
    "strided": lambda value: np.repeat(value, 2, axis=1)[:, ::2],
    "reversed": lambda value: value[::-1].copy()[::-1],
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 700), (1, 1), (0, 4), (1025, 1), (2, 1024)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layouts_and_shapes(two, layout, shape, dtype):
    function, variables = two_updates(dtype)
    old = [np.random.RandomState(i).randn(*shape).astype(dtype) for i in range(3)]
    for var, value in zip(variables, old):
        var.set_value(LAYOUTS[layout](value.copy()), borrow=True)
    (total,) = function(np.array(2, dtype))
    a, b, c = old
    expected = [2 * a - c, a + 0.5 * b + (2 * a - c), c]
    for var, value in zip(variables, expected):
        np.testing.assert_allclose(var.get_value(), value, rtol=1e-4, atol=1e-5)
        assert var.get_value(borrow=True).dtype == dtype
    np.testing.assert_allclose(total, (a * 1.5).sum(), rtol=1e-3, atol=1e-4)


_functions = {}


THREADS = """
import numpy as np, theano, threadpoolctl
import theano.tensor as T
import synkhronos as synk

with threadpoolctl.threadpool_limits(5):
    synk.fork(2, use_gpu=False)
    for size in (65_535, 65_536, 200_001, 1_000_000):
        a, b = (theano.shared(np.random.RandomState(i).randn(size).astype("float32")) for i in range(2))
        g, rate = T.fvector("g"), T.fscalar("rate")
        updates = [(b, 0.5 * b + g), (a, a - rate * (0.5 * b + g) / (T.sqrt(T.sqr(b)) + 1))]
        given = np.random.RandomState(2).randn(size).astype("float32"), np.float32(0.1)
        before = [var.get_value() for var in (a, b)]
        results = []
        for plan in ("rows", "controller"):  # on one thread, and on five
            synk.function([], [], [g, rate], updates=updates, exact=True, plan=plan)(*given)
            results.append([var.get_value() for var in (a, b)])
            for var, value in zip((a, b), before):
                var.set_value(value)
        np.testing.assert_array_equal(*results)
        theano.function([g, rate], [], updates=updates)(*given)
        for var, value in zip((a, b), results[1]):
            np.testing.assert_allclose(value, var.get_value(), 1e-5, 1e-6)
synk.close()
print("done")
"""


def test_threads_of_the_controller_divide_large_updates():
    out, _ = run_script(THREADS)
    assert out == "done\n"


def two_updates(dtype):
    """Return a function whose second update reads the old value of the first one, which it overwrites."""
    if dtype not in _functions:
        a, b, c = (theano.shared(np.zeros((1, 1), dtype), name, broadcastable=(False,) * 2) for name in "abc")
        factor = T.TensorType(dtype, ())("factor")
        first = factor * a - c
        updates = [(a, first), (b, a + np.asarray(0.5, dtype) * b + first)]
        function = synk.function(
            [], [(a * np.asarray(1.5, dtype)).sum()], [factor], updates, exact=True, plan="controller"
        )
        assert len(passes(compiled(function))) == 1
        _functions[dtype] = function, (a, b, c)
    return _functions[dtype]


def test_updates_that_are_not_elementwise_stay_as_they_are(two):
    a, b = (theano.shared(np.random.RandomState(i).randn(4, 4)) for i in range(2))
    count = theano.shared(0.0)
    first = 0.5 * a + b
    for second, n in (
        (b * T.sqr(first).sum(), 0),  # depends on the first update by an operation that is not elementwise
        (T.dot(first, b), 0),
        (b - first.mean(axis=0), 0),
        (b[::-1] + first, 1),  # reads the old value by a view
    ):
        old = [var.get_value() for var in (a, b)]
        reference = theano.function([], [0.5 * a + b, second])
        expected = reference()
        function = synk.function([], [], updates=[(a, first), (b, second), (count, count + 1)], exact=True)
        assert len(passes(compiled(function))) == n
        function()
        for var, value, before in zip((a, b), expected, old):
            np.testing.assert_allclose(var.get_value(), value, rtol=1e-12)
            var.set_value(before)


def test_one_update_and_unoptimized_modes_are_left_to_theano(two):
    a, b = theano.shared(np.ones((2, 3))), theano.shared(np.ones((2, 3)))
    both = [(a, a + b), (b, a + b - 1)]
    mode = theano.compile.get_default_mode()
    for updates, options, n in (
        (both[:1], {}, 0),
        (both, {}, 1),
        (both, {"mode": "FAST_COMPILE"}, 0),
        (both, {"mode": mode.excluding("fusion")}, 0),
        (both, {"mode": theano.Mode("py", "fast_run")}, 1),
        (both, {"mode": mode.excluding("inplace")}, 1),
    ):
        a.set_value(np.full((2, 3), 2.0))
        b.set_value(np.full((2, 3), 5.0))
        function = synk.function([], [], updates=updates, exact=True, **options)
        function()
        assert len(passes(compiled(function))) == n
        np.testing.assert_equal(a.get_value(), np.full((2, 3), 7.0))
        np.testing.assert_equal(b.get_value(), np.full((2, 3), 6.0 if len(updates) == 2 else 5.0))
    assert not passes(theano.function([], [], updates=both))
    with theano.configparser.change_flags(**{"synkhronos.one_pass": False}):
        assert not passes(compiled(synk.function([], [], updates=both, exact=True)))


def test_groups_around_an_operation_that_works_in_place(two, caplog):
    x, y = T.dmatrix("x"), T.dmatrix("y")
    a, b, c = (theano.shared(np.random.RandomState(i).randn(4, 4)) for i in range(3))
    # the new value of `a` is a product added to the old one, in its memory; so `b` must read the old one before
    new = a - 0.1 * T.dot(x, y)
    updates = [(a, new), (b, 0.9 * b + a), (c, c + (0.9 * b + a) * new)]
    given = np.random.RandomState(3).randn(2, 4, 4)
    expected = theano.function([x, y], [value for _, value in updates])(*given)
    for plan in ("rows", "controller"):
        old = [var.get_value() for var in (a, b, c)]
        synk.function([], [], [x, y], updates=updates, exact=True, plan=plan)(*given)
        for var, value, before in zip((a, b, c), expected, old):
            np.testing.assert_allclose(var.get_value(), value, rtol=1e-10)
            var.set_value(before)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_groups_have_few_operations(two):
    gradient = theano.shared(np.ones((2, 3)))
    variables = [theano.shared(np.zeros((2, 3))) for _ in range(30)]
    updates = [(var, 0.5 * var + i * gradient) for i, var in enumerate(variables)]
    function = synk.function([], [], updates=updates, exact=True)
    assert {len(op.steps) <= 12 for op in passes(compiled(function))} == {True}
    function()
    function()
    for i, var in enumerate(variables):
        np.testing.assert_allclose(var.get_value(), np.full((2, 3), 1.5 * i))


def test_lengths_that_differ_are_an_error_and_change_nothing(two):
    function, variables = two_updates("float64")
    values = np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 4))
    for var, value in zip(variables, values):
        var.set_value(value)
    with pytest.raises(synk.WorkerError, match="Input dimension mis-match"):
        function(2.0)
    for var, value in zip(variables, values):
        np.testing.assert_equal(var.get_value(), value)


def test_the_operation_is_pickled():
    node = T.dmatrix() + T.dmatrix()
    op = T.elemwise.OnePass(((node.owner.op, (0, 1)), (node.owner.op, (0, 2))), (0, 1), ((0, 0),))
    again = pickle.loads(pickle.dumps(op))
    assert again == op
    assert again.destroy_map == {0: [0]}
