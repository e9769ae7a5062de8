"""Exact functions that compute in blocks of rows: values of the serial program, and refused programs."""

import functools

import numpy as np
import pytest
from backend import RandomStreams, T, theano
from comparison import close

import synkhronos as synk
from synkhronos._sharding import blocking as blocks


@functools.cache
def regression():
    """Return an exact function that trains a regression in blocks, and the serial one, each with its variables."""

    def build(make, **own):
        x, y, group, scale = T.dmatrix("x"), T.dvector("y"), T.lvector("group"), T.dscalar("scale")
        w = theano.shared(np.linspace(-1, 1, 3), "w")
        level = theano.shared(np.linspace(0, 1, 4), "level")
        residual = (y - T.dot(x, w) - level[group]) / scale
        loss = T.sqr(residual).mean() + T.log(scale) + (level**2).sum()
        updates = [(var, var - 0.1 * T.grad(loss, var)) for var in (w, level)]
        names = {"bcast_inputs": [scale]} if own else {}
        inputs = [x, y, group] if own else [x, y, group, scale]
        count = T.sum(residual > 0)
        return make(inputs, [loss, count, x.shape[0]], updates=updates, **names, **own), [w, level]

    real, blocks._BYTES = blocks._BYTES, 5 * 8 * 7  # seven rows of five numbers
    try:
        made = build(synk.function, exact=True, blocked=True)
    finally:
        blocks._BYTES = real
    return made, build(theano.function)


@pytest.mark.parametrize("n", [101, 14, 3, 1])
def test_blocks_of_rows(session, n):
    (function, ours), (reference, theirs) = regression()
    rng = np.random.RandomState(n)
    for _ in range(2):
        given = rng.randn(n, 3), rng.randn(n), rng.randint(0, 4, n)
        close(function(*given, 1.5), reference(*given, 1.5), rtol=1e-12, atol=1e-13)
    close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert not synk.check_replicas()


def test_blocks_in_batches_and_slices(two):
    (function, ours), (reference, theirs) = regression()
    rng = np.random.RandomState(0)
    arrays = rng.randn(60, 3), rng.randn(60), rng.randint(0, 4, 60)
    data = [synk.data(array) for array in arrays]
    picks = rng.permutation(60)[:41]
    for options in ({"batch": picks}, {"batch": slice(5, 50)}, {"num_slices": 3}):
        batch = options.get("batch", slice(None))
        expected = reference(*[array[batch] for array in arrays], 0.7)
        close(function(*data, 0.7, **options), expected, rtol=1e-12, atol=1e-13)
    close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int8"])
def test_ops_of_blocks(session, monkeypatch, dtype):
    monkeypatch.setattr(blocks, "_BYTES", 40)
    x = T.matrix("x", dtype=dtype)
    outputs = [x.max(axis=0), x.min(), T.all(x > -100), T.any(T.gt(x, 100), axis=0), (x % 3 + 1).prod(axis=0), x.sum()]
    if dtype == "int8":  # the serial product of the backends has other bits than NumPy's
        del outputs[4]
    function = synk.function([x], outputs, exact=True, blocked=True)
    reference = theano.function([x], outputs)
    for n in (23, 3, 1):
        given = np.random.RandomState(n).randint(-99, 99, (n, 2)).astype(dtype)
        close(function(given), reference(given), rtol=1e-6 if dtype == "float32" else 1e-13)
    assert "meetings: 1" in str(function.partition)


@functools.cache
def density_of_points(plan):
    """Return an exact function of several points, a serial one of one point, and variables of both."""
    x, y, group = (theano.shared(np.zeros(shape), name) for shape, name in (((0, 2), "x"), (0, "y"), (0, "group")))
    whole = [theano.shared(one.get_value(), one.name) for one in (x, y, group)]
    point, scale = T.dvector("point"), T.dscalar("scale")

    def build(x, y, group):
        level, slope = T.exp(point[:3] * scale), point[3:]
        residual = y - T.dot(x, slope) - level[T.cast(group, "int64")]
        checked = T.all(residual > -50)
        density = -T.sqr(residual).sum() - (point**2).sum()
        return [density, T.grad(density, point), checked, T.sqr(residual).max() + scale]

    function = synk.function(
        [],
        build(x, y, group),
        bcast_inputs=[point, scale],
        sliceable_shareds=[x, y, group],
        whole=dict(zip((x, y, group), whole)),
        exact=True,
        blocked=True,
        mapped=[point],
        plan=plan,
    )
    return function, theano.function([point, scale], build(*whole)), (x, y, group), whole


