"""Updates by slices: values equal the serial program's for every kind of update, and the workers have no copies."""

import operator
import random
import threading

import numpy as np
import pytest
from backend import MRG_RandomStreams, RandomStreams, T, theano, theano_only
from comparison import close
from kinds_of_updates import DATA, KINDS, ROWS, SIDE, adam, gradient, norm_of_gradients, square, x

import synkhronos as synk
from synkhronos._graph import shared_variables
from synkhronos._rank import steps
from synkhronos._session import current


@pytest.fixture(autouse=True)
def slices_of_small_variables(monkeypatch):
    monkeypatch.setattr("synkhronos._sharding.slices.LEAST_BYTES", 1)


def run(make, compile, calls=3, data=DATA):
    """Return the outputs of some calls, and the variables with their values after each."""
    variables, updates, outputs = make()
    function = compile([x], outputs, updates=updates, on_unused_input="ignore")
    found = []
    for _ in range(calls):
        found += function(data)
        found += [var.get_value() for var in variables]
    return function, variables, found


def by_rows(*args, **kwargs):
    return synk.function(*args, exact=True, plan="rows", **kwargs)


def check_replicas(variables, n_ranks):
    """Check that each rank has the controller's values."""
    for var in variables:
        for rank in range(1, n_ranks):
            np.testing.assert_array_equal(synk.get_value(rank, var), var.get_value())


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_every_kind_of_update(session, make):
    _, _, expected = run(make, theano.function)
    _, variables, found = run(make, by_rows)
    close(found, expected, 1e-9, 1e-9)
    check_replicas(variables, session)


@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize("n_ranks", [2, 5])
def test_small_variables_in_slices(synchronize, n_ranks, is_private, monkeypatch):
    """With no limit of the size; gradients that are in private memory are added by a collective."""
    monkeypatch.setattr(shared_variables, "LEAST_BYTES", 1)
    if is_private:
        monkeypatch.setattr(steps, "copy_to_heap", np.array)
    synchronize(n_ranks)
    _, _, expected = run(norm_of_gradients, theano.function)
    function, variables, found = run(norm_of_gradients, by_rows)
    close(found, expected, 1e-9, 1e-9)
    check_replicas(variables, n_ranks)
    assert len(function._graph.slices.variables) == 2


def layers():
    """Updates by gradients of two layers, which are products of rows, and by another product, of no transposition."""
    u, w, v, b = square("u"), square("w", 2), square("v", 3), theano.shared(np.ones(SIDE), "b")
    hidden = T.tanh(x.dot(u))
    loss = T.sqr(hidden.dot(w) + b).mean()
    g = T.grad(loss, [u, w, b])
    other = T.concatenate([hidden.T[:20], hidden.T[20:]], axis=0).dot(T.tanh(x))
    return [u, w, v, b], [(u, u - 0.1 * g[0]), (w, w - g[1]), (v, v - 0.1 * other), (b, b - 0.1 * g[2])], [loss]


@pytest.mark.parametrize("n_rows", [1, 4, 15, 40])
def test_gradients_as_products_in_slices_and_as_sums(session, n_rows, monkeypatch):
    """The limit is 10 rows."""
    monkeypatch.setattr(steps, "PIECE", 1024)
    monkeypatch.setattr(steps, "_BLOCK", 2048)
    data = np.random.RandomState(1).randn(n_rows, SIDE) / SIDE
    _, _, expected = run(layers, theano.function, data=data)
    function, variables, found = run(layers, by_rows, data=data)
    close(found, expected, 1e-9, 1e-9)
    check_replicas(variables, session)
    kinds = [one.collective for one in function.partition]
    assert kinds.count("product in slices (up to 10 rows)") == (3 if session > 1 else 0)


@pytest.mark.parametrize("n_ranks", [2, 5])
def test_a_random_tree_of_operations(synchronize, n_ranks):
    """Leaves are old values, gradients, numbers, rows, and results that the graph computes in full."""
    synchronize(n_ranks)
    for seed in range(4):
        _, _, expected = run(lambda seed=seed: tree(random.Random(seed)), theano.function, 2)
        _, variables, found = run(lambda seed=seed: tree(random.Random(seed)), by_rows, 2)
        close(found, expected, 1e-9, 1e-9)
        check_replicas(variables, n_ranks)


