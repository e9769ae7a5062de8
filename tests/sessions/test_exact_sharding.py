"""Exact functions of other axes, scattered variables and intermediate variables; slices; random streams of ranks."""

import contextlib
import functools

import numpy as np
import pytest
from backend import MRG_RandomStreams, RandomStreams, T, lasagne, on_theano, random_state, theano, uniform
from comparison import close

import synkhronos as synk

N = 11
DATA, LABELS = np.random.RandomState(4).randn(40, 4), np.random.RandomState(5).randint(0, 3, 40)
FAILS = (ValueError, synk.WorkerError)


def both(build):
    """Return the exact function and the serial one, each with its own shared variables."""
    return build(functools.partial(synk.function, exact=True), True), build(theano.function, False)


def same(ours, theirs):
    close(ours, theirs)
    assert not synk.check_replicas()


# -- rows along other axes


@functools.cache
def time_major():
    def build(make, exact):
        x, y, mask = T.dtensor3("x"), T.dmatrix("y"), T.dmatrix("mask")
        w = theano.shared(np.arange(8.0).reshape(4, 2) / 9, "w")
        h = T.tanh(x.dot(w)) * mask.dimshuffle(0, 1, "x")
        h = (h - h.mean(axis=(0, 1))) / (h.std(axis=(0, 1)) + 0.1)
        loss = T.sqr(h.sum(axis=0) - y).mean()
        own = {"shard": {x: 1, mask: -1}} if exact else {}
        outputs = [loss, h, h.sum(axis=0), x[0], x.shape[1]]
        return make([x, y, mask], outputs, updates=[(w, w - 0.1 * T.grad(loss, w))], **own), w

    return both(build)


def sequences(n, seed=0):
    rng = np.random.RandomState(seed)
    return rng.randn(5, n, 4), rng.randn(n, 2), (rng.rand(5, n) < 0.7) * 1.0


@pytest.mark.parametrize("n", [N, 3, 1])
def test_time_major_inputs(session, n):
    (function, ours), (reference, theirs) = time_major()
    for seed in range(2):
        close(function(*sequences(n, seed)), reference(*sequences(n, seed)))
    same([ours], [theirs])


@pytest.mark.parametrize("batch", [slice(2, 9), 7, [4, 1, 10, 0, 2], np.arange(N) % 2 == 0])
def test_batches_along_other_axes(session, batch):
    (function, ours), (reference, theirs) = time_major()
    x, y, mask = sequences(N)
    rows = slice(batch) if isinstance(batch, int) else batch
    for given in ((x, y, mask), function.build_inputs(x, y, mask)):
        expected = reference(x[:, rows], y[rows], mask[:, rows])
        close(function(*given, batch=batch), expected)
    same([ours], [theirs])
    function(x, y, mask, check_against_theano=True)
    reference(x, y, mask)


def test_rows_along_different_axes_must_agree(session):
    (function, _), _ = time_major()
    x, y, mask = sequences(N)
    with pytest.raises(ValueError, match=r"x: 11, y: 10, mask: 11"):
        function(x, y[:10], mask)


# -- variables of the graph


@functools.cache
def minibatches():
    def build(make, exact):
        data, labels = theano.shared(DATA, "data"), theano.shared(LABELS, "labels")
        w = theano.shared(np.zeros((4, 3)), "w")
        x, y, i, n = T.dmatrix("x"), T.lvector("y"), T.lscalar("i"), T.lscalar("n")
        h = (x - x.mean(axis=0)).dot(w)
        out = T.nnet.softmax(h)
        loss = -T.log(out[T.arange(y.shape[0]), y]).mean() + 1e-3 * (w**2).sum()
        updates = lasagne.updates.adam(loss, [w])
        own = {"shard": [x, y], "inputs": [], "bcast_inputs": [i, n]} if exact else {"inputs": [i, n]}
        givens = {x: data[i * n : (i + 1) * n], y: labels[i * n : (i + 1) * n]}
        return make(outputs=[loss, out, out.argmax(axis=1)], updates=updates, givens=givens, **own), list(updates)

    return both(build)


