"""Small programs, divided by rows: every value on every rank equals the serial program's value."""

import numpy as np
import pytest
from backend import T
from example_expressions import PROGRAMS
from example_programs import ROWS, WHOLE, evaluated, inputs_of, marked, outputs_of
from simulated_ranks import COLLECTIVES, check, rows

from synkhronos._sharding.propagate import Propagation
from synkhronos._sharding.rules import REPLICATED_RULES, RULES


@pytest.mark.parametrize("program", marked(PROGRAMS))
def test_program(program):
    outputs = outputs_of(program)
    sharded, whole = inputs_of(outputs)
    if sharded:
        check(outputs, {one: {**ROWS, **WHOLE}[one] for one in (*sharded, *whole)}, dict.fromkeys(sharded, 0))


@pytest.mark.parametrize("shape", [(4, 0), (0, 0), (0, 3)])
def test_arrays_without_elements(shape):
    x = T.dmatrix("x")
    check([x.T.flatten()[::-1], x.flatten()[::-1]], {x: np.ones(shape)}, {x: 0})


#: Common expressions, which gather nothing, and their number of collectives.
WITHOUT_GATHERING = {
    "step(nll(x.dot(W) + b).mean(), W, b)": 2,
    "step(nll(norm(x.dot(U)).dot(W) + b).mean(), W, b, U)": 9,
    "step((m * nll(x.dot(U).dot(W) + b)).sum() / m.sum() + 1e-2 * (W**2).sum(), W, b, U)": 4,
    "step(nll(T.nnet.relu(norm(T.nnet.conv2d(images, filters), (0, 2, 3))).flatten(2).dot(V)).mean(), filters, V)": 8,
    "step(T.nnet.categorical_crossentropy(T.nnet.softmax(E[ids].mean(1).dot(W)), y).mean(), E, W)": 2,
    "T.nnet.relu(s.dot(W)).mean()": 1,
    "x.reshape((x.shape[0], 2, 2)).sum(2).max(1)": 0,
    "s.reshape((-1, s.shape[2])).dot(W).reshape((s.shape[0], s.shape[1], K))": 0,
    "s.dimshuffle(1, 0, 2).reshape((s.shape[1] * s.shape[0], D)).dot(W)": 0,
    "T.concatenate([x, T.zeros((x.shape[0], 2)), T.ones_like(z)], axis=1)": 0,
    "lrn(images)": 0,
    "step(nll(scan_rnn()[-1].dot(W)).mean(), U, W)": 2,
    "T.tanh(scan_sums(lambda total: total * 0.9, T.zeros((D,))))": 1,
    "theano.map(lambda row, one: (row * one).sum(), [x, T.tanh(z)])[0]": 0,
    "T.tanh(theano.ifelse.ifelse(T.gt(a, 0), [x, v.sum()], [z, m.sum()])[1])": 1,
    "T.tanh(layer(x, U)[1])": 1,
    "theano.sparse.dot(x, matrix)": 0,
    "T.repeat(T.tile(x, (2, 1)), 3, axis=0)": 0,
    'T.nnet.bn.batch_normalization_train(images, channel, channel, "spatial")[0]': 2,
}


@pytest.mark.parametrize("program", marked(WITHOUT_GATHERING))
def test_common_expressions_gather_nothing(program):
    outputs = evaluated(program)
    walk = Propagation(dict.fromkeys(inputs_of(outputs)[0], 0), rows(), COLLECTIVES, RULES, REPLICATED_RULES)
    walk.run(outputs)
    needed = [walk.replicated(one) if len(outputs) > 1 else walk.new(one) for one in outputs]  # updates
    assert walk.gathered == []
    assert [one.kind for one in walk.collectives_for(needed)] == ["all-reduce (sum)"] * WITHOUT_GATHERING[program]
