"""`theano.function` under `parallelize`, compared with `theano.function` alone."""

import functools

import numpy as np
import pytest
import scipy.sparse
from backend import MRG_RandomStreams, RandomStreams, T, on_theano, theano, theano_only
from comparison import close
from scripts import run_script

import synkhronos as synk

function = theano.function  # as after `from theano import function`
N = 7


def rows(n=N, seed=0):
    rng = np.random.RandomState(seed)
    return rng.randn(n, 4), rng.randint(0, 3, n).astype("int32")


def programs():
    """Return a training function with most arguments of `theano.function`, a counter, a reader, and variables."""
    rate, x, y = T.dscalar("rate"), T.dmatrix("x"), T.ivector("y")
    w, count, data = theano.shared(rows(4, 5)[0][:, :3].copy(), "w"), theano.shared(0, "count"), T.dmatrix("data")
    out = T.nnet.softmax((data - data.mean(axis=0)).dot(w))
    loss = -T.log(out[T.arange(y.shape[0]), y]).mean() + out.var()
    train = function(
        [rate, x, theano.In(y, name="labels")],
        [loss, out],
        updates=[(w, w - rate * T.grad(loss, w))],
        givens={data: 2 * x},
        allow_input_downcast=True,
        name="train",
        profile=True,
    )
    step = T.iscalar("step")
    return train, function([step], count, updates={count: count + step}), function([], [w, count]), [w, count]


@functools.cache
def both():
    with synk.parallelize():
        made = programs()
    return made, programs()


def prepared():
    """Return the programs, with variables reset by `set_value`, as in a serial program."""
    (*ours, variables), (*theirs, others) = both()
    for variable, other, value in zip(variables, others, (rows(4, 5)[0][:, :3].copy(), 0)):
        variable.set_value(value)
        other.set_value(value)
    return ours, theirs, variables, others


@pytest.mark.parametrize("n", [N, 1, 0])
def test_a_program_computes_the_serial_results(session, n):
    (train, count, look), (train_serially, count_serially, look_serially), variables, others = prepared()
    x, y = rows(n)
    for arguments, named in [((0.5, x, y), {}), ((0.1,), {"labels": y.tolist(), "x": x})]:
        close(train(*arguments, **named), train_serially(*arguments, **named))
        assert count(3) == count_serially(3)
        close(look(), look_serially())
    close(variables, others)
    assert not synk.check_replicas()
    (out,) = train(0.5, x, y, output_subset=[1])
    close(out, train_serially(0.5, x, y)[1])


@pytest.mark.numba
def test_values_set_between_calls_reach_all_ranks(session):
    (train, count, _), (train_serially, _, _), (w, total), (other, _) = prepared()
    x, y = rows()
    train(0.5, x, y), train_serially(0.5, x, y)
    for change in [
        lambda one: one.set_value(one.get_value() * 3),
        lambda one: one.set_value(one.get_value(borrow=True) + 1, borrow=True),
        lambda one: one.zero(),
    ]:
        change(w), change(other)
        close(train(0.5, x, y)[0], train_serially(0.5, x, y)[0])
        assert not synk.check_replicas(w)
    value, same = (one.get_value(borrow=True) for one in (w, other))
    value += 1
    same += 1
    w.set_value(value, borrow=True), other.set_value(same, borrow=True)  # the same array
    close(train(0.5, x, y)[0], train_serially(0.5, x, y)[0])
    total.set_value(40)
    assert count(2) == 40
    assert total.get_value() == 42
    assert not synk.check_replicas()
    w.set_value(value * 2)
    with synk.sequence():
        futures = [train.exact(x, y, rate) for rate in (0.5, 0.1)]
    other.set_value(value * 2)
    close([future.result() for future in futures], [train_serially(rate, x, y) for rate in (0.5, 0.1)])
    with pytest.raises(synk.SessionError, match="a new value of w"), synk.sequence():
        train.exact(x, y, 0.5)
        w.set_value(value)
        train.exact(x, y, 0.5)
    with pytest.raises(synk.SessionError, match="w was set after a call"), synk.sequence():
        future = train.exact(x, y, 0.5)
        w.set_value(value)
    with pytest.raises(synk.SessionError, match="w was set after a call"):
        future.result()
    train(0.0, x, y)
    assert not synk.check_replicas()


