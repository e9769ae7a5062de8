"""Recurrent networks as exact functions on real ranks, compared with serial training."""

import functools
from collections import OrderedDict

import numpy as np
import pytest
from backend import MRG_RandomStreams, T, ifelse, lasagne, theano, theano_only
from comparison import assert_close, close

import synkhronos as synk

STEPS, FEATURES, UNITS, CLASSES, WORDS = 6, 4, 5, 3, 9


def shared(rng, *shape):
    return theano.shared(rng.randn(*shape) * 0.4)


def trained(loss, params, outputs, inputs):
    return inputs, [loss, *outputs], lasagne.updates.adam(T.grad(loss, params), params, 0.02)


def classified(h, y, rng):
    """Return the loss of the last state, its parameters, and the probabilities."""
    w, b = shared(rng, UNITS, CLASSES), shared(rng, CLASSES)
    out = T.nnet.softmax(h.dot(w) + b)
    return T.nnet.categorical_crossentropy(out, y).mean(), [w, b], out


def rnn(rng):
    """Build a tanh RNN over a time-major sequence, with a loss in each step."""
    x, y = T.dtensor3("x"), T.ivector("y")
    u, v, c = shared(rng, FEATURES, UNITS), shared(rng, UNITS, UNITS), shared(rng, UNITS)

    def step(row, h):
        h = T.tanh(row.dot(u) + h.dot(v) + c)
        return h, (h**2).sum(1).mean()

    (h, sizes), _ = theano.scan(step, x.dimshuffle(1, 0, 2), [T.zeros((x.shape[0], UNITS)), None])
    loss, params, out = classified(h[-1], y, rng)
    return trained(loss + 0.01 * sizes.sum(), [u, v, c, *params], [out, h.dimshuffle(1, 0, 2)], [x, y])


def lasagne_net(layer, **options):
    def build(rng):
        lasagne.random.set_rng(rng)
        x, y, mask = T.dtensor3("x"), T.ivector("y"), T.dmatrix("mask")
        given = lasagne.layers.InputLayer((None, None, FEATURES), x), lasagne.layers.InputLayer((None, None), mask)
        net = getattr(lasagne.layers, layer)(given[0], UNITS, mask_input=given[1], learn_init=True, **options)
        last, softmax = lasagne.layers.SliceLayer(net, -1, 1), lasagne.nonlinearities.softmax
        net = lasagne.layers.DenseLayer(last, CLASSES, nonlinearity=softmax)
        out = lasagne.layers.get_output(net)
        loss = T.nnet.categorical_crossentropy(out, y).mean()
        return trained(loss, lasagne.layers.get_all_params(net, trainable=True), [out], [x, y, mask])

    return build


def lstm(rng):
    """Build an LSTM with all gates in one product, states that a mask freezes, and a mean of unmasked states."""
    ids, mask, y = T.imatrix("ids"), T.dmatrix("mask"), T.ivector("y")
    table = shared(rng, WORDS, FEATURES)
    w, u, b = shared(rng, FEATURES, 4 * UNITS), shared(rng, UNITS, 4 * UNITS), shared(rng, 4 * UNITS)
    words, masks = ids.T, mask.T
    embedded = table[words.flatten()].reshape((words.shape[0], words.shape[1], FEATURES))

    def gate(h, i):
        return h[:, i * UNITS : (i + 1) * UNITS]

    def step(m, row, h, c):
        gates = h.dot(u) + row
        i, f, o = (T.nnet.sigmoid(gate(gates, k)) for k in range(3))
        new = f * c + i * T.tanh(gate(gates, 3))
        new = m[:, None] * new + (1.0 - m)[:, None] * c
        out = o * T.tanh(new)
        return m[:, None] * out + (1.0 - m)[:, None] * h, new

    zeros = T.alloc(np.float64(0.0), words.shape[1], UNITS)
    (h, _), _ = theano.scan(step, [masks, embedded.dot(w) + b], [zeros, zeros], n_steps=words.shape[0])
    mean = (h * masks[:, :, None]).sum(0) / masks.sum(0)[:, None]
    loss, params, out = classified(mean, y, rng)
    loss = loss + 1e-3 * (params[0] ** 2).sum()
    return trained(loss, [table, w, u, b, *params], [out, out.argmax(1)], [ids, mask, y])


def until(rng):
    """Build a loop that ends when the mean of all squared states is small."""
    x, w = T.dmatrix("x"), shared(rng, FEATURES, FEATURES)

    def step(h):
        h = T.tanh(h.dot(w))
        return h, theano.scan_module.until((h**2).mean() < 0.05)

    h, _ = theano.scan(step, outputs_info=x, n_steps=20)
    return trained((h[-1] ** 2).sum() + h.mean(), [w], [h[-1], h.shape[0]], [x])


def branching(rng):
    """Build a loop whose steps use dropout, an inner graph and a branch, and update a shared variable."""
    x, u, count = T.dtensor3("x"), shared(rng, FEATURES, FEATURES), theano.shared(np.zeros(FEATURES))
    a, b = T.dmatrices("ab")
    layer = theano.OpFromGraph([a, b], [T.tanh(a.dot(b)), a.mean(0)])
    streams = MRG_RandomStreams(5)

    def step(row, h):
        kept = streams.binomial(size=h.shape, p=0.7, dtype="float64")
        new, mean = layer(row + h, u)
        new = ifelse(T.gt((h**2).mean(), 0.2), h - h.mean(0), (new + 0.1 * mean) * kept)
        return new, OrderedDict([(count, count + row.sum(0))])

    h, also = theano.scan(step, x.dimshuffle(1, 0, 2), T.zeros((x.shape[0], FEATURES)))
    inputs, outputs, updates = trained((h[-1] ** 2).mean(), [u], [h[-1]], [x])
    return inputs, outputs, OrderedDict([*updates.items(), *also.items()])


