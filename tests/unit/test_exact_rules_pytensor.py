"""Sharding rules for operations and static shapes of PyTensor: values on ranks equal the serial values."""

import numpy as np
import pytest
from backend import T, on_theano, theano
from simulated_ranks import COLLECTIVES, check, rows

from synkhronos._backends import TITLE
from synkhronos._sharding.propagate import Propagation
from synkhronos._sharding.rules import REPLICATED_RULES, RULES
from synkhronos._sharding.sharded_graph import OwnDraws

pytestmark = pytest.mark.skipif(on_theano, reason=f"{TITLE} has none of these operations")

N, D = 11, 4
rng = np.random.default_rng(5)
x, v, y, s = T.dmatrix("x"), T.dvector("v"), T.ivector("y"), T.dtensor3("s")
GIVEN = {x: rng.normal(size=(N, D)), v: rng.normal(size=N), s: rng.normal(size=(N, D, D))}
GIVEN[y] = rng.integers(0, D, N).astype("int32")
E = theano.shared(rng.normal(size=(7, D)), "E")
W = theano.shared(rng.normal(size=(D, 3)), "W")


class Standardized(theano.OpFromGraph):
    """An operation derived from OpFromGraph, as in PyMC."""


class Doubled(theano.OpFromGraph):
    """An operation whose results differ from those of its inner graph."""

    def perform(self, node, inputs, outputs):
        super().perform(node, inputs, outputs)
        outputs[0][0] = outputs[0][0] * 2


def derived(kind):
    """Return an operation of class ``kind`` that scales a centred matrix, and returns the column means, too."""
    matrix, scale = T.dmatrix(), T.dscalar()
    return kind([matrix, scale], [(matrix - matrix.mean(0)) * scale, matrix.mean(0)])


fixed = rng.normal(size=(N, D))  # a constant's type has a static number of rows


def own_check(value, condition):
    """Apply a check of a class derived from CheckAndRaise, as in PyMC."""

    class Check(theano.raise_op.CheckAndRaise):
        pass

    return Check(ValueError, "few")(value, condition)


PROGRAMS = {
    # static lengths
    "a constant of as many rows": (lambda: x * fixed, 0),
    "a constant that is contracted": (lambda: T.constant(fixed).T @ x, 0),
    "a constant first": (lambda: (T.constant(fixed) @ W)[:, 0] * v, 0),
    "ones of a literal length": (lambda: T.ones((N, D)) * x, 0),
    "a vector of a literal length": (lambda: T.zeros(N) + v, 0),
    "specify_shape": (lambda: T.tanh(T.specify_shape(x, (N, D))).sum(0), 0),
    "specify_shape of some": (lambda: T.specify_shape(x, (None, D)).reshape((-1, 2, 2)), 0),
    "specify_shape of all rows": (lambda: T.specify_shape(x, (v.shape[0], None)) @ W, 0),
    "a specified length, then a product": (lambda: T.specify_shape(x, (N, D)).T @ x, 0),
    # checks
    "a check": (lambda: theano.raise_op.CheckAndRaise(ValueError, "few")(x, x.shape[0] > 3) * 2, 0),
    "a check of the program's own": (lambda: own_check(x, x.shape[0] > 3) * 2, 0),
    "an assertion of what ranks make together": (lambda: theano.raise_op.Assert()(x, T.gt((x**2).sum(), 0)), 0),
    # batches of matrices
    "products": (lambda: s @ s, 0),
    "products with one matrix": (lambda: s @ W, 0),
    "products with the rows inside": (lambda: s.dimshuffle(1, 0, 2) @ W, 0),
    "products that contract rows": (lambda: s.dimshuffle(1, 2, 0) @ s.dimshuffle(1, 0, 2), 0),
    "a vector": (lambda: x @ np.ones(D), 0),
    "a vector of rows": (lambda: v @ x, 0),
    "two vectors of rows": (lambda: v @ v, 0),
    "Cholesky factors": (lambda: T.linalg.cholesky(s @ s.dimshuffle(0, 2, 1) + 5 * np.eye(D)).sum((1, 2)), 0),
    "inverses": (lambda: T.linalg.inv(s @ s.dimshuffle(0, 2, 1) + 5 * np.eye(D)), 0),
    "solutions": (lambda: T.linalg.solve(s @ s.dimshuffle(0, 2, 1) + 5 * np.eye(D), x, b_ndim=1), 0),
    "the inverse of a product": (lambda: T.linalg.inv(x.T @ x), 0),
    "a determinant for each": (lambda: T.linalg.det(s), 0),
    "a Cholesky factor over rows": (lambda: T.linalg.cholesky(x @ x.T + 5 * T.eye(N)), None),
    # indices
    "rows of a table": (lambda: E[y], 0),
    "columns of a table": (lambda: E[:, y], 0),
    "columns of rows": (lambda: x[:, [2, 0, 0]], 0),
    "one array among slices": (lambda: s[:, [1, 3], 1:], 0),
    "arrays apart": (lambda: s.dimshuffle(1, 0, 2)[[0, 2], :, [1, 3]], 0),
    "arrays together, rows after": (lambda: s.dimshuffle(1, 2, 0)[[0, 2], [1, 3]], 0),
    "arrays together, rows before": (lambda: s[:, [0, 2], [1, 3]], 0),
    "an array of rows, and a number": (lambda: E[y, 1], 0),
    "two arrays of rows": (lambda: E[y, y], 0),
    "an array of rows of two axes": (lambda: E[T.stack([y, y], axis=1)].sum(1), 0),
    "labels": (lambda: x[T.arange(y.shape[0]), y], 0),
    "labels of all but some": (lambda: x[T.arange(y.shape[0]), y] + x[:, [0]].sum(1), 0),
    "a mask": (lambda: x[v > 0], None),
    "added to rows of a table": (lambda: E[y].inc(x), 0),
    "added to entries of a table": (lambda: T.inc_subtensor(E[y, y], v), 0),
    "added to columns of a table": (lambda: T.inc_subtensor(E[:, y], v), 0),
    "added to columns of rows": (lambda: T.inc_subtensor(x[:, [0, 0, 2]], x[:, :3]), 0),
    "added once to rows of a table": (lambda: T.inc_subtensor(E[y], x, ignore_duplicates=True), None),
    # inner graphs
    "softmax of rows": (lambda: T.special.softmax(x, axis=1), 0),
    "softmax over rows": (lambda: T.special.softmax(x, axis=0), 0),
    "softmax of all": (lambda: T.special.log_softmax(x), 0),
    "logsumexp": (lambda: T.logsumexp(x, axis=1).mean() + T.logsumexp(x), 0),
    "logaddexp": (lambda: T.logaddexp(v, x[:, 0]), 0),
    "a matrix with a diagonal": (lambda: T.diag(x.sum(0)), 0),
    "einsum": (lambda: T.einsum("ij,jk->ik", x, W), 0),
    "einsum over rows": (lambda: T.einsum("ij,ik->jk", x, x), 0),
    "derived from OpFromGraph": (lambda: derived(Standardized)(x, 2.0), 0),
    "derived from OpFromGraph, of replicated": (lambda: derived(Standardized)(T.dot(x.T, x), 2.0), 0),
    "derived from OpFromGraph, computed otherwise": (lambda: derived(Doubled)(x, v.sum()), None),
    "a Kronecker product": (lambda: T.linalg.kron(x.sum(0)[None], W), 0),
    # shapes
    "joined axes": (lambda: T.join_dims(s, 0, 2) @ W, 0),
    "joined axes, and split": (lambda: T.split_dims(T.join_dims(s, 0, 2), (s.shape[0], D), 0), 0),
    "split axes": (lambda: T.split_dims(x, (2, 2), 1).sum(1), 0),
    # reductions
    "maxima": (lambda: [x.max(0), x.max(1), x.min(), x.argmax(1)], 0),
    "products of numbers": (lambda: [x.prod(0), x.prod(1)], 0),
}


