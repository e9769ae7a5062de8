"""Warnings and errors for likely mistakes: unscattered inputs, uneven shards, wrong axes, other dtypes."""

import warnings

import numpy as np
import pytest
from backend import T, theano
from comparison import close, shares

import synkhronos as synk

WARNING = "no input and no shared variable of it is scattered: all {} ranks compute the same"

# ---------------------------------------------------------------- nothing is scattered


def tutorial(ops=("avg",), updates=None, pick=lambda data, index: data[index * 4 : (index + 1) * 4]):
    """Return a function as in tutorials, with an index as input and the data by givens, and the data."""
    x, index = T.dmatrix("x"), T.lscalar("index")
    data = theano.shared(np.arange(24.0).reshape(8, 3), "data")
    outputs = [(x.mean(), op) for op in ops]
    givens = {x: pick(data, index)}
    return synk.function([], outputs, bcast_inputs=[index], givens=givens, updates=updates, name="tutorial"), data


@pytest.mark.parametrize("trained", [False, True])
def test_replicated_data_by_givens(session, trained):
    w = theano.shared(0.0, "w")
    function, _ = tutorial(updates=[(w, w + 1)] if trained else None)
    expected = [5.5, 17.5]
    if session == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [function(i)[0] for i in range(2)] == expected
        return
    with pytest.warns(RuntimeWarning, match=f"tutorial: {WARNING.format(session)}") as caught:
        assert function(0)[0] == expected[0]
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert function(1)[0] == expected[1]  # a function warns once


@pytest.mark.parametrize(
    "pick",
    [
        lambda data, index: data[index : index + 2].astype("float32").astype("float64"),
        lambda data, index: (data * 2)[T.arange(index, index + 2)],
        lambda data, index: data[:, index : index + 1].dimshuffle(1, 0).repeat(2, 0).T,
    ],
    ids=["a cast", "an index list", "columns"],
)
def test_other_ways_to_select_a_minibatch(two, pick):
    with pytest.warns(RuntimeWarning, match=WARNING.format(2)):
        tutorial(pick=pick)[0](0)


def silent():
    """Yield correct functions without scattered inputs, and their arguments."""
    w, rate, index = theano.shared(np.arange(4.0), "w"), T.dscalar("rate"), T.lscalar("index")
    yield synk.function([], w.sum()), ()
    yield synk.function([], [], updates=[(w, w * 1)]), ()
    yield synk.function([], updates=[(w, w - rate * w[index])], bcast_inputs=[rate, index]), (0.0, 1)
    yield synk.function([], (w**2).sum(), updates=[(w, w - rate * w)], bcast_inputs=[rate]), (0.0,)
    yield synk.function([], (w * rate).mean(), bcast_inputs=[rate]), (2.0,)
    yield synk.function([], [(w[index : index + 2], "gather"), (w[index], None)], bcast_inputs=[index]), (1,)
    yield synk.function([], w[index:].mean(), bcast_inputs=[index], sliceable_shareds=[w]), (1,)
    x = T.dvector("x")
    yield synk.function([x], (x.sum() * w[index]), bcast_inputs=[index]), (np.ones(6), 1)
    yield tutorial(ops=["gather", None])[0], (1,)


@pytest.mark.filterwarnings("error", "ignore:synkhronos.fork")
def test_correct_functions_do_not_warn(two):
    for function, arguments in silent():
        function(*arguments)
    function, data = tutorial()
    synk.scatter(data, np.random.RandomState(0).rand(16, 3))  # each rank has rows of its own
    full = synk.gather(data, nd_up=0)
    assert function(0)[0] == pytest.approx((full[:4].mean() + full[8:12].mean()) / 2)


# ---------------------------------------------------------------- shards of unequal size


def test_a_batch_size_that_is_built_into_the_graph(two):
    x = T.dvector("x")
    fixed = theano.shared(np.ones(3), "fixed")
    function = synk.function([x], ((x * fixed).sum(), "sum"))
    with pytest.raises(synk.WorkerError) as caught:
        function(np.ones(7))  # shards of 4 and 3 rows
    assert caught.value.rank == 0
    assert "\nThis rank had rows 0 to 3 of 7; a batch size that is built into the graph" in str(caught.value)
    wrong = [(5, 1, "rows 3 to 4 of 5"), (9, 2, "rows 0 to 4 of 9, in 2 slices"), (2, 1, "row 0 of 2")]
    for n, num_slices, rows in wrong:
        with pytest.raises(synk.WorkerError, match=f"This rank had {rows};"):
            function(np.ones(n), num_slices=num_slices)
    assert function(np.ones(6)) == 6


def test_a_batch_size_of_data_in_shared_variables(two):
    data, fixed = theano.shared(np.zeros(1), "data"), theano.shared(np.ones(3), "fixed")
    function = synk.function([], ((data * fixed).sum(), "sum"), sliceable_shareds=[data])
    synk.scatter(data, np.ones(10))
    with pytest.raises(synk.WorkerError, match="This rank had 4 rows of the sliceable shared variables; a batch size"):
        function(batch_s=slice(0, 4))
    assert function(batch_s=slice(0, 3)) == 6


def test_other_failures_report_the_rows_alone(two):
    x = T.dvector("x")
    function = synk.function([x], T.opt.Assert("too large")(x, T.lt(x.max(), 5)).sum())
    with pytest.raises(synk.WorkerError, match=r"too large(.|\n)*This rank had rows 3 to 5 of 6\.") as caught:
        function(np.arange(6.0))
    assert caught.value.rank == 1


