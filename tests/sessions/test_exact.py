"""Exact functions on real ranks, compared with the serial program."""

import functools
import shutil

import numpy as np
import pytest
from backend import MRG_RandomStreams, RandomStreams, T, lasagne, pool_2d, theano, theano_only
from comparison import close

import synkhronos as synk

N = 11


def parameters():
    rng = np.random.RandomState(0)
    return [theano.shared(rng.randn(*shape) * 0.3) for shape in ((6, 5), (5,), (5, 3), (3,))]


def values(n, seed=1):
    rng = np.random.RandomState(seed)
    mask = (rng.rand(n) < 0.6) * 1.0
    mask[n // 2 :] = 0  # 0 in all rows of some ranks
    mask[0] = 1
    return rng.randn(n, 6), rng.randint(0, 3, n).astype("int32"), mask


def network(params):
    """Return inputs, outputs and updates of a network with batch normalisation and a masked loss."""
    x, y, mask = T.dmatrix("x"), T.ivector("y"), T.dvector("mask")
    w, b, v, c = params
    h = x.dot(w)
    h = T.nnet.relu((h - h.mean(0, keepdims=True)) / T.sqrt(h.var(0, keepdims=True) + 1e-4) + b)
    out = T.nnet.softmax(h.dot(v) + c)
    nll = -T.log(out[T.arange(y.shape[0]), y])
    loss = (mask * nll).sum() / mask.sum() + 1e-3 * sum((p**2).sum() for p in params) + 1e-3 * out.std()
    gradients = lasagne.updates.total_norm_constraint(T.grad(loss, params), 0.5)
    updates = lasagne.updates.adam(gradients, params, 0.01)
    return [x, y, mask], [loss, T.eq(out.argmax(1), y).mean(), out, out.max(0), nll, out.T], updates


@functools.cache
def networks():
    (inputs, outputs, ours), (others, serial, theirs) = network(parameters()), network(parameters())
    function = synk.function(inputs, outputs, updates=ours, exact=True)
    return function, list(ours), theano.function(others, serial, updates=theirs), list(theirs)


@pytest.mark.parametrize("n", [N, 37, 2, 1])
def test_a_net_trained_by_adam(session, n):
    function, ours, reference, theirs = networks()
    for mine, other in zip(ours, theirs):
        mine.set_value(other.get_value())
    synk.broadcast(ours)
    for seed in range(3):
        given = values(n, seed)
        close(function(*given), reference(*given))
    close(ours, theirs)
    assert not synk.check_replicas()


def draws(streams):
    x, w = T.dmatrix("x"), theano.shared(np.full((6, 2), 0.1))
    mask = streams.binomial(size=x.shape, p=0.5, dtype="float64")
    noise = streams.normal(size=(x.shape[0], 2), dtype="float64")
    rows = streams.uniform(size=(3,), dtype="float64")
    loss = ((x * mask).dot(w) + noise).mean() + rows.sum()
    return [x], [loss, mask, noise, rows], [(w, w - T.grad(loss, w))]


@functools.cache
def drawing(kind):
    ours, theirs = draws(kind(5)), draws(kind(5))
    return synk.function(*ours[:2], updates=ours[2], exact=True), theano.function(*theirs[:2], updates=theirs[2])


@pytest.mark.parametrize("kind", [RandomStreams, MRG_RandomStreams])
@pytest.mark.parametrize("n", [N, 2])
def test_draws_are_those_of_the_serial_program(session, kind, n):
    function, reference = drawing(kind)
    for seed in range(2):
        x = values(n, seed)[0]
        close(function(x), reference(x))


@pytest.mark.parametrize("other", [{"exact": False}, {"exact": True, "random": "own"}], ids=["plain", "own"])
def test_a_stream_is_for_one_kind_of_functions(session, other):
    x, serial = T.dmatrix("x"), {"exact": True}
    for first, second in ((serial, other), (other, serial)):
        drawn = x * RandomStreams(3).uniform(x.shape)
        synk.function([x], drawn, **first)
        with pytest.raises(ValueError, match="make a RandomStreams for each kind"):
            synk.function([x], drawn, **second)


@functools.cache
def steps():
    """Return a function that uses most arguments of functions, and the serial one, each with its variables."""
    made = []
    for build in (functools.partial(synk.function, exact=True), theano.function):
        x, y, scale, shift = T.dmatrix("x"), T.ivector("y"), T.dscalar("scale"), T.dmatrix("shift")
        table, data = theano.shared(np.arange(12.0).reshape(4, 3)), T.dmatrix("data")
        count = theano.shared(0, "count")
        h = table[y] * scale + data[:, :3] - shift
        loss = (h**2).mean() + T.sqr(h.sum(axis=1)).std()
        outputs = [loss, h, h[::-1], h.max(axis=0), h.argmax(axis=0), T.sort(h, axis=0), x.shape[0] + 1, h.T, h[:, 0]]
        updates = [(table, table - 0.1 * T.grad(loss, table)), (count, count + x.shape[0])]
        own = {"bcast_inputs": [scale, shift]} if build is not theano.function else {}
        inputs = [x, y] if own else [x, y, scale, shift]
        function = build(inputs, outputs, updates=updates, givens={data: x * 2}, name="steps", **own)
        made.append((function, [table, count]))
    return made


def prepared():
    (function, ours), (reference, theirs) = steps()
    for variables in (ours, theirs):
        for variable, value in zip(variables, (np.arange(12.0).reshape(4, 3) / 7, 0)):
            variable.set_value(value)
    synk.broadcast(ours)
    return function, reference, ours, theirs


def batch(n, seed=0):
    rng = np.random.RandomState(seed)
    return rng.randn(n, 4), rng.randint(0, 4, n).astype("int32")


@pytest.mark.parametrize("n", [N, 3, 1])
def test_broadcast_inputs_givens_updates_and_orders(session, n):
    function, reference, ours, theirs = prepared()
    x, y = batch(n)
    shift = np.ones((n, 3)) * np.arange(n)[:, None]
    close(function(x, y, 0.5, shift), reference(x, y, 0.5, shift))
    close(ours, theirs)
    assert not synk.check_replicas()


def test_data_batches_subsets_and_the_comparison_with_theano(session):
    function, reference, _, _ = prepared()
    x, y = batch(N)
    data = function.build_inputs(x, y, 0.5, np.ones((5, 3)))
    rows = [7, 1, 2, 9, 10]
    everything = reference(x[rows], y[rows], 0.5, np.ones((5, 3)))
    got = function(*data, batch=rows, output_subset=[1, 0, 7], check_against_theano=True)
    close(got, [everything[i] for i in (1, 0, 7)])
    close(function(*data, batch=slice(2, 7)), reference(x[2:7], y[2:7], 0.5, np.ones((5, 3))))


@functools.cache
def picking():
    x, y = T.dmatrix("x"), T.lvector("y")
    outputs = [x * 2, x.sum(axis=0), x[::-1], x[T.arange(x.shape[0], dtype="int8"), y], x.shape[0]]
    return synk.function([x, y], outputs, exact=True), theano.function([x, y], outputs)


@pytest.mark.parametrize("n", [0, 200])  # a range of int8 overflows in the serial program, too
def test_no_rows_and_more_rows_than_int8_counts(session, n):
    function, reference = picking()
    given = np.arange(2.0 * n).reshape(n, 2), np.zeros(n, "int64")
    np.testing.assert_equal(function(*given), reference(*given))


def test_lengths_that_the_serial_program_refuses_are_refused(session):
    function, reference, ours, theirs = prepared()
    x, y = batch(N)
    with pytest.raises(ValueError):
        reference(x, y, 0.5, np.ones((4, 3)))
    with pytest.raises((ValueError, synk.WorkerError), match="used with a sharded array"):
        function(x, y, 0.5, np.ones((4, 3)))
    close(ours, theirs)


def test_invalid_functions_are_refused(session):
    x, row, w = T.dmatrix("x"), T.drow("row"), theano.shared(np.arange(15.0).reshape(5, 3))
    for arguments, message in [
        (([x], (x.sum(), "sum")), "leave the ops out"),
        (([x], x.sum(), None, [(w, w * 2, "avg")]), "leave the ops out"),
        (([row], row.sum()), "has no rows. Pass an input in bcast_inputs"),
        (([x], synk.averaged(x.sum())), "leave out averaged"),
    ]:
        with pytest.raises(ValueError, match=message):
            synk.function(*arguments, exact=True)
    with pytest.raises(theano.compile.UnusedInputError):
        synk.function([x], w.sum(), exact=True)
    function = synk.function([x], x.sum() + w.sum(), exact=True)
    synk.scatter(w, np.ones((10, 3)))
    for _ in range(2):
        with pytest.raises(ValueError, match="was scattered"):
            function(np.ones((N, 2)))


@pytest.mark.numba
def test_the_table_of_collectives(session):
    x, y, w = T.dmatrix("x"), T.ivector("y"), theano.shared(np.ones((2, 3)), "w")
    out = T.nnet.softmax(x.dot(w))
    loss = -T.log(out[T.arange(y.shape[0]), y]).mean()
    function = synk.function([x, y], [loss, out], updates=[(w, w - T.grad(loss, w))], exact=True)
    kinds = [entry.collective for entry in function.partition]
    assert kinds == ["all-reduce (sum)"] * 2
    assert all("test_exact.py" in entry.line for entry in function.partition if entry.line)
    assert {entry.n_bytes for entry in function.partition} == {8, None}
    function(np.ones((N, 2)), np.zeros(N, "int32"))
    assert {entry.n_bytes for entry in function.partition} == {8, 48}
    assert {entry.meeting for entry in function.partition} == {1}
    assert "collectives: 2; meetings: 1; bytes: 56" in repr(function.partition)
    gathers = synk.function([x], T.cumsum(x, axis=0)[::-1].sum(), exact=True).partition
    assert "all-gather" in repr(gathers) and "rows along axis 0" in repr(gathers)
    assert "<td>all-gather</td>" in gathers._repr_html_()


def test_lines_of_gradients_are_those_of_the_program(session):
    x, w = T.dmatrix("x"), theano.shared(np.ones((2, 3)), "w")
    h = T.tanh(x.dot(w))
    updates = lasagne.updates.adam(T.grad(T.sqr(h - h.mean(axis=0)).mean(), [w]), [w])
    entries = synk.function([x], updates=updates, exact=True).partition
    assert entries
    assert [entry.meeting for entry in entries] == sorted(entry.meeting for entry in entries)
    assert all(entry.line.startswith("test_exact.py") for entry in entries)


def test_the_picture_of_the_graph(session, tmp_path):
    x = T.dmatrix("x")
    partition = synk.function([x], (x - x.mean(axis=0)).std(), exact=True).partition
    partition.picture(tmp_path / "graph.dot")
    text = (tmp_path / "graph.dot").read_text()
    assert text.startswith("digraph")
    assert "all-reduce (sum)" in text
    if shutil.which("dot"):
        partition.picture(tmp_path / "graph.svg")
        assert "<svg" in (tmp_path / "graph.svg").read_text()
    name, words = ("graph.nothing", "dot failed") if shutil.which("dot") else ("graph.svg", "Graphviz")
    with pytest.raises(RuntimeError, match=words):
        partition.picture(tmp_path / name)


def images_and_words(params):
    """Return inputs, outputs and updates of a float32 network with convolution, pooling, dropout and an embedding."""
    images, words, y = T.ftensor4("images"), T.imatrix("words"), T.ivector("y")
    filters, table, w = params
    h = pool_2d(T.nnet.relu(T.nnet.conv2d(images, filters)), (2, 2), ignore_border=True)
    h = (h - h.mean((0, 2, 3), keepdims=True)) / T.sqrt(h.var((0, 2, 3), keepdims=True) + np.float32(1e-3))
    h = T.concatenate([h.flatten(2), table[words].mean(axis=1)], axis=1)
    h *= MRG_RandomStreams(3).binomial(h.shape, p=0.8, dtype="float32")
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(h.dot(w)), y).mean()
    updates = lasagne.updates.momentum(T.grad(loss, params), params, np.float32(0.1), np.float32(0.9))
    return [images, words, y], [loss, h], updates


