"""`check_replicas`: which variables differ between ranks, by how much; and the warnings of `fork(check_replicas=N)`."""

import warnings

import numpy as np
import pytest
from engine import MRG_RandomStreams, T, theano

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function


def reading(*variables):
    """A function that uses variables."""
    return synk.function([], [(var, None) for var in variables])


def test_what_differs_and_by_how_much(session):
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
    assert synk.get_value(last, shared["int64"])[3] == 2**62  # nothing changes
    synk.broadcast(list(shared.values()))
    assert synk.check_replicas(list(shared.values())) == {}
    del function


def test_not_a_number_and_signed_zeros(synchronize):
    synchronize(2)
    var = theano.shared(np.array([np.nan, np.inf, 0.0]), "var")
    function = reading(var)
    synk.distribute()
    assert synk.check_replicas(var) == {}
    synk.set_value(1, var, np.array([np.nan, np.inf, -0.0]))
    assert synk.check_replicas(var) == {}
    synk.set_value(1, var, np.array([0, np.inf, 0.0]))
    assert synk.check_replicas(var) == {var: np.inf}
    synk.set_value(1, var, np.array([np.nan, -np.inf, 0.0]))
    assert synk.check_replicas(var) == {var: np.inf}
    del function


def test_a_value_set_in_the_master_alone_is_seen(synchronize):
    synchronize(2)
    var = theano.shared(np.zeros(3), "var")
    function = reading(var)
    synk.distribute()
    var.set_value(np.array([0, 5.0, 0]))
    assert synk.check_replicas(var) == {var: 5.0}
    assert synk.check_replicas()[var] == 5.0
    del function


def test_what_differs_by_purpose_is_left_out(no_session):
    synk.fork(2, use_gpu=False)
    x = T.dvector("x")
    part, data = theano.shared(np.zeros(4), "part"), theano.shared(np.zeros(4), "data")
    random = MRG_RandomStreams(1)
    f = synk.function([x], [(x + random.normal(x.shape), "gather"), part.sum()])
    g = synk.function([], data.sum(), sliceable_shareds=[data])
    assert synk.check_replicas() == {}  # which distributes
    synk.scatter(part, np.arange(8.0))
    synk.set_value(1, data, np.ones(2))
    f(np.ones(3))
    assert synk.check_replicas() == {}
    assert synk.check_replicas([data, part]) == {data: np.inf, part: 4.0}  # asked for by name
    synk.broadcast(part)
    synk.set_value(1, part, np.ones(4))
    assert synk.check_replicas() == {part: 2.0}
    synk.broadcast(part, np.ones(4))
    assert synk.check_replicas() == {}
    del f, g


def test_wrong_arguments(synchronize, no_session):
    with pytest.raises(synk.SessionError, match="fork"):
        synk.check_replicas()
    for wrong in (-1, True, 1.5, "2"):
        with pytest.raises(ValueError, match="check_replicas"):
            synk.fork(2, use_gpu=False, check_replicas=wrong)
    synchronize(2)
    with pytest.raises(TypeError, match="check_replicas"):
        synk.check_replicas("w")
    with pytest.raises(ValueError, match="no function"):
        synk.check_replicas(theano.shared(np.zeros(2)))


def drifting():
    """A step of Adam on each rank's own gradient, without an all-reduce."""
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
def test_drifting_replicas_are_warned_of_once(synchronize, every):
    synchronize(2, check_replicas=every)
    points = np.random.RandomState(0).randn(8, 3)
    parameters, step = drifting()
    offset = step._session().replicas._n_calls
    told = [caught(step, points) for _ in range(7)]
    first = next(i for i in range(1, 7) if not (offset + i + 1) % every)
    assert [len(one) for one in told] == [2 * (i == first) for i in range(7)]
    for text, var in zip(sorted(told[first]), sorted(parameters, key=str)):
        assert text.startswith(f"the replicas of {var} differ between ranks, by up to 0.")
        assert "synkhronos.broadcast" in text
    _, right = drifting()
    for _ in range(4):
        assert caught(right, points[:4].repeat(2, axis=0).reshape(4, 2, 3).transpose(1, 0, 2).reshape(8, 3)) == []


def test_training_as_it_should_be_is_not_warned_of(synchronize):
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