@pytest.mark.parametrize("n", [13, 7, 2, 1])
def test_minibatches_by_givens(session, n):
    (function, ours), (reference, theirs) = minibatches()
    for i in range(3):
        close(function(i, n), reference(i, n))
    same(ours, theirs)
    assert {entry.collective for entry in function.partition} == {"all-reduce (sum)", "all-gather"}


@functools.cache
def tutorial(n):
    """Build functions of Theano's tutorial: labels are cast from a shared variable, and the only input is an index."""

    def build(make, exact):
        data, labels = theano.shared(DATA, "data"), T.cast(theano.shared(LABELS * 1.0, "labels"), "int32")
        w = theano.shared(np.zeros((4, 3)), "w")
        x, y, i = T.dmatrix("x"), T.ivector("y"), T.lscalar("i")
        out = T.nnet.softmax((x - x.mean(axis=0)).dot(w))
        loss = -T.log(out[T.arange(y.shape[0]), y]).mean()
        givens = {x: data[i * n : (i + 1) * n], y: labels[i * n : (i + 1) * n]}
        with synk.parallelize() if exact else contextlib.nullcontext():
            train = theano.function([i], loss, updates=[(w, w - 0.1 * T.grad(loss, w))], givens=givens)
            test = theano.function([i], [T.neq(out.argmax(axis=1), y).sum(), out], givens=givens)
        return train, test, w

    return both(build)


@pytest.mark.parametrize("n", [13, 2])
def test_minibatches_of_tutorials(session, n):
    (train, test, ours), (serial_train, serial_test, theirs) = tutorial(n)
    for w in (ours, theirs):
        w.set_value(np.zeros((4, 3)))
    for i in (0, 2, 3, 50):  # full, short and empty minibatches
        close(train(i), serial_train(i))
        close(test(i), serial_test(i))
    same([ours], [theirs])
    assert {entry.collective for entry in train.partition} == {"all-reduce (sum)"}
    assert test.partition


def test_slices_that_are_not_divided(session, recwarn):
    data, i = theano.shared(np.arange(40.0).reshape(5, 8), "data"), T.lscalar("i")
    build = functools.partial(synk.function, bcast_inputs=[i], exact=True)
    for sliced in (data[:, i : i + 3], data[i::2]):
        with pytest.warns(RuntimeWarning, match="nothing in it is sharded.* is a minibatch, pass shard="):
            function = build([], sliced.sum())
        close(function(1), theano.function([i], sliced.sum())(1))
    recwarn.clear()
    for rows, other in ((data[i : i + 3], data[i + 1 : i + 2]), (data[i], data[1:3])):
        close(build([], rows.sum() + other.sum())(1), theano.function([i], rows.sum() + other.sum())(1))
    assert not [one for one in recwarn if "minibatch" in str(one.message)]


@functools.cache
def mixed():
    def build(make, exact):
        x, i = T.dmatrix("x"), T.lscalar("i")
        data, w = theano.shared(np.arange(60.0).reshape(20, 3), "data"), theano.shared(np.ones(3), "w")
        rows = data[i:]
        rows.name = "rows"
        h = T.tanh(rows * w) + x
        loss = (h - h.max(axis=0)).mean()
        own = {"shard": {rows: 0}, "bcast_inputs": [i]} if exact else {}
        inputs = [x] if exact else [x, i]
        return make(inputs, [loss, h], updates=[(w, w - 0.1 * T.grad(loss, w))], **own), w

    return both(build)