def test_values_set_before_an_exact_function_is_built(session):
    x, w = T.dmatrix("x"), theano.shared(np.ones(4), "w")
    given = rows()[0]
    close(synk.function([x], (x.dot(w).sum(), "sum"))(given), given.sum())
    w.set_value(np.arange(4.0))
    f = synk.function([x], x.dot(w), exact=True)
    w.set_value(w.get_value() + 1)
    close(f(given), given.dot(np.arange(4.0) + 1))
    assert not synk.check_replicas(w)


class Scale(theano.Op):
    """Multiply a matrix by the factor in an object of any class."""

    __props__ = ()

    def make_node(self, x, factors):
        return theano.Apply(self, [x, factors], [x.type()])

    def perform(self, node, inputs, outputs):
        x, factors = inputs
        outputs[0][0] = x * factors["factor"]

    def infer_shape(self, node, shapes):
        return [shapes[0]]


def test_matrices_and_objects_that_are_set_reach_all_ranks(session):
    x = T.dmatrix("x")
    matrix = theano.shared(scipy.sparse.csc_matrix(np.eye(4)), "matrix")
    factors = theano.shared({"factor": 2.0}, "factors")
    f = synk.function([x], theano.sparse.dot(x, matrix), exact=True)
    g = synk.function([x], Scale()(x, factors).sum(axis=0), exact=True)
    given = rows()[0]
    for value in (1.0, 3.0, 5.0):
        matrix.set_value(scipy.sparse.csc_matrix(np.eye(4) * value))
        factors.set_value({"factor": value})
        close(f(given), given * value)
        close(g(given), given.sum(axis=0) * value)


@functools.cache
def drawing(kind):
    def build():
        x, streams = T.dmatrix("x"), kind(7)
        return function([x], x * streams.uniform(x.shape)), function([], streams.normal((3,))), streams

    with synk.parallelize():
        made = build()
    return made, build()


@pytest.mark.parametrize("kind", [RandomStreams, MRG_RandomStreams])
def test_streams_are_the_serial_ones_also_when_seeded_again(session, kind):
    (of_rows, alone, streams), (serial_of_rows, serial_alone, serial_streams) = drawing(kind)
    for seed in (None, 5, 6):
        if seed is not None:
            streams.seed(seed), serial_streams.seed(seed)
        for _ in range(2):
            close(of_rows(rows()[0]), serial_of_rows(rows()[0]))
            close(alone(), serial_alone())


def test_inputs_of_all_kinds(session):
    x, row, table, n = T.dtensor3("x"), T.drow("row"), T.dvector("table"), T.iscalar("n")
    with synk.parallelize(bcast_inputs=[table]):
        f = function([row, table, x, n], (x.sum(axis=2) * row).dot(table) + n)
    given = [np.ones((1, 5)), np.arange(5.0), rows(N * 10)[0].reshape(N, 5, 8), 3]
    close(f(*given), (given[2].sum(axis=2) * given[0]).dot(given[1]) + 3)
    assert f.exact.counts is not None
    assert sum(f.exact.counts) == N
    with pytest.raises(TypeError, match="takes 4: "):
        f(*given, 1)
    with synk.parallelize(["table"]):
        assert function([table, x], x[:, 0, 0] * table.sum())(given[1], given[2]).shape == (N,)
    with synk.parallelize():
        f = function([table, x], x[:, 0, 0] * table.sum())
    with pytest.raises(ValueError, match=r"table: 5, x: 7\. .*Pass an input without data points in bcast_inputs"):
        f(given[1], given[2])


def test_outputs_have_the_same_form_as_in_theano(session):
    x, w = T.dmatrix("x"), theano.shared(np.zeros(4), "w")
    given = rows()[0]
    for outputs in (None, [], x.sum(), [theano.Out(x.sum(), borrow=True)], (x.sum(), x)):
        for updates in ([], [(w, w + x.sum(axis=0))]):
            with synk.parallelize():
                got = function([x], outputs, updates=updates, on_unused_input="ignore")(given)
            expected = function([x], outputs, updates=updates, on_unused_input="ignore")(given)
            assert type(got) is type(expected)
            close(got, expected)


def test_attributes_of_functions(session):
    (train, _, look), *_ = prepared()
    assert train.name == "train"
    assert train.get_shared() == both()[0][3][:1]
    train.trust_input = True
    train(0.1, *rows())
    assert "[id A]" in theano.printing.debugprint(train, file="str")
    assert train.profile.fct_callcount
    assert len(train.partition) > 1
    assert isinstance(look, theano.compile.Function)  # no rows, no updates
    with pytest.raises(AttributeError, match="no attribute 'input_storage'"):
        train.input_storage  # noqa: B018
    with pytest.raises(TypeError, match="keep the state in a shared variable"):
        train["w"]