def tree(choose):
    large = [square(f"v{i}", i) for i in range(4)]
    row, number = theano.shared(np.arange(SIDE) / SIDE, "row"), theano.shared(0.3, "number")
    leaves = [
        *large,
        *map(gradient, large[:2]),
        number,
        row,
        T.sqr(large[0]).sum(),
        T.constant(0.2),
        x.sum(),
        x.mean(0),
    ]

    def made(depth):
        if not depth or choose.random() < 0.2:
            return choose.choice(leaves)
        one, other = made(depth - 1), made(depth - 1)
        return choose.choice([T.tanh(one + other), one * other, T.minimum(one, other), T.maximum(one, 0.1 * other)])

    updates = [(var, T.tanh(var * 0.5 + made(4))) for var in large[:3]]
    updates.append((large[3], 0.5 * large[3]))
    return [*large, row, number], [*updates, (number, 0.9 * number), (row, row * number)], [made(3).sum()]


def test_functions_in_turns(session):
    """Exact functions with both plans, a plain function, and the backend's own change the same variables."""
    made = []
    for build in (theano.function, synk.function):
        is_serial = build is theano.function
        w, m = square("w"), square("m", 2)
        m_new = 0.9 * m - 0.1 * gradient(w)
        of_both = [(m, m_new), (w, w + m_new)]
        exact = {} if is_serial else {"exact": True}
        calls = [
            build([x], [], updates=of_both, **(exact and {**exact, "plan": plan})) for plan in ("rows", "controller")
        ]
        calls.append(build([x], [], updates=[(w, 0.9 * w + x.sum())], **exact))
        calls.append(build([], [], updates=[(w, w / 2), (m, m + 1)]))
        calls.append(theano.function([], [], updates=[(w, 1.5 * w)]))
        values = []
        order = random.Random(3)
        for _ in range(25):
            pick = order.randrange(6)
            if pick < 3:
                calls[pick](DATA)
            elif pick < 5:
                calls[pick]()
            else:
                w.set_value(np.ones((SIDE, SIDE)))
            values += [w.get_value(), m.get_value()]
            if not is_serial:
                synk.broadcast([w, m])  # plain functions use the replicas as they are
        made.append(values)
    close(made[1], made[0], 1e-9, 1e-9)


def test_no_worker_has_a_copy(synchronize):
    synchronize(3)
    function, variables, _ = run(adam, by_rows)
    session = current("test")
    large = [var for var in variables if var.ndim]
    assert session.stale.shared.issuperset(session.keys(large))
    held = [var.get_value(borrow=True) for var in large]
    function(DATA)
    assert all(var.get_value(borrow=True) is one for var, one in zip(large, held))


def test_fewer_rows_than_ranks(synchronize):
    synchronize(3)
    for n_rows in (0, 1, 2):
        values = []
        for compile in (theano.function, by_rows):
            w = square("w")
            compile([x], [], updates=[(w, w - 0.1 * gradient(w))])(DATA[:n_rows])
            values.append(w.get_value())
        close(values[1], values[0], 1e-9, 1e-9)


def test_other_values_of_a_call(synchronize):
    """Parts of a sequence, slices, and a subset of the outputs."""
    synchronize(3)
    made = []
    for compile in (theano.function, by_rows):
        is_serial = compile is theano.function
        w, b = square("w"), theano.shared(np.zeros(SIDE), "b")
        outputs = [w.sum(), x.sum(), b.sum()]
        function = compile([x], outputs, updates=[(w, w - 0.1 * gradient(w)), (b, b + x.sum(0))])
        values = []
        for _ in range(2):
            if is_serial:
                values += operator.itemgetter(2, 0)(function(DATA))
            else:
                values += function(DATA, output_subset=[2, 0])
            values += function(DATA, **({} if is_serial else {"num_slices": 3}))
            if is_serial:
                values += [one for _ in range(2) for one in function(DATA)]
            else:
                with synk.sequence():
                    futures = [function(DATA) for _ in range(2)]
                values += [one for future in futures for one in future.result()]
        made.append([*values, w.get_value(), b.get_value()])
    close(made[1], made[0], 1e-9, 1e-9)


