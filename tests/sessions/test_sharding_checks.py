"""Generated graphs on ranks that are processes, with checks of shapes: ``SYNKHRONOS_CHECK_SHARDING=1``."""

import functools

import numpy as np
import pytest
from backend import T, theano
from comparison import close
from sharding_rule_cases import FAMILIES
from sharding_rule_programs import SENSELESS, programs

import synkhronos as synk
from synkhronos._backends import ops
from synkhronos._sharding.placements import Placed, Shard
from synkhronos._sharding.rules import RULES

N_PROGRAMS = 3  # of each family
RANKS = sorted((1 + place % 3, name) for place, name in enumerate(FAMILIES))


def mode_of(name):
    """Return a mode that does not compile the hundreds of operations, except convolutions, which must be compiled."""
    return None if name == "convolutions" else theano.Mode("py", "fast_compile")


@pytest.fixture
def checked(monkeypatch):
    """Let functions that the test builds check shapes."""
    monkeypatch.setenv("SYNKHRONOS_CHECK_SHARDING", "1")


@functools.cache
def chosen(name):
    """Return some programs of a family: inputs, outputs, sharded inputs, values and the serial results."""
    inputs, outputs, sharded, values, n_found = [], [], {}, [], 0
    for _, program in programs(FAMILIES[name].cases, seed=3):
        given = list(program.given)
        try:
            with np.errstate(all="ignore"):
                serial = theano.function(given, program.outputs, mode=mode_of(name), on_unused_input="ignore")
                serial(*program.given.values())
        except SENSELESS:
            continue
        for variable in given:
            variable.name = f"input {len(inputs)}"
            inputs.append(variable)
            values.append(program.given[variable])
        outputs += program.outputs
        sharded.update(program.sharded)
        n_found += 1
        if n_found == N_PROGRAMS:
            break
    serial = theano.function(inputs, outputs, mode=mode_of(name), on_unused_input="ignore")
    return inputs, outputs, sharded, values, serial(*values)


@pytest.mark.parametrize("ranks, name", RANKS)
def test_generated_graphs(ranks, name, session, request):
    inputs, outputs, sharded, values, serial = chosen(name)
    if list(FAMILIES).index(name) % 2:
        request.getfixturevalue("checked")
    scattered = [one for one in inputs if one in sharded]
    others = [one for one in inputs if one not in sharded]
    options = {"mode": mode_of(name), "on_unused_input": "ignore"}
    f = synk.function(scattered, outputs, bcast_inputs=others, exact=True, shard=sharded, **options)
    of = dict(zip(inputs, values))
    for place, (got, right) in enumerate(zip(f(*(of[one] for one in (*scattered, *others))), serial)):
        got, right = np.asarray(got), np.asarray(right)
        assert (got.shape, got.dtype) == (right.shape, right.dtype), outputs[place]
        np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-9, err_msg=str(outputs[place]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_functions_with_checks_compute_the_same(session, checked):
    x, y = T.dmatrix("x"), T.dvector("y")
    w, mean = theano.shared(np.ones(3), "w"), theano.shared(np.zeros(3), "mean")
    error = T.dot(T.tanh(x - x.mean(0)), w) - y
    steps = theano.scan(lambda row, h: T.tanh(row + h.mean(0)), x.dimshuffle(1, 0), T.zeros_like(y))[0]
    updates = [(w, w - 0.1 * T.grad((error**2).mean(), w)), (mean, 0.9 * mean + x.mean(0))]
    outputs = [(error**2).mean(), T.dot(x.T, x), steps[-1]]
    rng = np.random.default_rng(2)
    arrays = rng.normal(size=(7, 3)), rng.normal(size=7)
    results = []
    for build in (theano.function, functools.partial(synk.function, exact=True)):
        f = build([x, y], outputs, updates=updates)
        results.append([*map(np.array, f(*arrays)), *map(np.array, f(*arrays)), w.get_value(), mean.get_value()])
        w.set_value(np.ones(3))
        mean.set_value(np.zeros(3))
    close(results[1], results[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(f(*arrays, num_slices=2)[0], results[0][0])


@pytest.mark.parametrize("ranks", [2])
def test_functions_that_check_shapes_ignore_blocks_and_slices(session, checked):
    x = T.dvector("x")
    f = synk.function([x], (x**2).sum(), exact=True, blocked=True)
    assert f(np.arange(5.0)) == f(np.arange(5.0), num_slices=2) == 30


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wrong_rule_is_found_on_ranks(session, checked, monkeypatch):
    def transposed(walk, node):
        return [Placed(node.op(walk.new(node.inputs[0])), Shard(0))]

    monkeypatch.setitem(RULES, ops.DimShuffle, transposed)
    x = T.dmatrix("x")
    f = synk.function([x], x.T, exact=True, on_unused_input="ignore")
    message = r"(DimShuffle|MatrixTranspose).* gives shape \(3, \d\) on this rank, expected \(\d, 4\): .* \(3, 4\)"
    with pytest.raises((AssertionError, synk.WorkerError), match=message):
        f(np.ones((4, 3)))