def test_variables_of_the_graph_next_to_inputs(session):
    (function, ours), (reference, theirs) = mixed()
    for n in (N, 2, 1):
        x = np.random.RandomState(n).randn(n, 3)
        close(function(x, 20 - n), reference(x, 20 - n))
    same([ours], [theirs])
    with pytest.raises(FAILS, match=r"different numbers of rows: x: 11, rows.*: 10"):
        function(np.ones((N, 3)), 10)
    close(function(np.ones((4, 3)), 16)[1], reference(np.ones((4, 3)), 16)[1])


def test_a_variable_between_others(session):
    x, w = T.dmatrix("x"), theano.shared(np.ones((6, 3)), "w")
    table = T.tanh(w) + 1
    function = synk.function([], [table.sum(axis=0), (table * 2).T], shard=[table], exact=True, name="table")
    close(function(), function.as_theano())
    sums = synk.function([], x.sum(axis=0), bcast_inputs=[x], shard=[x], exact=True)
    for n in (N, 1):
        close(sums(np.ones((n, 2))), np.ones((n, 2)).sum(axis=0))


# -- scattered variables


@functools.cache
def held():
    def build(make, exact):
        data, seen = theano.shared(np.zeros((1, 3)), "data"), theano.shared(np.zeros(1), "seen")
        w, y = theano.shared(np.ones(3), "w"), T.dvector("y")
        h = (data - data.mean(axis=0)).dot(w) - y
        loss = T.sqr(h).mean()
        updates = [(w, w - 0.1 * T.grad(loss, w)), (seen, seen * 0.5 + h**2)]
        training = make([y], [loss, h], updates=updates, **({"sliceable_shareds": [data, seen]} if exact else {}))
        own = {"sliceable_shareds": [data]} if exact else {}
        looking = make([y], [data.max(axis=0), data.dot(w) + y, data.shape[0]], **own)
        alone = make([], [data.std(), data * 2], **own)
        return (training, looking, alone), (data, seen, w)

    return both(build)


def test_scattered_variables(session):
    (ours, (data, seen, w)), (theirs, (data_, seen_, w_)) = held()
    rng = np.random.RandomState(3)
    values, y = rng.randn(N, 3), rng.randn(N)
    synk.scatter(data, values)
    synk.scatter(seen, np.zeros(N))
    synk.broadcast(w, np.ones(3))
    for variable, value in ((data_, values), (seen_, np.zeros(N)), (w_, np.ones(3))):
        variable.set_value(value)
    for _ in range(3):
        close(ours[0](y), theirs[0](y))
    same([w], [w_])
    close(synk.gather(seen, nd_up=0), seen_.get_value())
    close(ours[1](y), theirs[1](y))
    close(ours[2](), theirs[2]())
    with pytest.raises(ValueError, match=r"the scattered inputs have 10 rows, and data 11"):
        ours[1](y[:10])
    with pytest.raises(ValueError, match="a call that updates seen, which is sharded"):
        ours[0](y, batch_s=[0])


def test_rows_that_batch_s_picks(session):
    (ours, (data, *_)), _ = held()
    values = np.random.RandomState(3).randn(3 * session, 3)
    synk.scatter(data, values)
    for batch_s, rows in ((slice(0, 2), [0, 1]), ([2, 0], [2, 0])):
        picked = np.concatenate([values[3 * rank : 3 * rank + 3][rows] for rank in range(session)])
        close(ours[2](batch_s=batch_s), [picked.std(), picked * 2])
        close(ours[1](np.arange(2.0 * session), batch_s=batch_s)[0], picked.max(axis=0))


def test_replicated_or_missing_rows_are_refused(session):
    data = theano.shared(np.ones((4, 2)), "data")
    function = synk.function([], data.sum(), sliceable_shareds=[data], exact=True)
    with pytest.raises(ValueError, match="data is in sliceable_shareds, but is equal on all ranks"):
        function()
    synk.scatter(data, np.ones((max(session - 1, 0), 2)))
    with pytest.raises(ValueError, match="at least one on each"):
        function()
    synk.scatter(data, np.ones((session, 2)))
    close(function(), 2.0 * session)