def test_invalid_arguments_are_refused(session):
    x, s = T.dmatrix("x"), T.dscalar("s")
    value = {"value": 0.0} if on_theano else {}
    with synk.parallelize():
        with pytest.raises(TypeError, match=r"In\(update=…\) is not supported"):
            function([x, theano.In(s, update=s + 1, **value)], x * s)
        with pytest.raises(ValueError, match=f"{synk.engine}.function: got accept_inplace=True"):
            function([x], x, accept_inplace=True)
        with pytest.raises(theano.compile.UnusedInputError):
            function([x, s], s)
        with pytest.raises(theano.gof.fg.MissingInputError, match="the graph needs the input s, which is not in"):
            function([x], x * s)
    for name in ("bcast_inputs", "shard"):
        with pytest.raises(TypeError, match=f"^{name} has 3; expected variables or names"):
            synk.parallelize(**{name: [x, 3]})
    with pytest.raises(TypeError, match=r"bcast_inputs is .*; expected a list"):
        synk.parallelize(bcast_inputs="x")
    with pytest.raises(TypeError, match="parallelize has no argument 'bcast_input'; did you mean bcast_inputs"):
        synk.parallelize(bcast_input=[x])


def test_the_block_ends_and_leaves_internal_functions_alone(session):
    x = T.dmatrix("x")
    is_serial = lambda one: isinstance(one, theano.compile.Function)  # noqa: E731
    ending = synk.parallelize()
    with synk.parallelize():
        assert not is_serial(theano.function([x], x * 2))
        assert x.sum().eval({x: np.ones((2, 2))}) == 4
        assert theano.scan(lambda row: row.sum(), x)[0].eval({x: np.ones((2, 2))}).tolist() == [2, 2]
    assert not is_serial(theano.function([x], x * 2))
    ending.close()
    assert is_serial(theano.function([x], x * 2))
    with pytest.raises(ZeroDivisionError), synk.parallelize():
        raise ZeroDivisionError
    assert is_serial(theano.function([x], x * 2))


def test_without_a_session_there_is_an_error():
    script = """
        def error_of(call):
            with pytest.raises(synk.SessionError) as caught:
                call()
            print(caught.value, flush=True)

        x = T.dmatrix("x")
        error_of(synk.parallelize)
        synk.fork(2)
        ending = synk.parallelize()
        pid = os.fork()
        if not pid:
            error_of(lambda: theano.function([x], x))
            os._exit(0)
        os.waitpid(pid, 0)
        synk.close()
        error_of(lambda: theano.function([x], x))
        ending.close()
        print(theano.function([x], x * 2)(np.ones((1, 2))).tolist())
    """
    first, *others, last = run_script(script)[0].splitlines()
    assert "there is no session" in first
    assert len(others) == 2
    assert all("parallelize is active, and this process has no session" in line for line in others)
    assert last == "[[2.0, 2.0]]"


def test_other_axes_and_variables_of_the_graph(session):
    x, times, n, rows_of_data = T.dmatrix("x"), T.dmatrix("times"), T.iscalar("n"), theano.shared(rows(N)[0])
    with synk.parallelize(shard={times: 1, "x": 0}, random="own"):
        f = function([times, n], [(x + times.T).sum(axis=0), n * x], givens={x: rows_of_data[:n]})
        g = function([times], times.max())
    given = rows(N)[0]
    close(f(given[:6].T, 6), [(given[:6] * 2).sum(axis=0), given[:6] * 6])
    assert g(given.T) == given.max()
    assert sum(g.exact.counts) == N
    for options in ({"random": "mine"}, {"shard": "x"}):
        with pytest.raises((ValueError, TypeError), match=next(iter(options))):
            synk.parallelize(**options)


def test_names_that_inputs_are_given(session):
    x, y = T.dmatrix("x"), T.dmatrix("y")
    items = lambda: [x, theano.In(y, name="labels")]  # noqa: E731
    with synk.parallelize(bcast_inputs=["labels", "of another function"]):
        f = function(items(), x.sum() + y.sum())
    given = rows()[0]
    close(f(given, labels=given[:2]), given.sum() + given[:2].sum())
    with synk.parallelize(shard={"labels": 1, "of another function": 5}):
        g = function(items(), (x * y.T).sum(axis=0))
    close(g(given, given.T), (given**2).sum(axis=0))
    for axis, error in ((2, ValueError), (-3, ValueError), ("0", TypeError), (None, TypeError)):
        with synk.parallelize(shard={"labels": axis}), pytest.raises(error, match=r"shard: .*axis"):
            function(items(), x.sum() + y.sum())


