"""Collectives in the graph of a function: values and gradients, compared with the serial program."""

import functools

import numpy as np
import pytest
from backend import T, lasagne, on_theano, theano
from comparison import assert_close, close, shares

import synkhronos as synk
from synkhronos._graph.ops import Collective

N = 11
OPS = {"avg": np.average, "sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


def everywhere(x):
    """Return an output that gathers an expression's value on each rank, along a new first axis."""
    return T.shape_padleft(x), "gather"


# -- values


@functools.cache
def each_op(dtype, ndim):
    x = T.TensorType(dtype, (False,) * ndim)("x")
    ops = [op for op in OPS if not (dtype.startswith("complex") and op in ("max", "min"))]
    return ops, synk.function([x], [everywhere(synk.reduced(x[0], op)) for op in ops])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "uint16", "int64", "bool", "complex64"])
@pytest.mark.parametrize("ndim", [1, 3])
@pytest.mark.parametrize("n", [N, 3])
def test_reductions(session, dtype, ndim, n):
    data = (np.random.RandomState(n).randn(*(n, 2, 3)[:ndim]) * 3).astype(dtype)
    parts = [part for part in shares(n, session) if part[0] < part[1]]
    values, weights = [data[start] for start, _ in parts], [stop - start for start, stop in parts]
    ops, function = each_op(dtype, ndim)
    for op, found in zip(ops, function(data)):
        weighted = {"weights": weights} if op == "avg" else {}
        expected = np.asarray(OPS[op](values, axis=0, **weighted))
        assert found.shape == (len(parts), *data.shape[1:])
        assert all(np.array_equal(one, found[0]) for one in found)
        np.testing.assert_allclose(found[0], expected, rtol={"float16": 2e-2, "float64": 1e-12}.get(dtype, 1e-5))
        assert found.dtype == (expected.dtype if dtype[0] not in "fc" else dtype)


@functools.cache
def gathering(ndim):
    x = T.TensorType("float32", (False,) * ndim)("x")
    return synk.function([x], [(synk.gathered(x), None), (synk.gathered(x[0]), None), (synk.gathered(x[1:]), None)])


@pytest.mark.numba
@pytest.mark.parametrize("n", [N, 3])
def test_gathered(session, n):
    data = np.random.RandomState(n).randn(n, 2).astype("float32")
    parts = [data[start:stop] for start, stop in shares(n, session) if start < stop]
    every, firsts, rest = gathering(2)(data)
    np.testing.assert_array_equal(every, data)
    np.testing.assert_array_equal(firsts, np.concatenate([part[0] for part in parts]))
    np.testing.assert_array_equal(rest, np.concatenate([part[1:] for part in parts]))  # some ranks have no rows here
    every, firsts, _ = gathering(1)(data[:, 0])
    np.testing.assert_array_equal(every, data[:, 0])
    np.testing.assert_array_equal(firsts, [part[0, 0] for part in parts])  # a scalar is gathered as a row


@functools.cache
def odd_ones():
    x = T.fmatrix("x")
    strided, column = x.T[::2], x.mean(axis=1, keepdims=True)[:1]
    large = T.outer(T.arange(200), x[0])
    outputs = [synk.summed(x[:0]), synk.summed(strided[:, :1]), synk.averaged(column), synk.averaged(large)]
    assert [one.broadcastable for one in outputs] == [(False, False)] * 2 + [(False, True), (False, False)]
    return synk.function([x], [(one, None) for one in outputs])


def test_empty_strided_broadcastable_and_large_arrays(session):
    data = np.random.RandomState(5).randn(N, 150).astype("float32")
    firsts = [data[start] for start, _ in shares(N, session)]
    counts = [stop - start for start, stop in shares(N, session)]
    empty, strided, column, large = odd_ones()(data)
    assert empty.shape == (0, 150)
    assert_close(strided, np.sum(firsts, axis=0)[::2, None], 1e-5, 1e-5)
    assert_close(column, np.average([[[one.mean()]] for one in firsts], axis=0, weights=counts), 1e-5, 1e-6)
    assert_close(large, np.outer(np.arange(200), np.average(firsts, axis=0, weights=counts)), 1e-5, 1e-4)


# -- gradients


def of_averaged(x, w):
    mean = synk.averaged(T.tanh(x * w).mean(axis=0))
    return T.sqr(mean).sum()


def of_averaged_in_rows(x, w):
    h = T.tanh(x * w)
    mean = synk.averaged(h.mean(axis=0))
    deviation = T.sqrt(synk.averaged(T.sqr(h - mean).mean(axis=0)) + 0.1)
    return T.sqr((h - mean) / deviation - x[:, ::-1]).mean()  # each rank has its own cost


def of_summed(x, w):
    return T.tanh(synk.summed((x * w).sum(axis=0))).sum()


def of_summed_in_rows(x, w):
    return T.sqr(x * w - synk.summed(T.sqr(x * w).sum(axis=0))).mean()