# ---------------------------------------------------------------- the wrong axis


def test_time_major_inputs_of_unequal_rows(two):
    x, y = T.dtensor3("x"), T.dvector("y")
    function = synk.function([x, y], (x.sum() + y.sum(), "sum"))
    words = r"points: x: 4, y: 6\. Rows are counted .*\(N, T, \.\.\.\).*dimshuffle\(1, 0, 2\)"
    with pytest.raises(ValueError, match=words):
        function(np.ones((4, 6, 2)), np.ones(6))
    words = r"data points: x: 4, y: 5\. Pass an input without data points in bcast_inputs$"
    with pytest.raises(ValueError, match=words):
        function(np.ones((4, 6, 2)), np.ones(5))


def test_time_major_graphs_of_transposed_inputs(session):
    """The transposition in the documentation gives the serial results, also where T == N."""
    x, y = T.dtensor3("x"), T.dmatrix("y")  # (N, T, width), (N, T)
    x_in_time, y_in_time = x.dimshuffle(1, 0, 2), y.dimshuffle(1, 0)
    states, _ = theano.scan(lambda now, before: T.tanh(now.sum(axis=1) + before), [x_in_time], T.zeros_like(y[:, 0]))
    function = synk.function([x, y], [T.sqr(states - y_in_time).mean(), (states.dimshuffle(1, 0), "gather")])
    rng = np.random.RandomState(0)
    for n_points, n_steps in ((7, 7), (9, 4)):
        values = rng.randn(n_points, n_steps, 2), rng.randn(n_points, n_steps)
        close(function(*values), function.as_theano(*values), rtol=1e-10, atol=0)


# ---------------------------------------------------------------- in place of Theano's functions


def test_theano_function_may_be_set_to_ours(synchronize, monkeypatch):
    n_ranks = synchronize(2)
    monkeypatch.setattr(theano, "function", synk.function)
    x, w = T.dvector("x"), theano.shared(np.ones(1), "w")
    function = theano.function([x], (x * w.sum()).mean(), updates=[(w, w + 1)], name="mine")
    assert isinstance(function, synk.Function)
    values = np.arange(5.0)
    assert function(values) == 2
    assert function(values, num_slices=2) == 4
    assert function.counts == tuple(stop - start for start, stop in shares(5, n_ranks))
    assert function.as_theano(values) == 6
    # functions that Theano compiles internally stay Theano's
    assert x.shape[0].eval({x: values}) == 5
    assert T.arange(3).eval().dtype == np.int64
    states, _ = theano.scan(lambda now, before: now + before, [x], T.zeros(()))
    assert theano.function([x], states[-1:].sum())(np.ones(4)) == 2
    synk.distribute()


def test_printing_by_theano(two, capsys):
    x = T.dvector("x")
    function = synk.function([x], T.exp(x).sum(), name="printed")
    assert function.maker.fgraph.toposort()
    theano.printing.debugprint(function)
    ours = capsys.readouterr().out
    assert "exp" in ours and "[id A]" in ours
    theano.printing.debugprint([function, x], print_storage=True)
    assert capsys.readouterr().out.startswith(ours.split("{")[0])
    theano.printing.debugprint(function.maker.fgraph)
    assert capsys.readouterr().out.splitlines()[0].split(" '")[0] in ours


# ---------------------------------------------------------------- Data of other dtypes


def test_data_of_a_dtype_that_theano_casts(session):
    x, y = T.fmatrix("x"), T.dvector("y")
    function = synk.function([x], [(x / 2, "gather"), y.sum()], bcast_inputs=[y])
    image = np.random.RandomState(0).randint(0, 256, (7, 3)).astype("uint8")
    data, full = synk.data(image), synk.data(np.arange(3, dtype="int16"))
    for batch in (None, 5, slice(1, 6), slice(0, 7, 2), [6, 0, 0], np.arange(7) % 2 == 0):
        rows = image[slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch]
        for num_slices in (1, 2):
            halves, total = function(data, full, batch=batch, num_slices=num_slices)
            assert halves.dtype == np.float32 and total == pytest.approx(3)
            np.testing.assert_array_equal(halves, rows.astype("float32") / 2)
    assert data.dtype == np.uint8


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "complex64", "S3", "bool"])
def test_data_of_a_dtype_that_theano_refuses(two, dtype):
    x = T.fvector("x")
    function = synk.function([x], x.sum())
    data = synk.data(np.ones(4, dtype))
    try:
        expected = function(np.ones(4, dtype))
    except TypeError:
        with pytest.raises(TypeError, match=rf"input x: got Data of dtype {np.dtype(dtype)}; expected float32"):
            function(data)
    else:
        assert function(data) == expected


def test_data_of_other_dtypes_where_downcasts_are_allowed_or_nothing_is(two):
    x = T.fvector("x")
    data = synk.data(np.arange(4.0) + 0.1)
    with pytest.raises(TypeError, match="got Data of dtype float64; expected float32"):
        synk.function([x], x.sum())(data)
    function = synk.function([x], [(x, "gather")], allow_input_downcast=True)
    assert function(data)[0].tolist() == (np.arange(4.0) + 0.1).astype("float32").tolist()
    strict = synk.function([theano.In(x, strict=True)], x.sum())
    with pytest.raises(TypeError, match="got Data of dtype uint8; expected float32"):
        strict(synk.data(np.ones(4, "uint8")))
