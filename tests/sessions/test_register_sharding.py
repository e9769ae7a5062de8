"""Sharding rules that programs register for operations of their own."""

import logging
import re

import numpy as np
import pytest
from backend import T, theano
from comparison import assert_close, close

import synkhronos as synk
from synkhronos._sharding import checking
from synkhronos._sharding.rules import RULES

X = np.random.RandomState(3).rand(7, 3)


class Scale(theano.Op):
    """Multiply the columns of a matrix by a vector."""

    __props__ = ()

    def make_node(self, x, w):
        return theano.Apply(self, [x, w], [T.dmatrix()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0] * inputs[1]

    def grad(self, inputs, gradients):
        x, w = inputs
        return [Scale()(gradients[0], w), ColumnDots()(x, gradients[0])]

    def pullback(self, inputs, outputs, gradients):
        return self.grad(inputs, gradients)


class ColumnDots(theano.Op):
    """Compute the dot product of each column of a matrix with that column of another."""

    __props__ = ()

    def make_node(self, x, y):
        return theano.Apply(self, [x, y], [T.dvector()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = (inputs[0] * inputs[1]).sum(axis=0)


def by_rows_or_columns(node):
    return [
        ([synk.Shard(0)], [synk.Shard(0), synk.Replicate()]),
        ([synk.Shard(-1)], [synk.Shard(-1), synk.Shard(0)]),
        ([synk.Partial()], [synk.Partial(), synk.Replicate()]),
    ]


def summed_over_rows(node):
    return [([synk.Partial("sum")], [synk.Shard(0), synk.Shard(0)])]


def results(build):
    x, w = T.dmatrix("x"), theano.shared(np.array([1.0, -2.0, 0.5]), "w")
    y = Scale()(x, w)
    loss = T.sqr(y).mean()
    outputs = [loss, y, ColumnDots()(x, y), Scale()(ColumnDots()(x, y).dimshuffle("x", 0), w)]
    function = build([x], outputs, updates=[(w, w - 0.1 * T.grad(loss, w))])
    return [*function(X), *function(X[:5]), w.get_value()], function


@pytest.fixture
def rules(monkeypatch):
    """Register rules, and remove them after the test."""
    monkeypatch.setattr(checking, "_logged", set())
    synk.register_sharding(Scale)(by_rows_or_columns)
    synk.register_sharding(ColumnDots)(summed_over_rows)
    yield
    del RULES[Scale], RULES[ColumnDots]


def exact(*args, **kwargs):
    return synk.function(*args, exact=True, **kwargs)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("checks", ["0", "1"])
def test_operations_with_rules_are_sharded(session, rules, checks, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_CHECK_SHARDING", checks)
    expected, _ = results(theano.function)
    got, function = results(exact)
    close(got, expected)
    if checks == "0":
        assert {entry.collective for entry in function.partition} == {"all-reduce (sum)"}


def test_a_wrong_rule_is_found_by_its_shape(two, rules, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_CHECK_SHARDING", "1")
    synk.register_sharding(ColumnDots)(lambda node: [([synk.Shard(0)], [synk.Shard(0), synk.Shard(0)])])
    x = T.dmatrix("x")
    with pytest.raises((AssertionError, synk.WorkerError), match=r"ColumnDots.* gives shape"):
        exact([x], ColumnDots()(x, x))(X)


def fails(node):
    raise ZeroDivisionError("no rule today")


WRONG = {
    "an exception": (fails, "fails.*ZeroDivisionError: no rule today"),
    "no pairs": (lambda node: [synk.Shard(0)], "must return a list of pairs"),
    "too few inputs": (lambda node: [([synk.Shard(0)], [synk.Shard(0)])], "1 placements of 2 variables"),
    "no such axis": (lambda node: [([synk.Shard(0)], [synk.Shard(2), synk.Shard(0)])], "which has 2 dimensions"),
    "no placement": (lambda node: [([0], [synk.Shard(0), synk.Replicate()])], "0 is not a placement"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_of_a_rule_is_logged_and_the_inputs_are_gathered(name, two, rules, monkeypatch, caplog):
    monkeypatch.setenv("SYNKHRONOS_RAISE_ANALYSIS_ERRORS", "0")
    rule, message = WRONG[name]
    synk.register_sharding(Scale)(rule)
    x = T.dmatrix("x")
    with caplog.at_level(logging.WARNING, "synkhronos"):
        function = exact([x], Scale()(x, T.constant(np.arange(3.0))))
    assert_close(function(X), X * np.arange(3.0), rtol=1e-12)
    (record,) = [one for one in caplog.records if "The sharding rule of Scale" in one.getMessage()]
    assert re.search(message, record.getMessage())


def test_a_rule_is_for_a_class():
    with pytest.raises(TypeError, match="expected classes of operations"):
        synk.register_sharding(Scale())
    with pytest.raises(TypeError, match="expected a function"):
        synk.register_sharding(Scale)(None)
    with pytest.raises(ValueError, match="Partial: the op must be"):
        synk.Partial("mean")