def of_max(x, w):
    return T.sqr(synk.reduced((x * w).max(axis=0), "max")).sum() + synk.reduced(T.sin(x * w).min(), "min")


def of_prod(x, w):
    return T.sqr(synk.reduced((x * w).prod(axis=0), "prod")).sum()


def of_prod_with_zeros(x, w):
    limits = [synk.reduced(x[:, 2].min(), "min"), synk.reduced(x[:, 2].max(), "max"), T.constant(-10.0)]
    zero = w[1] + 0.4  # 0 at the point of differentiation
    factors = [x[:, 2] * w[2] * T.switch(x[:, 2] <= limit, zero, 1) for limit in limits]  # zeros in 1, n, 0 rows
    products = [(T.concatenate([T.ones(1), one])).prod() for one in factors]  # Theano is wrong for a single 0
    return T.sin(synk.reduced(T.stack(products), "prod") * [1, 2, 3]).sum()


def of_gathered(x, w):
    h = synk.gathered(T.tanh(x * w))
    return T.sqr(T.dot(h, h.T)).sum()  # over all pairs of rows


def of_gathered_in_rows(x, w):
    h = T.tanh(x * w)
    return T.sqr(T.dot(h, synk.gathered(h).T).sum(axis=1)).mean()


COSTS = [of_averaged, of_averaged_in_rows, of_summed, of_summed_in_rows, of_max, of_prod, of_prod_with_zeros]
COSTS += [of_gathered, of_gathered_in_rows]


@functools.cache
def cost_and_gradient(make):
    x, w = T.dmatrix("x"), theano.shared(np.zeros(3), "w")
    cost = make(x, w)
    grad = synk.averaged(T.grad(cost, w))
    return w, synk.function([x], [cost, everywhere(grad)])


@pytest.mark.parametrize("n", [N, 3])
@pytest.mark.parametrize("make", COSTS, ids=lambda make: make.__name__)
def test_gradients_are_those_of_the_serial_program(session, make, n):
    w, function = cost_and_gradient(make)
    data, at = np.random.RandomState(n).randn(n, 3), np.array([0.7, -0.4, 1.3])
    synk.broadcast(w, at)
    cost, grads = function(data)
    serial_cost, (serial_grad,) = function.as_theano(data)
    close(cost, serial_cost)
    assert all(np.array_equal(grad, grads[0]) for grad in grads)
    close(grads[0], serial_grad)
    for i in range(3):
        step = 1e-6 * (np.arange(3) == i)
        w.set_value(at + step)
        above = function.as_theano(data)[0]
        w.set_value(at - step)
        close(grads[0, i], (above - function.as_theano(data)[0]) / 2e-6, rtol=2e-5)


def test_integer_gradients_and_tangents():
    i = T.lvector("i")
    assert T.grad(synk.summed(i.astype("float64").sum()), i, disconnected_inputs="ignore").ndim == 1
    x = T.dvector("x")
    tangent = T.Rop(synk.averaged(x * 2), x, T.ones_like(x))
    np.testing.assert_array_equal(tangent.eval({x: np.zeros(3)}), [2, 2, 2])
    if on_theano:
        with pytest.raises(NotImplementedError, match="'prod'"):
            T.Rop(synk.reduced(x, "prod"), x, T.ones_like(x))
    else:  # PyTensor derives tangents from gradients of gradients
        tangent = T.Rop(synk.reduced(x, "prod"), x, T.ones_like(x))
        np.testing.assert_array_equal(tangent.eval({x: np.arange(3.0)}), [1, 1, 1])


def test_a_collective_without_a_gradient_raises_an_error():
    x = T.dvector("x")
    with pytest.raises(NotImplementedError, match="'broadcast' has no gradient"):
        T.grad(Collective(("broadcast",))(x).sum(), x)


# -- training


class Network:
    """An MLP with batch normalisation over the full minibatch, its loss and its updates."""

    def __init__(self, rule, averaged):
        rng = np.random.RandomState(4)
        self.x, self.y = T.dmatrix("x"), T.ivector("y")
        self.params = [theano.shared(rng.randn(*shape) * 0.3) for shape in ((5, 8), (8, 3), (3,))]
        hidden = T.dot(self.x, self.params[0])
        mean = averaged(hidden.mean(axis=0))
        hidden = T.nnet.relu((hidden - mean) / T.sqrt(averaged(T.sqr(hidden - mean).mean(axis=0)) + 1e-4))
        probabilities = T.nnet.softmax(T.dot(hidden, self.params[1]) + self.params[2])
        self.loss = T.nnet.categorical_crossentropy(probabilities, self.y).mean()
        grads = [averaged(grad) for grad in T.grad(self.loss, self.params)]
        grads = lasagne.updates.total_norm_constraint(grads, 0.5)
        self.updates = rule(grads, self.params)