def computed_by(name):
    made = PROGRAMS[name][0]()
    return list(made) if isinstance(made, list) else [made]


def with_gradients(name):
    """Return the outputs of a program and their gradients."""
    outputs = computed_by(name)
    used = [one for one in theano.gof.graph.inputs(outputs) if one in (x, v, s, E, W)]
    losses = [(T.sin(one) * 0.5).sum() for one in outputs if one.dtype == "float64"]
    if losses and used and PROGRAMS[name][1] == 0:
        outputs += theano.grad(sum(losses), used, disconnected_inputs="ignore")
    return outputs


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name):
    outputs = with_gradients(name)
    used = set(theano.gof.graph.inputs(outputs))
    given = {variable: value for variable, value in GIVEN.items() if variable in used}
    check(outputs, given, dict.fromkeys(given, 0), ranks=(2, 3, 5))


@pytest.mark.parametrize("name", [name for name, (_, gathered) in PROGRAMS.items() if gathered == 0])
def test_what_gathers_nothing(name):
    outputs = computed_by(name)
    used = set(theano.gof.graph.inputs(outputs))
    walk = Propagation({one: 0 for one in GIVEN if one in used}, rows(), COLLECTIVES, RULES, REPLICATED_RULES)
    walk.run(outputs)
    assert walk.gathered == []


def test_a_wrong_length_is_refused_on_all_ranks():
    outputs = [T.specify_shape(x, (N + 1, D)) * 2]
    with pytest.raises(AssertionError):
        check(outputs, {x: GIVEN[x]}, {x: 0}, ranks=(2,))


def draws(kind, random):
    """Propagate shardings through a program that draws random numbers."""
    stream = theano.shared(np.random.default_rng(3))
    own = OwnDraws()
    more = own.rules if random == "own" else {}
    walk = Propagation({x: 0, v: 0}, rows(), COLLECTIVES, {**RULES, **more}, {**REPLICATED_RULES, **more})
    output = kind(stream)
    walk.run([output])
    return walk, output, own


KINDS = {
    "of a size": lambda rng: T.random.normal(0, 1, size=(x.shape[0], 3), rng=rng),
    "of rows": lambda rng: T.random.normal(v, 1, rng=rng),
    "of rows and a size": lambda rng: T.random.normal(v, 1, size=(v.shape[0],), rng=rng),
}


@pytest.mark.parametrize("name", KINDS)
def test_draws_of_each_rank(name):
    walk, output, own = draws(KINDS[name], "own")
    assert own.states and walk.placement(output).axis == 0 and walk.collectives == []


@pytest.mark.parametrize("name", KINDS)
def test_draws_are_the_serial_program_s(name):
    stream = theano.shared(np.random.default_rng(3))
    output = KINDS[name](stream) * v.sum()
    check([output], {one: GIVEN[one] for one in (x, v)}, {x: 0, v: 0}, ranks=(2, 3))


def test_draws_of_many_numbers_at_once_are_replicated():
    walk, _, own = draws(lambda rng: T.random.categorical(x, rng=rng), "own")
    assert own.states == [] and [one.kind for one in walk.collectives] == ["all-gather"]
