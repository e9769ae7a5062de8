"""`check_replicas`: which variables differ between ranks, and by how much; warnings of `fork(check_replicas=N)`."""

import functools
import warnings

import numpy as np
import pytest
from backend import MRG_RandomStreams, T, on_theano, theano

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function


def reading(*variables):
    """Return a function that uses variables."""
    return synk.function([], [(var, None) for var in variables])


def test_differing_variables_are_reported_with_the_largest_difference(session):
    values = {
        "float32": np.ones((3, 2), "float32"),
        "int64": np.arange(4),
        "bool": np.array([True, False]),
        "scalar": np.float64(2),
        "empty": np.zeros((0, 3)),
        "large": np.zeros(100_000),
    }
    shared = {name: theano.shared(value, name) for name, value in values.items()}
    function = reading(*shared.values())
    synk.distribute()
    assert synk.check_replicas(list(shared.values())) == {}
    assert synk.check_replicas(shared["bool"]) == {}
    if session == 1:
        return
    last = session - 1
    synk.set_value(last, shared["float32"], values["float32"] - np.float32(0.25))
    synk.set_value(last, shared["int64"], np.array([0, 1, 2, 2**62]))
    synk.set_value(last, shared["bool"], np.array([True, True]))
    synk.set_value(last, shared["empty"], np.zeros((1, 3)))
    changed = values["large"].copy()
    changed[99_999] = -1e-9
    synk.set_value(1, shared["large"], changed)
    found = synk.check_replicas(list(shared.values()))
    expected = {"float32": 0.25, "int64": 2.0**62 - 3, "bool": 1.0, "empty": np.inf, "large": 1e-9}
    assert {var.name: most for var, most in found.items()} == expected
    assert {var.name for var in synk.check_replicas()} >= set(expected)
    assert synk.get_value(last, shared["int64"])[3] == 2**62  # the check changes nothing
    synk.broadcast(list(shared.values()))
    assert synk.check_replicas(list(shared.values())) == {}
    del function


def test_not_a_number_and_signed_zeros(two):
    var = theano.shared(np.array([np.nan, np.inf, 0.0]), "var")
    function = reading(var)
    synk.distribute()
    assert synk.check_replicas(var) == {}
    same, others = [np.nan, np.inf, -0.0], ([0, np.inf, 0.0], [np.nan, -np.inf, 0.0])
    for value, expected in ((same, {}), *((one, {var: np.inf}) for one in others)):
        synk.set_value(1, var, np.array(value))
        assert synk.check_replicas(var) == expected
    del function


def test_a_value_set_on_the_controller_alone_is_found(two):
    var = theano.shared(np.zeros(3), "var")
    function = reading(var)
    synk.distribute()
    var.set_value(np.array([0, 5.0, 0]))
    assert synk.check_replicas(var) == {var: 5.0}
    assert synk.check_replicas()[var] == 5.0
    del function


def test_variables_that_differ_on_purpose_are_not_compared(no_session):
    synk.fork(2, use_gpu=False)
    x = T.dvector("x")
    part, data = theano.shared(np.zeros(4), "part"), theano.shared(np.zeros(4), "data")
    random = MRG_RandomStreams(1)
    f = synk.function([x], [(x + random.normal(x.shape), "gather"), part.sum()])
    g = synk.function([], data.sum(), sliceable_shareds=[data])
    assert synk.check_replicas() == {}  # distributes the functions first
    synk.scatter(part, np.arange(8.0))
    synk.set_value(1, data, np.ones(2))
    f(np.ones(3))
    assert synk.check_replicas() == {}
    assert synk.check_replicas([data, part]) == {data: np.inf, part: 4.0}  # variables that are named are compared
    synk.broadcast(part)
    synk.set_value(1, part, np.ones(4))
    assert synk.check_replicas() == {part: 2.0}
    synk.broadcast(part, np.ones(4))
    assert synk.check_replicas() == {}
    del f, g


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_scattered_variables_are_equal_again_after(collective, two):
    x, part, data = T.dvector("x"), theano.shared(np.zeros(4), "part"), theano.shared(np.zeros(4), "data")
    f = synk.function([x], (x * part.sum()).sum(), exact=True)
    g = synk.function([], data.sum(), sliceable_shareds=[data])
    synk.scatter([part, data], [np.arange(8.0), np.arange(8.0)])
    with pytest.raises(ValueError, match="part was scattered; expected a variable that is equal on all ranks"):
        f(np.ones(3))
    getattr(synk, collective)([part, data])
    assert f(np.ones(3)) == 3 * part.get_value().sum() == 3 * synk.get_value(1, part).sum()
    assert {part, data}.isdisjoint(synk.check_replicas())
    synk.set_value(1, [part, data], [np.ones_like(part.get_value())] * 2)
    assert {part, data} <= set(synk.check_replicas())
    synk.broadcast([part, data])
    del g


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "2"], ids=repr)
def test_wrong_intervals_are_refused(no_session, wrong):
    with pytest.raises(ValueError, match="check_replicas"):
        synk.fork(2, use_gpu=False, check_replicas=wrong)