# -- slices


@functools.cache
def sliced():
    def build(make, exact):
        x, y = T.dmatrix("x"), T.ivector("y")
        w = theano.shared(np.arange(12.0).reshape(4, 3) / 20, "w")
        out = T.nnet.softmax(x.dot(w))
        loss = T.nnet.categorical_crossentropy(out, y).mean() + 1e-3 * (w**2).sum()
        outputs = [loss, out, out.max(), T.eq(out.argmax(axis=1), y).mean(), out.T, x.shape[0]]
        updates = lasagne.updates.adam(lasagne.updates.total_norm_constraint(T.grad(loss, [w]), 0.1), [w])
        return make([x, y], outputs, updates=updates), list(updates)

    return both(build)


@pytest.mark.parametrize("num_slices", [2, 4, 20])
def test_slices(session, num_slices):
    (function, ours), (reference, theirs) = sliced()
    for n in (N, 2, 1):
        x, y = np.random.RandomState(n).randn(n, 4), np.arange(n, dtype="int32") % 3
        close(function(x, y, num_slices=num_slices), reference(x, y))
        expected = reference(x, y)
        close(function(x, y, num_slices=num_slices, output_subset=[3, 1]), [expected[3], expected[1]])
    same(ours, theirs)


@functools.cache
def in_pieces():
    x, y = T.dmatrix("x"), T.dtensor3("y")
    data, parts = theano.shared(np.ones((N, 3)), "data"), theano.shared(np.ones((1, 3)), "parts")
    w = theano.shared(np.arange(4.0).reshape(2, 2), "w")
    batch_first = synk.function([x], [(x * data).mean(), (x * data).sum(axis=1)], shard=[data], exact=True)
    held = synk.function([x], [(x * parts).mean(), x * parts], sliceable_shareds=[parts], exact=True)
    major = synk.function([y], [y.dot(w).mean(), y.sum(axis=(0, 2)), y[1]], shard={y: 1}, exact=True)
    return batch_first, held, major, parts


@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_slices_along_other_axes_and_of_variables(session, num_slices):
    batch_first, held, major, parts = in_pieces()
    rng = np.random.RandomState(5)
    x, y, values = rng.randn(N, 3), rng.randn(4, N, 2), rng.randn(3 * session, 3)
    close(batch_first(x, num_slices=num_slices), batch_first.as_theano(x))
    for given, batch in ((y, None), (synk.data(y), slice(2, 9)), (synk.data(y), [4, 1, 0])):
        some = y if batch is None else y[:, batch]
        close(major(given, batch=batch, num_slices=num_slices), major.as_theano(some))
    synk.scatter(parts, values)
    picked = np.concatenate([values[3 * rank + 1 : 3 * rank + 3] for rank in range(session)])
    x = rng.randn(len(picked), 3)
    close(held(x, batch_s=slice(1, 3), num_slices=num_slices), [(x * picked).mean(), x * picked])


def test_slices_do_not_change_updates_without_rows(session):
    """Slices of unequal length do not change how ranks round an update without rows."""
    x, decayed = T.dmatrix("x"), theano.shared(np.random.RandomState(3).randn(50), "decayed")
    function = synk.function([x], x.max(axis=1), updates=[(decayed, 0.7 * decayed)], exact=True)
    expected = 0.7 * decayed.get_value()
    function(np.ones((N, 2)), num_slices=2)
    np.testing.assert_array_equal(decayed.get_value(), expected)
    assert synk.check_replicas([decayed]) == {}


def test_without_optimisation(session):
    x = T.dmatrix("x")
    function = synk.function([x], (x - x.mean(axis=0)).std(), exact=True, mode=theano.Mode("py", None))
    given = np.random.RandomState(6).randn(N, 2)
    close(function(given), (given - given.mean(axis=0)).std())
    assert {entry.meeting for entry in function.partition} == {None}