def test_an_array_of_another_shape_is_an_error_before_anything_changes(synchronize):
    synchronize(3)
    w, other, b = square("w"), square("other", 2), theano.shared(0.0, "b")
    function = by_rows([x], [], updates=[(w, w + other + x.sum()), (b, b + 1)])
    function(DATA)
    before = w.get_value()
    other.set_value(np.ones((2, SIDE)))
    with pytest.raises(synk.WorkerError, match=r"an update of w, of shape \(60, 60\), got an array of shape \(2, 60\)"):
        function(DATA)
    np.testing.assert_array_equal(w.get_value(), before)
    assert b.get_value() == 1
    other.set_value(np.ones((SIDE, SIDE)))
    function(DATA)
    close([w.get_value(), b.get_value()], [before + 1 + DATA.sum(), 2], 1e-9, 1e-9)
    check_replicas([w, b, other], 3)


def test_small_pieces(synchronize, monkeypatch):
    """Pieces of less than a block of the heap: their new values are in private memory, and are noted by copies."""
    monkeypatch.setattr(steps, "PIECE", 1024)
    synchronize(2)
    _, _, expected = run(adam, theano.function)
    _, variables, found = run(adam, by_rows)
    close(found, expected, 1e-9, 1e-9)
    check_replicas(variables, 2)


def resized_by_another_variable(size, cut):
    """Return the values of a variable whose new value has the shape of another one."""
    made = []
    for compile in (theano.function, by_rows):
        w, z = square("w"), theano.shared(np.ones((size, size)), "z")
        function = compile([x], [], updates=[(w, w - 0.1 * gradient(w)), (z, w[:cut] * 0.5)])
        values = []
        for _ in range(2):
            function(DATA)
            values += [w.get_value(), z.get_value()]
        made.append(values)
    return made


@pytest.mark.parametrize(("size", "cut"), [(70, None), (50, None), (60, 20)])
def test_a_new_value_may_have_another_shape(synchronize, size, cut):
    synchronize(3)
    serial, found = resized_by_another_variable(size, cut)
    close(found, serial, 1e-9, 1e-9)


@theano_only("PyTensor has no MRG streams")
def test_large_states_of_random_streams(synchronize):
    """States of Theano's MRG streams are arrays."""
    synchronize(2)
    plain = synk.function([x], [((x * MRG_RandomStreams(7).uniform(x.shape)).sum(), "sum")])
    assert plain(DATA) != plain(DATA)
    made = []
    for compile in (theano.function, by_rows):
        w = square("w")
        noise = MRG_RandomStreams(7).uniform(x.shape)
        function = compile([x], noise, updates=[(w, w - 0.1 * gradient(w) + noise.sum())])
        made.append([function(DATA) for _ in range(3)] + [w.get_value()])
    close(made[1], made[0], 1e-9, 1e-9)


@theano_only("PyTensor has no MRG streams")
def test_own_states_of_random_streams_stay_different_after_an_error(synchronize):
    synchronize(2)
    w, noise = square("w"), MRG_RandomStreams(7).uniform((x.shape[0], SIDE), nstreams=SIDE)
    function = by_rows([x], noise * x, updates=[(w, w + x.sum())], random="own")
    for n_columns in (SIDE, SIDE - 1, SIDE, SIDE):
        if n_columns < SIDE:
            with pytest.raises(synk.WorkerError):
                function(np.ones((4, n_columns)))
        else:
            assert len(np.unique(function(np.ones((4, SIDE))).round(9), axis=0)) == 4