def mapped(rng):
    """Build a function that maps over rows, with `theano.map`."""
    x, u = T.dtensor3("x"), shared(rng, FEATURES, UNITS)
    h, _ = theano.map(lambda row, i: T.tanh(row.dot(u)) * i, [x, T.arange(x.shape[0])])
    return trained((h**2).mean(), [u], [h], [x])


def nested(rng):
    """Build a loop with an inner loop in each step, which uses the minibatch's mean."""
    x, u = T.dtensor3("x"), shared(rng, FEATURES, FEATURES)

    def inner(h, row):
        return T.tanh(h.dot(u) + row - h.mean(0))

    def step(row, h):
        return theano.scan(inner, outputs_info=h, non_sequences=row, n_steps=2)[0][-1]

    h, _ = theano.scan(step, x.dimshuffle(1, 0, 2), T.zeros((x.shape[0], FEATURES)))
    return trained((h[-1] ** 3).mean(), [u], [h[-1]], [x])


NETS = {
    "rnn": rnn,
    "lstm of Lasagne": lasagne_net("LSTMLayer"),
    "gru of Lasagne": lasagne_net("GRULayer", grad_clipping=0.5),
    "lstm": lstm,
    "until": until,
    "branching": branching,
    "mapped": mapped,
    "nested": nested,
}


def marked(names):
    """Return the names of networks, and mark those that PyTensor cannot train."""
    reasons = dict.fromkeys(["lstm of Lasagne", "gru of Lasagne"], "Lasagne")
    reasons["branching"] = "gradients of loops whose steps draw random numbers"
    return [pytest.param(one, marks=theano_only(reasons[one])) if one in reasons else one for one in names]


def values(inputs, n, seed):
    rng = np.random.RandomState(seed)
    mask = (np.arange(STEPS)[None] < rng.randint(1, STEPS + 1, n)[:, None]) * 1.0
    x, y = rng.randn(n, STEPS, FEATURES), rng.randint(0, CLASSES, n).astype("int32")
    made = {"x": x, "y": y, "mask": mask, "ids": rng.randint(0, WORDS, (n, STEPS)).astype("int32")}
    return [x[:, 0] if one.name == "x" and one.ndim == 2 else made[one.name] for one in inputs]


@functools.cache
def functions(name):
    (inputs, outputs, ours), (others, serial, theirs) = (NETS[name](np.random.RandomState(0)) for _ in range(2))
    function = synk.function(inputs, outputs, updates=ours, exact=True)
    return function, list(ours), theano.function(others, serial, updates=theirs), list(theirs), inputs


@pytest.mark.parametrize("n", [11, 1])
@pytest.mark.parametrize("name", ["rnn", "until", "mapped"])
def test_a_net_trained_by_adam(session, name, n):
    train(name, n)


@pytest.mark.parametrize("name", marked(NETS))
def test_nets_on_three_ranks(three, name):
    train(name, 11)
    train(name, 2)


def train(name, n):
    """Train in parallel and in the serial program, and compare all outputs and variables."""
    function, ours, reference, theirs, inputs = functions(name)
    for mine, other in zip(ours, theirs):
        mine.set_value(other.get_value())
    synk.broadcast(ours)
    for seed in range(4):
        given = values(inputs, n, seed)
        close(function(*given), reference(*given))
    close(ours, theirs)
    assert not synk.check_replicas()


@pytest.mark.parametrize("name", marked(["rnn", "lstm of Lasagne", "gru of Lasagne", "lstm"]))
def test_loops_need_no_collectives(three, name):
    function = functions(name)[0]
    assert not [entry for entry in function.partition if "loop" in entry.reason or entry.collective == "all-gather"]


@functools.cache
def loops_that_begin_with_ones():
    """Return loops that begin with a state of ones and add sums over rows, of inputs and of a slice of other data."""
    s, n = T.dtensor3("s"), T.lscalar("n")
    data = theano.shared(np.random.RandomState(3).randn(9, 3, 4))
    part = data[:n]

    def states(rows):
        w = theano.shared(np.ones(4))
        states = theano.scan(lambda row, h: row.sum(axis=0) + h * 0.5, rows.dimshuffle(1, 0, 2), w)[0]
        return w, states, [(w, states[-1] + rows.shape[0])]

    ours, theirs = states(s), states(part)
    of_inputs = synk.function([s], ours[1], updates=ours[2], exact=True), ours[0]
    of_part = synk.function([], theirs[1], bcast_inputs=[n], updates=theirs[2], shard=[part], exact=True), theirs[0]
    return of_inputs, of_part, data.get_value()


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_states_that_do_not_begin_with_zero(three, n):
    of_inputs, of_part, data = loops_that_begin_with_ones()
    for (function, w), given in ((of_inputs, data[:n]), (of_part, np.int64(n))):
        synk.broadcast(w, np.ones(4))
        states = np.ones(4)
        for got, row in zip(function(given), data[:n].sum(axis=0)):
            states = row + states * 0.5
            assert_close(got, states, rtol=1e-9)
        assert_close(w.get_value(), states + n, rtol=1e-9)
        assert not synk.check_replicas([w])