def test_wrong_arguments_are_refused(two):
    with pytest.raises(TypeError, match="check_replicas"):
        synk.check_replicas("w")
    with pytest.raises(ValueError, match="no function"):
        synk.check_replicas(theano.shared(np.zeros(2)))


def drifting():
    """Return parameters and a training step on each rank's own gradient, without an all-reduce."""
    x = T.dmatrix("x")
    w = theano.shared(np.zeros(3), "w")
    b = theano.shared(np.float64(0), "b")
    loss = T.sqr(T.dot(x, w) + b - x.sum(axis=1) ** 2).mean()
    gradients = T.grad(loss, [w, b])
    return [w, b], synk.function([x], loss, updates=[(p, p - 0.01 * g) for p, g in zip([w, b], gradients)])


def caught(call, *args):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*args)
    return [str(one.message) for one in found if issubclass(one.category, RuntimeWarning)]


@pytest.mark.parametrize("every", [1, 3])
def test_drifting_replicas_warn_once(synchronize, every):
    synchronize(2, check_replicas=every)
    points = np.random.RandomState(0).randn(8, 3)
    parameters, step = drifting()
    offset = step._session().replica_check._n_calls
    warned = [caught(step, points) for _ in range(7)]
    first = next(i for i in range(1, 7) if not (offset + i + 1) % every)
    assert [len(one) for one in warned] == [2 * (i == first) for i in range(7)]
    for text, var in zip(sorted(warned[first]), sorted(parameters, key=str)):
        assert text.startswith(f"the replicas of {var} differ between ranks, by up to 0.")
        assert "synkhronos.broadcast" in text
    _, right = drifting()
    for _ in range(4):
        assert caught(right, points[:4].repeat(2, axis=0).reshape(4, 2, 3).transpose(1, 0, 2).reshape(8, 3)) == []


def test_correct_training_does_not_warn(synchronize):
    synchronize(2, check_replicas=1)
    x, y = T.dmatrix("x"), T.dvector("y")
    w = theano.shared(np.zeros(3), "w")
    train = make_train_function(T.sqr(T.dot(x, w) - y).mean(), [w], x, y, updates.adam)
    parameters, step = drifting()
    points = np.random.RandomState(0).randn(7, 3)
    for _ in range(3):
        assert caught(train, points, points.sum(axis=1)) == []
        assert caught(step, points) == []
        synk.all_reduce(parameters, weights=step.counts)
    w.set_value(np.ones(3))
    assert len(caught(train, points, points.sum(axis=1))) == 1


def plain_functions(w):
    """Return functions of the backend that update a variable: by a new array, in place, copied, by another linker."""
    i, other = T.lscalar("i"), theano.shared(np.zeros(3), "other")
    in_python = theano.Mode(linker="py", optimizer="fast_run")
    item = theano.function([i], w.sum(), updates=[(w, T.inc_subtensor(w[i], 1.0))])
    return {
        "new values": theano.function([], w.sum(), updates=[(w, T.concatenate([w[1:], w[:1] + 1]))]),
        "in place": theano.function([], [], updates=[(w, w * 2)]),
        "an item in place": functools.partial(item, 1),
        "a copy": theano.function([], w.sum(), updates=[(w, w - 1)]).copy(),
        "a swapped variable": theano.function([], [], updates=[(other, other + 3)]).copy(swap={other: w}),
        "in Python": theano.function([], w.sum(), updates=[(w, w + 1)], mode=in_python),
    }