def test_refused_slices_name_the_variable(session):
    x = T.dmatrix("x")
    centred = x - x.mean(axis=0)
    centred.name = "centred"
    function = synk.function([x], T.sqr(centred).sum(), exact=True)
    words = r"num_slices: centred \(test_exact_sharding.py:\d+ centred = x - x.mean.*without slices"
    with pytest.raises(ValueError, match=words):
        function(np.ones((N, 2)), num_slices=2)
    drawn = synk.function([x], (x * RandomStreams(2).uniform(x.shape)).sum(), exact=True)
    with pytest.raises(ValueError, match=r'\(\w+\.py:\d+ .* for each row, build .* random="own"'):
        drawn(np.ones((N, 2)), num_slices=2)
    common = RandomStreams(3).uniform((2,))
    own = synk.function([x], (x * RandomStreams(2).uniform(x.shape) + common).sum(), exact=True, random="own")
    with pytest.raises(ValueError, match=r"\(\w+\.py:\d+ .*a smaller batch$"):
        own(np.ones((N, 2)), num_slices=2)
    data = theano.shared(np.ones((N, 2)), "data")
    inside = synk.function([], data.sum(), shard=[data], exact=True)
    with pytest.raises(ValueError, match="no scattered inputs and variables"):
        inside(num_slices=2)
    close(function(np.ones((N, 2))), 0)


# -- random streams of ranks


@functools.cache
def own_streams(kind):
    streams = kind(7)
    x, w = T.dmatrix("x"), theano.shared(np.full(3, 0.5), "w")
    mask = streams.binomial(size=x.shape, p=0.5, dtype="float64")
    common = streams.uniform(size=(3,), dtype="float64")
    loss = T.sqr((x * mask).dot(w) - 1).mean() + common.sum()
    updates = [(w, w - 0.1 * T.grad(loss, w))]
    return synk.function([x], [mask, common, loss], updates=updates, exact=True, random="own"), w


@pytest.mark.parametrize("kind", [RandomStreams, MRG_RandomStreams])
def test_streams_of_their_own(session, kind):
    function, w = own_streams(kind)
    synk.broadcast(w, np.full(3, 0.5))
    n = 200 * session
    given = np.ones((n, 3))
    first, second = function(given), function(given)
    masks = [first[0][200 * rank : 200 * rank + 200] for rank in range(session)] + [second[0][:200]]
    assert all((one != other).any() for i, one in enumerate(masks) for other in masks[:i])
    assert abs(first[0].mean() - 0.5) < 0.1
    expected = np.full(3, 0.5)
    for mask, common, loss in (first, second):
        close(loss, np.square((given * mask).dot(expected) - 1).mean() + common.sum())
        h = (given * mask).dot(expected) - 1
        expected = expected - 0.1 * 2 * (given * mask * h[:, None]).mean(axis=0)
    close(w.get_value(), expected)
    with pytest.raises(ValueError, match="all rows at once"):  # common draws need all rows at once
        function(given, num_slices=2)
    for few in (1, 2):
        mask, _, loss = function(np.ones((few, 3)))
        assert mask.shape == (few, 3)
    assert not synk.check_replicas()


@functools.cache
def noise():
    x = T.dmatrix("x")
    drawn = RandomStreams(9).uniform(x.shape)
    return synk.function([x], [drawn, (x * drawn).sum()], exact=True, random="own")


def test_streams_of_their_own_in_slices(session):
    given, function = np.ones((40, 2)), noise()
    for num_slices in (1, 4):
        drawn, total = function(given, num_slices=num_slices)
        assert drawn.shape == given.shape
        assert len(set(drawn.ravel())) == drawn.size
        close(total, drawn.sum())