def test_an_interrupt_before_the_step_changes_nothing(synchronize, monkeypatch):
    """The step of an earlier call is complete, and is not made again."""
    synchronize(2)
    w, b = square("w"), theano.shared(np.zeros(SIDE), "b")
    function = by_rows([x], [], updates=[(w, w + x.sum()), (b, b + 1)])
    function(DATA)
    b.set_value(np.full(SIDE, 100.0))
    session = current("test")
    own, before = session._group.send, w.get_value()

    def send(*arguments):
        own(*arguments)
        monkeypatch.setattr(session._group, "send", own)
        raise KeyboardInterrupt

    monkeypatch.setattr(session._group, "send", send)
    with pytest.raises(KeyboardInterrupt):
        function(DATA)
    np.testing.assert_array_equal(b.get_value(), 100)
    np.testing.assert_array_equal(w.get_value(), before)
    function(DATA)
    close([w.get_value(), b.get_value()], [before + DATA.sum(), np.full(SIDE, 101.0)], 1e-9, 1e-9)
    check_replicas([w, b], 2)


def test_two_variables_with_one_array_get_their_own(synchronize):
    synchronize(2)
    made = []
    for compile in (theano.function, by_rows):
        w, z = square("w"), square("z", 2)
        function = compile([x], [], updates=[(w, w + z + x.sum())])
        function(DATA)
        z.set_value(w.get_value(borrow=True), borrow=compile is by_rows)
        function(DATA)
        function(DATA)
        made.append([w.get_value(), z.get_value()])
    close(made[1], made[0], 1e-9, 1e-9)


def test_differences_are_found_before_values_are_shared(synchronize):
    synchronize(2, check_replicas=1)
    w = square("w")
    function = by_rows([x], [], updates=[(w, w + x.sum())])
    function(DATA)
    local = synk.function([x], [], updates=[(w, w + x.sum())])
    local(DATA)
    with pytest.warns(RuntimeWarning, match="the replicas of w differ"):
        function(DATA)


def test_another_thread_sets_a_variable(synchronize):
    """Each call computes with the value before or after; no call fails."""
    synchronize(2)
    w = square("w")
    function = by_rows([x], [], updates=[(w, 0.5 * w + x.sum())])
    function(DATA)
    ends = threading.Event()

    def change():
        while not ends.is_set():
            w.set_value(np.ones((SIDE, SIDE)))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(500):
            function(DATA)
    finally:
        ends.set()
        thread.join()
    w.set_value(np.ones((SIDE, SIDE)))
    function(DATA)
    close(w.get_value(), np.full((SIDE, SIDE), 0.5 + DATA.sum()), 1e-9, 1e-9)
    check_replicas([w], 2)


def test_scattered_variables_that_are_used_only_for_their_length(synchronize):
    synchronize(2)
    w, data, other = square("w"), theano.shared(DATA, "data"), theano.shared(np.zeros((ROWS, 2)), "other")
    loss = T.sqr(data.dot(w)).sum() / other.shape[0]
    function = synk.function(
        [], loss, updates=[(w, w - 0.1 * T.grad(loss, w))], sliceable_shareds=[data, other], exact=True
    )
    synk.distribute()
    synk.scatter([data, other], [DATA, np.zeros((ROWS, 2))])
    before = w.get_value()
    function()
    close(w.get_value(), before - 0.2 / ROWS * DATA.T.dot(DATA).dot(before), 1e-9, 1e-9)
    assert function.partition.updates == ["w"]


def test_sparse_variables_are_updated_with_the_others(synchronize):
    """They are not arrays, so the function updates all variables itself."""
    sparse = pytest.importorskip("scipy.sparse")
    synchronize(2)
    theano_sparse = pytest.importorskip(f"{theano.__name__}.sparse")
    s, w = theano.shared(sparse.csr_matrix(np.eye(3)), "s"), square("w")
    function = by_rows([x], [], updates=[(s, theano_sparse.add(s, s)), (w, w + x.sum())])
    assert function._graph.slices is None
    for number in (1, 2):
        function(DATA)
        np.testing.assert_array_equal(s.get_value().toarray(), 2.0**number * np.eye(3))
    close(w.get_value(), square("w").get_value() + 2 * DATA.sum(), 1e-9, 1e-9)