RULES = {
    "adam": functools.partial(lasagne.updates.adam, learning_rate=0.02),
    "momentum": functools.partial(lasagne.updates.momentum, learning_rate=0.05),
}


def network_data(n):
    rng = np.random.RandomState(6)
    return rng.randn(n, 5), rng.randint(0, 3, n).astype("int32")


@functools.cache
def serial_training(rule, n):
    model = Network(RULES[rule], lambda x: x)
    step = theano.function([model.x, model.y], model.loss, updates=model.updates)
    return [step(*network_data(n)) for _ in range(20)], [var.get_value() for var in model.updates]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [37, 4])
def test_unmodified_optimisers_of_lasagne(session, rule, n):
    model = Network(RULES[rule], synk.averaged)
    step = synk.function([model.x, model.y], model.loss, updates=model.updates)
    expected, values = serial_training(rule, n)
    close([step(*network_data(n)) for _ in range(20)], expected)
    close(list(model.updates), values)
    assert synk.check_replicas(list(model.updates)) == {}  # bitwise, also on ranks without data points


# -- calls in slices


@pytest.mark.parametrize("n", [37, 4])
@pytest.mark.parametrize("num_slices", [2, 100])
def test_a_step_in_slices_is_the_full_step(session, num_slices, n):
    x, y, w, v = T.dmatrix("x"), T.dvector("y"), theano.shared(np.zeros(5), "w"), theano.shared(np.zeros(()), "v")
    seen, most = theano.shared(np.zeros(5), "seen"), theano.shared(np.zeros(5), "most")
    errors = T.tanh(T.dot(x, w) + v) - y
    loss = T.sqr(errors).mean()
    grads = [synk.averaged(grad) for grad in T.grad(loss, [w, v])]
    updates = list(lasagne.updates.adam(grads, [w, v], 0.1).items())
    updates += [(seen, x.sum(axis=0), "sum"), (most, synk.reduced(x.max(axis=0), "max"))]
    outputs = [loss, (errors, "gather"), (synk.averaged(loss), None), (synk.gathered(errors), None)]
    outputs += [(synk.summed((x > 0).sum()), None), ((x > 0).sum(), "sum"), (synk.reduced(x.min(), "min"), None)]
    function = synk.function([x, y], outputs, updates=updates)
    replicated = [var for var, *_ in updates if var is not seen]
    data = network_data(n)
    expected = []
    for slices in (1, num_slices):
        for var, *_ in updates:
            synk.broadcast(var, np.zeros_like(var.get_value()))
        for _ in range(4):
            found = function(*data, num_slices=slices)
        found += [function(*data, num_slices=slices, output_subset=[2, 1])[1]]
        found += [var.get_value() for var in replicated] + [synk.gather(seen)]
        assert synk.check_replicas(replicated) == {}
        if expected:
            close(found, expected)
        expected = found
    serial = function.as_theano(*data)
    assert [np.shape(one) for one in found[:7]] == [np.shape(one) for one in serial]


def test_values_without_data_points_are_not_sliced(session):
    x, w, u = T.dmatrix("x"), theano.shared(np.arange(1.0, 4.0), "w"), theano.shared(np.zeros(3), "u")
    norm = synk.summed(T.sqr(w).sum())
    grad = T.grad(norm, w)  # with the weight of a rank, not of a slice
    outputs = [(norm, None), (grad, "avg"), (synk.averaged(T.grad(T.sqr(norm), w)), None)]
    outputs += [(synk.summed(synk.averaged(x.mean())), None), (x.sum(), "sum")]
    function = synk.function([x], outputs, updates=[(u, grad)])
    for n in (N, 2):
        data, present = np.arange(3.0 * n).reshape(n, 3), min(n, session)
        values = w.get_value()
        total = present * 14
        expected = [total, 2 * present * values, 4 * total * present * values, present * data.mean(), data.sum()]
        for num_slices in (1, 2, 3):
            close(function(data, num_slices=num_slices), expected)
            weights = [n / count for count in function.counts if count]
            close(synk.gather(u, nd_up=1)[:present], [2 * weight * values for weight in weights])
    with pytest.raises(ValueError, match="needs data points and the result of another"):
        synk.function([x], synk.averaged(T.sqr(x - norm).mean()))(np.ones((8, 3)), num_slices=2)


def test_slices_that_depend_on_other_slices_are_refused(session):
    x = T.dmatrix("x")
    mean = synk.averaged(x.mean(axis=0))
    for output, message in (
        ((x - mean).sum(), "output 0 of the function needs data points and the result of a collective"),
        (synk.averaged(T.sqr(x - mean).mean()), "needs data points and the result of another"),
        (theano.scan(lambda s: synk.averaged(s), outputs_info=x.sum(), n_steps=2)[0][-1], "in a loop"),
    ):
        function = synk.function([x], output)
        with pytest.raises(ValueError, match=message):
            function(np.ones((8, 2)), num_slices=2)
        function(np.ones((8, 2)))