@functools.cache
def vision():
    rng = np.random.RandomState(2)
    made = []
    arrays = [(rng.randn(*shape) * 0.2).astype("float32") for shape in ((3, 1, 3, 3), (9, 4), (16, 5))]
    for build in (functools.partial(synk.function, exact=True), theano.function):
        params = list(map(theano.shared, arrays))
        inputs, outputs, updates = images_and_words(params)
        made.append((build(inputs, outputs, updates=updates), params))
    return made


@theano_only("convolution and pooling")
def test_a_convolutional_net_with_an_embedding(session):
    (function, ours), (reference, theirs) = vision()
    for seed in range(2):
        rng = np.random.RandomState(seed)
        given = [rng.randn(N, 1, 6, 6).astype("float32"), rng.randint(0, 9, (N, 3)), rng.randint(0, 5, N)]
        given = [value.astype("int32") if value.dtype == "int64" else value for value in given]
        close(function(*given), reference(*given), rtol=1e-4, atol=1e-5)
    close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not synk.check_replicas()
    assert all("all-reduce" in entry.collective for entry in function.partition)


def test_a_row_that_fails_fails_the_call_and_nothing_else(session):
    function, reference, _, _ = prepared()
    x, y = batch(N)
    y[-1] = 99  # on one rank
    with pytest.raises((IndexError, synk.WorkerError)):
        function(x, y, 0.5, np.ones((N, 3)))
    function, reference, _, _ = prepared()
    close(function(*batch(N), 0.5, np.ones((N, 3))), reference(*batch(N), 0.5, np.ones((N, 3))))