def test_streams_of_their_own_are_for_draws_by_rows(session):
    x, state = T.dmatrix("x"), theano.shared(random_state(3), "state")
    by_rows = uniform(state, x.shape, ndim=2)[1]
    for other in (state, theano.compile.view_op(state)):
        drawn = uniform(other, (3,), ndim=1)[1]
        with pytest.raises(ValueError, match="make a RandomStreams for each"):
            synk.function([x], [x * by_rows, drawn], exact=True, random="own")


def test_a_state_that_differs_is_for_its_stream_alone(session):
    x = T.dmatrix("x")
    state, other = (theano.shared(random_state(3), name) for name in ("state", "other"))
    left, by_rows = uniform(state, x.shape, ndim=2)
    more_left, more = uniform(left, x.shape, ndim=2)
    drawn = synk.function([x], [by_rows, more], updates=[(state, more_left)], exact=True, random="own")
    assert len(set(np.concatenate(drawn(np.ones((N, 2)))).ravel())) == 4 * N
    with pytest.raises(ValueError, match=r"other .* uses a stream .* make a RandomStreams for each"):
        synk.function([x], by_rows, updates=[(other, left)], exact=True, random="own")


@functools.cache
def noise_in_steps():
    x = T.dmatrix("x")

    def drawn():
        streams = RandomStreams(4)
        steps, updates = theano.scan(lambda h: h + streams.uniform(x.shape) * x, outputs_info=x, n_steps=3)
        return [steps, steps.mean()], updates

    (ours, our_updates), (theirs, their_updates) = drawn(), drawn()
    function = synk.function([x], ours, updates=our_updates, exact=True, random="own")
    return function, theano.function([x], theirs, updates=their_updates)


def test_draws_in_the_steps_of_a_loop_are_the_serial_programs(session):
    function, reference = noise_in_steps()
    for n in (N, 1, N):
        given = np.random.RandomState(n).randn(n, 2)
        close(function(given), reference(given))


# -- what is refused


def test_invalid_arguments_are_refused(session):
    x, col, s = T.dmatrix("x"), T.dcol("col"), T.dscalar("s")
    w = theano.shared(np.ones((4, 2)), "w")
    for keywords, kind, message in [
        ({"shard": x}, TypeError, "a list of variables, or a dict"),
        ({"shard": ["x"]}, TypeError, "must name tensor variables"),
        ({"shard": {x: "rows"}}, TypeError, "axis of x must be an int"),
        ({"shard": {x: 2}}, ValueError, "x .* has 2 dimensions, and no axis 2"),
        ({"shard": [s], "bcast_inputs": [s]}, ValueError, "s .* has 0 dimensions"),
        ({"shard": {col: 1}, "bcast_inputs": [col]}, ValueError, "axis 1 is broadcastable"),
        ({"shard": [T.dmatrix("other")]}, ValueError, "does not use other"),
        ({"shard": {w: 1}, "sliceable_shareds": [w]}, ValueError, "by their axis 0"),
        ({"random": "each"}, ValueError, '\'each\'; expected "serial" or "own"'),
    ]:
        bcast = keywords.pop("bcast_inputs", [])
        with pytest.raises(kind, match=message):
            synk.function([x], x.sum() + w.sum() + sum(one.sum() for one in bcast), bcast, exact=True, **keywords)
    for keywords in ({"shard": [x]}, {"random": "own"}):
        with pytest.raises(ValueError, match="pass exact=True"):
            synk.function([x], x.sum(), **keywords)


def test_an_output_that_is_used_after_the_sharded_variable(session):
    """One operation computes `largest`, which the sharded `v` needs, and `place`, which is needed only later."""
    x, z = T.dmatrix("x"), T.dvector("z")
    largest, place = T.max_and_argmax(x, axis=0) if on_theano else (x.max(axis=0), x.argmax(axis=0))
    v = z - largest
    function = synk.function([x], [place, v], bcast_inputs=[z], shard=[v], exact=True)
    values = np.random.default_rng(3).random((7, 7))
    close(function(values, np.ones(7)), [values.argmax(axis=0), 1 - values.max(axis=0)])