def test_streams_stay_equal_after_an_interrupt(synchronize, monkeypatch):
    """The controller is interrupted before its function draws numbers, and the workers have drawn them."""
    synchronize(3)
    noise = RandomStreams(7).uniform((SIDE,))
    w = square("w")
    function = by_rows([x], noise, updates=[(w, w + x.sum() + noise.sum())])
    function(DATA)
    session = current("test")
    own = session.replica._caller._context.execute

    def execute(weights, compute):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.replica._caller._context, "execute", execute)
    before = w.get_value()
    with pytest.raises(KeyboardInterrupt):
        function(DATA)
    monkeypatch.setattr(session.replica._caller._context, "execute", own)
    np.testing.assert_array_equal(w.get_value(), before)
    drawn = function(DATA)
    close(w.get_value(), before + DATA.sum() + drawn.sum(), 1e-9, 1e-9)
    check_replicas([w], 3)


@pytest.mark.parametrize("n_rows", [1, 2, 7])
def test_minibatches_of_a_shared_variable_with_fewer_rows_than_ranks(synchronize, n_rows):
    """The function divides the rows itself, and gives all of them to each rank if they are few."""
    synchronize(5)
    made = []
    for compile in (theano.function, by_rows):
        data, w, i = theano.shared(DATA, "data"), square("w"), T.iscalar("i")
        loss = T.sqr(x.dot(w)).sum()
        updates = [(w, w - 0.1 * T.grad(loss, w))]
        inputs = {"inputs": [i]} if compile is theano.function else {"inputs": [], "bcast_inputs": [i]}
        function = compile(outputs=loss, updates=updates, givens={x: data[i * n_rows : (i + 1) * n_rows]}, **inputs)
        made.append([function(0), function(1) if n_rows < 7 else function(0), w.get_value()])
    close(made[1], made[0], 1e-9, 1e-9)


def test_a_factor_that_is_not_transposed(synchronize):
    synchronize(2)
    made = []
    for compile in (theano.function, by_rows):
        w, y = square("w"), T.dmatrix("y")
        loss = T.sqr(T.dot(x.dimshuffle(0, 1), w)).sum() + T.sqr(w.dot(y.T.dimshuffle(0, 1))).sum()
        function = compile([x, y], loss, updates=[(w, w - 0.1 * T.grad(loss, w))])
        made.append([function(DATA, DATA), function(DATA[:4], DATA[:4]), w.get_value()])
    close(made[1], made[0], 1e-9, 1e-9)


def test_products_of_float32(synchronize):
    synchronize(3)
    made = []
    for compile in (theano.function, by_rows):
        z, w = T.fmatrix("z"), theano.shared(square("w").get_value().astype("float32"), "w")
        loss = T.sqr(z.dot(w)).sum()
        function = compile([z], loss, updates=[(w, w - np.float32(0.1) * T.grad(loss, w))])
        made.append([function(DATA[:n].astype("float32")) for n in (4, 13)] + [w.get_value()])
    close(made[1], made[0], 1e-5, 1e-5)


@pytest.mark.parametrize("sizes", [((1, 0), (3, 0), (2, 1)), ((3, 1), (1, 0), (5, 2))])
def test_a_function_in_sessions_of_other_sizes(no_session, sizes):
    """It is built in the first session; the controller's rank is not 0 in some."""
    serial, updates, _ = adam()
    expected = theano.function([x], [], updates=updates)
    variables, updates, _ = adam()
    function = None
    for n_ranks, master_rank in sizes:
        synk.fork(n_ranks, master_rank=master_rank)
        function = function or by_rows([x], [], updates=updates)
        for n_rows in (13, 4):
            function(DATA[:n_rows])
            expected(DATA[:n_rows])
            close([var.get_value() for var in variables], [var.get_value() for var in serial], 1e-9, 1e-9)
            for rank in range(n_ranks):
                np.testing.assert_array_equal(synk.get_value(rank, variables[0]), variables[0].get_value())
        synk.close()


def test_workers_copy_a_value_that_they_may_not_view_any_more(synchronize):
    """As after another thread has set a variable while the workers got its value."""
    synchronize(2)
    w = square("w")
    function = by_rows([x], [], updates=[(w, w + x.sum())])
    function(DATA)
    session = current("test")
    keys = set(session.keys([w]))
    session.stale.give_again(keys)
    session.stale.unshare(keys, session.issue)
    assert not session.stale.shared & keys
    check_replicas([w], 2)
    function(DATA)
    check_replicas([w], 2)