@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_sparse_inputs(session, kind, caplog):
    """Every rank gets a sparse matrix in full, and its own rows of the other inputs."""

    def build(make):
        x, y, w = getattr(theano.sparse, f"{kind}_matrix")("x"), T.dvector("y"), theano.shared(np.zeros((9, 1)), "w")
        out = theano.sparse.dot(x, w)[:, 0] - 1
        loss = T.sqr(out - y).mean()
        return make([x, y], [loss, out, x * 2], updates=[(w, w - 0.1 * T.grad(loss, w))]), w

    with caplog.at_level("INFO", "synkhronos"), synk.parallelize():
        ours, mine = build(function)
    assert [line for line in caplog.messages if "inputs in full" in line] == [
        "every rank gets these inputs in full, because they are not dense arrays: x"
    ]
    theirs, other = build(function)
    for n in (11, 2, 1, 0):
        x = scipy.sparse.random(n, 9, 0.4, kind, random_state=np.random.RandomState(n))
        (*got, matrix), (*expected, serial_matrix) = ours(x, np.ones(n)), theirs(x, np.ones(n))
        assert matrix.format == kind
        close([*got, matrix.toarray()], [*expected, serial_matrix.toarray()])
    close(mine, other)
    assert not synk.check_replicas([mine])
    (out,) = ours(x=x, y=np.ones(0), output_subset=[1])
    assert out.shape == (0,)


def test_inputs_that_are_not_dense_arrays(session):
    matrix, anything, x = theano.sparse.csr_matrix("matrix"), theano.gof.generic("anything"), T.dmatrix("x")
    dense = theano.sparse.dense_from_sparse(matrix)
    with synk.parallelize():
        f = function([matrix], dense * 2)
        g = function([anything], Scale()(T.eye(4), anything))
        h = function([anything, x], Scale()(x, anything).sum(axis=0))
    close(f(scipy.sparse.csr_matrix(np.eye(4))), np.eye(4) * 2)
    close(g({"factor": 3}), np.eye(4) * 3)
    close(h({"factor": 3}, rows()[0]), 3 * rows()[0].sum(axis=0))
    words = r"\(matrix\) has type .*; expected a tensor .* in bcast_inputs: every rank gets it"
    with pytest.raises(TypeError, match=words):
        synk.function([matrix], dense)
    plain = synk.function([x], (x.dot(dense), "gather"), bcast_inputs=[matrix])
    given = np.ones((7, 4)), scipy.sparse.csr_matrix(np.eye(4))
    close(plain(*given, check_against_theano=True), given[0])
    close(plain.as_theano(*given), given[0])
    close(plain(*plain.build_inputs(*given)), given[0])


@theano_only("default values of inputs, outputs by name")
def test_default_values_and_outputs_by_name(session):
    rate, x, given = T.dscalar("rate"), T.dmatrix("x"), rows()[0]
    with synk.parallelize():
        f = function([theano.In(rate, value=0.1), x], {"sum": rate * x.sum(), "twice": x * 2})
    with synk.sequence():
        futures = [f(0.5, given), f(x=given, output_subset=["twice"])]
    for got, factor in ((f(0.5, given), 0.5), (f(x=given), 0.1), (futures[0].result(), 0.5)):
        assert list(got) == ["sum", "twice"]
        close(list(got.values()), [given.sum() * factor, given * 2])
    for got in (f(x=given, output_subset=["twice"]), futures[1].result()):
        assert list(got) == ["twice"]
        close(got["twice"], given * 2)


def test_inputs_are_not_replaced(session):
    x, y, given = T.dmatrix("x"), T.dmatrix("y"), rows()[0]
    for givens in ({x: x * 2}, [(x, np.zeros((3, 2)))]):
        with synk.parallelize(), pytest.raises(RuntimeError, match="givens has x, an input of the function"):
            function([x], x.sum(), givens=givens)
        with pytest.raises(RuntimeError, match="givens has x, an input"):
            synk.function([y], x.sum(), bcast_inputs=[x], givens=givens, exact=True)
    with synk.parallelize():
        close(function([y], x.sum(), givens={x: y * 2})(given), given.sum() * 2)