def setters(w):
    """Return callables that set a variable without a compiled function."""

    def in_storage():
        w.container.storage[0] = np.arange(3.0)

    def the_same_array():
        value = w.get_value(borrow=True)
        value += 1
        w.set_value(value, borrow=True)

    values = (("value", np.arange(3.0) + 1), ("data", np.arange(3.0) + 2))
    attributes = [functools.partial(setattr, w.container, name, value) for name, value in values]
    return [in_storage, *attributes, functools.partial(w.set_value, np.arange(3.0)), the_same_array]


@pytest.mark.parametrize("updates", [False, True], ids=["reads", "updates"])
def test_an_exact_function_uses_values_that_the_program_has_set(session, updates):
    x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    before = plain_functions(w)
    f = synk.function([x], x.dot(w), updates=[(w, w * 0.5)] * updates, exact=True)
    local = synk.function([x], (x.dot(w).sum(), "sum"), updates=[(w, w + 1)])
    given = np.random.RandomState(0).randn(7, 3)
    f(given)
    ways = [*before.values(), *plain_functions(w).values(), *setters(w)]
    ways += [lambda: f.as_theano(given), lambda: local.as_theano(given)]
    ways += [lambda: theano.function([], w.sum()).__setitem__(w, np.ones(3))] * on_theano  # not in PyTensor
    for way in [*ways, ways[1], ways[2]]:
        way()
        value = w.get_value()
        np.testing.assert_allclose(f(given), given.dot(value))
        assert not synk.check_replicas(w)


def test_partial_results_of_a_failed_function_reach_all_ranks(session):
    x, i, w = T.dmatrix("x"), T.lscalar("i"), theano.shared(np.ones(3), "w")
    f = synk.function([x], x.dot(w), exact=True)
    fails = theano.function([i], w[i], updates=[(w, w * 2)])
    given = np.ones((5, 3))
    f(given)
    with pytest.raises(IndexError):
        fails(5)
    np.testing.assert_allclose(f(given), given.dot(w.get_value()))


def test_ranks_keep_values_of_their_own_under_plain_functions(two):
    """Updates are local, and a function of the backend changes the controller's value alone, as in 2017."""
    x, w = T.dmatrix("x"), theano.shared(np.zeros(3), "w")
    local = synk.function([x], (x.sum(), "sum"), updates=[(w, w + x.sum())])
    exact = synk.function([x], (x.dot(w)).sum(), exact=True)
    double = theano.function([], [], updates=[(w, w * 2)])
    synk.broadcast(w)
    local(np.ones((4, 3)))
    local(np.ones((2, 3)))
    own = synk.gather(w)
    np.testing.assert_array_equal(own[:, 0], [9, 9])
    synk.set_value(1, w, np.ones(3))
    local(np.ones((4, 3)))
    exact(np.ones((4, 3)))  # the program has set no value: each rank uses its own
    np.testing.assert_array_equal(synk.gather(w)[:, 0], [15, 7])
    double()
    local(np.ones((4, 3)))
    np.testing.assert_array_equal(synk.gather(w)[:, 0], [36, 13])
    synk.broadcast(w)
    assert not synk.check_replicas(w)


def test_values_set_after_a_recorded_call_are_refused(session):
    x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    f = synk.function([x], x.dot(w).sum(), exact=True)
    double = theano.function([], [], updates=[(w, w * 2)])
    given = np.ones((4, 3))
    f(given)
    double()
    with synk.sequence():
        futures = [f(given) for _ in range(2)]
    assert [future.result() for future in futures] == [24, 24]
    with pytest.raises(synk.SessionError, match="w was set after a call"), synk.sequence():
        f(given)
        double()
    assert f(given) == 48