@pytest.mark.parametrize("plan", ["rows", "controller"])
def test_several_points(session, monkeypatch, plan):
    monkeypatch.setattr(blocks, "_BYTES", 2500)
    function, reference, scattered, whole = density_of_points(plan)
    rng = np.random.RandomState(0)
    rows = rng.randn(83, 2), rng.randn(83), rng.randint(0, 3, 83).astype("float64")
    for one, everything, value in zip(scattered, whole, rows):
        synk.scatter(one, value)
        everything.set_value(value)
    points = rng.randn(4, 5)
    expected = [reference(point, 0.5) for point in points]
    for k in (4, 1, 3):
        found = function(points[:k], 0.5)
        for stack, values in zip(found, zip(*expected)):
            assert len(stack) == k and stack.dtype == values[0].dtype
            close(stack, values[:k], rtol=1e-12, atol=1e-13)
        for i in range(k):  # equal bit by bit
            alone = function(points[i : i + 1], 0.5)
            assert all(np.array_equal(stack[i : i + 1], one) for stack, one in zip(found, alone))
    if plan == "rows":
        assert "meetings: 1" in str(function.partition)


def test_several_values_of_two_inputs(three):
    x, p, q = T.dvector("x"), T.dscalar("p"), T.dvector("q")
    outputs = [(x * p).sum() * q.sum(), (T.outer(x, q)).max(axis=0) + p, (x**2).sum()]
    function = synk.function([x], outputs, [p, q], exact=True, blocked=True, mapped=[q, p])
    reference = theano.function([x, p, q], outputs)
    rows, numbers, vectors = np.arange(7.0), np.array([2.0, -1.0, 0.5]), np.arange(6.0).reshape(3, 2) - 2
    found = function(rows, numbers, vectors)
    for stack, values in zip(found, zip(*(reference(rows, *each) for each in zip(numbers, vectors)))):
        close(stack, np.stack(values), rtol=1e-13)
    for fewer in ((numbers[:2], vectors), (numbers, vectors[:2])):
        with pytest.raises((AssertionError, IndexError, synk.WorkerError)):
            function(rows, *fewer)
    close(function(rows, numbers, vectors), found, rtol=0)


def test_mapped_inputs_are_checked(two):
    x, p = T.dvector("x"), T.dscalar("p")
    total = (x * p).sum()
    for options, mapped, message in (({"blocked": True}, [x], "mapped has x"), ({}, [p], "mapped with blocked=False")):
        with pytest.raises(ValueError, match=message):
            synk.function([x], total, bcast_inputs=[p], exact=True, mapped=mapped, **options)
    w = theano.shared(0.0)
    with pytest.raises(ValueError, match="blocked=True, and no updates"):
        synk.function([x], total, [p], {w: total}, exact=True, blocked=True, mapped=[p])
    with pytest.raises(ValueError, match="without exact=True"):
        synk.function([x], total, [p], mapped=[p])


def test_blocks_need_one_exchange(three):
    (function, _), _ = regression()
    table = str(function.partition)
    assert "meetings: 1" in table and "all-reduce (sum)" in table and "all-gather" not in table


def test_blocks_of_scattered_variables(two):
    x = theano.shared(np.zeros((0, 2)), "x")
    given = np.random.RandomState(0).randn(90, 2)
    p, rows = T.dvector("p"), T.dmatrix()
    loss, serial = (T.exp(-T.sqr(one - p).sum(axis=1)).sum() for one in (x, rows))
    options = {"bcast_inputs": [p], "sliceable_shareds": [x], "exact": True, "blocked": True}
    function = synk.function([], [loss, T.grad(loss, p)], **options)
    synk.distribute()
    reference = theano.function([rows, p], [serial, T.grad(serial, p)])
    for length in (90, 31):  # the second time with other rows
        synk.scatter(x, given[:length])
        for _ in range(2):
            close(function([0.5, -1]), reference(given[:length], [0.5, -1]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: 2 * x, "is not combined over rows"),
        (lambda x: T.sort(x).sum(), "otherwise than by one of"),
        (lambda x: T.sqr((x - x.mean()) / x.std()).sum(), "rows together with a value of all ranks"),
        (lambda x: RandomStreams(1).normal(x.shape).sum() + x.sum(), "without random draws"),
    ],
)
def test_other_collectives_are_refused(two, build, message):
    x = T.dvector("x")
    with pytest.raises(ValueError, match=message):
        synk.function([x], build(x), exact=True, blocked=True)


def test_blocks_need_rows_and_exactness(two):
    x = T.dvector("x")
    with pytest.raises(ValueError, match="plan or whole without exact=True"):
        synk.function([x], x.sum(), blocked=True)
    with pytest.raises(ValueError, match="blocked=True is for rows"):
        synk.function([], x.sum(), bcast_inputs=[x], exact=True, blocked=True)
