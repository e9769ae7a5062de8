"""Updates by slices: values equal the serial program's for every kind of update, and the workers have no copies."""

import random

import numpy as np
import pytest
from backend import T, theano
from comparison import close

import synkhronos as synk
from synkhronos._graph import shared_variables
from synkhronos._rank import steps
from synkhronos._session import current

SIDE = 60  # large variables are squares: 28,800 bytes
ROWS = 13
x = T.dmatrix("x")
DATA = np.random.RandomState(0).randn(ROWS, SIDE) / SIDE


def square(name, seed=1):
    return theano.shared(np.random.RandomState(seed).randn(SIDE, SIDE), name)


def gradient(w):
    return T.grad(T.sqr(x.dot(w)).sum(), w)


# ---------------------------------------------------------------- kinds of updates


def sgd():
    w = square("w")
    return [w], [(w, w - 0.1 * gradient(w))], []


def adam():
    w, m, v, t = square("w"), square("m"), abs(square("v").get_value()), theano.shared(0.0, "t")
    v = theano.shared(v, "v")
    g, step = gradient(w), t + 1
    m_new, v_new = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    rate = 0.1 * T.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    return [w, m, v, t], [(m, m_new), (v, v_new), (w, w - rate * m_new / (T.sqrt(v_new) + 1e-8)), (t, step)], []


def momentum_of_the_new_value():
    w, m = square("w"), square("m", 2)
    m_new = 0.9 * m - 0.1 * gradient(w)
    return [w, m], [(m, m_new), (w, w + 0.9 * m_new)], []


def swap():
    a, b = square("a"), square("b", 2)
    return [a, b], [(a, b * 0.9), (b, a * 1.1)], []


def copy():
    a, b = square("a"), square("b", 2)
    return [a, b], [(a, b), (b, b - 0.1 * gradient(b))], []


def rotation():
    a, b, c = square("a"), square("b", 2), square("c", 3)
    return [a, b, c], [(a, b), (b, c + 0), (c, a - 0.1 * gradient(c))], []


def concatenation():
    w = square("w")
    return [w], [(w, T.concatenate([w[1:], w[:1]]) - 0.1 * gradient(w))], []


def only_concatenation():
    w = square("w")
    return [w], [(w, T.concatenate([w[1:], w[:1]]))], []


def product():
    w = square("w")
    return [w], [(w, w.dot(w) / SIDE)], []


def transposed():
    w = square("w")
    return [w], [(w, w.T - 0.1 * gradient(w).T)], []


def with_old_value():
    w = square("w")
    return [w], [(w, w - 0.1 * gradient(w))], [T.sqr(w).sum(), w]


def with_new_value():
    w = square("w")
    new = w - 0.1 * gradient(w)
    return [w], [(w, new)], [new, T.sqr(new).sum()]


def with_gradient():
    w = square("w")
    g = gradient(w)
    return [w], [(w, w - 0.1 * g)], [g]


def average():
    w, e = square("w"), square("e", 2)
    new = w - 0.1 * gradient(w)
    return [w, e], [(w, new), (e, 0.9 * e + 0.1 * new)], []


def clipped():
    w = square("w")
    return [w], [(w, T.clip(w - 0.1 * gradient(w), -1, 1))], []


def norm_of_columns():
    w = square("w")
    new = w - 0.1 * gradient(w)
    return [w], [(w, new * T.minimum(1, 1 / T.sqrt(T.sqr(new).sum(axis=0))))], []


def norm_of_gradients():
    w, b = square("w"), theano.shared(np.zeros(SIDE), "b")
    loss = T.sqr(x.dot(w) + b).sum()
    grads = T.grad(loss, [w, b])
    norm = T.sqrt(sum(T.sqr(one).sum() for one in grads))
    return [w, b], [(one, one - 0.1 * g * T.minimum(1, 0.5 / norm)) for one, g in zip([w, b], grads)], [loss]


def increment():
    w = square("w")
    return [w], [(w, T.inc_subtensor(w[:10], 0.1))], []


def same_value():
    w, z = square("w"), square("z", 2)
    new = w - 0.1 * gradient(w)
    return [w, z], [(w, new), (z, new)], []


def without_data():
    w = square("w")
    return [w], [(w, 0.5 * w)], [x.sum()]


def of_another_variable():
    w, large, row = square("w"), square("large", 2), theano.shared(np.arange(SIDE) / SIDE, "row")
    return [w, large, row], [(w, w - 0.1 * gradient(w) * large + row)], [large.sum()]


def two_dtypes():
    w, n = square("w"), theano.shared(np.ones((SIDE, SIDE), "float32"), "n")
    g = gradient(w)
    return [w, n], [(w, w - 0.1 * g), (n, T.cast(n + g, "float32"))], []


def growing():
    w = theano.shared(np.ones((SIDE, SIDE)), "w")
    return [w], [(w, T.concatenate([w, w[:1]]))], [x.sum()]


def row_vector():
    w = theano.shared(np.ones((1, SIDE**2)), "w", broadcastable=(True, False))
    loss = T.sqr(x.sum(1).dimshuffle(0, "x") * w).mean()
    return [w], [(w, w - 0.1 * T.grad(loss, w))], [loss]


def integers():
    n = theano.shared(np.arange(SIDE**2).reshape(SIDE, SIDE), "n")
    return [n], [(n, n + T.cast(10 * x.sum(0), "int64").sum() * (n % 3))], []


def no_update_of_a_large_variable():
    w, b = square("w"), theano.shared(np.zeros(SIDE), "b")
    return [w, b], [(b, b - x.dot(w).sum(0))], []


KINDS = [one for one in list(globals().values()) if getattr(one, "__module__", "") == __name__][2:]


def run(make, compile, calls=3):
    """Return the outputs of some calls, and the variables with their values after each."""
    variables, updates, outputs = make()
    function = compile([x], outputs, updates=updates, on_unused_input="ignore")
    found = []
    for _ in range(calls):
        found += function(DATA)
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


@pytest.mark.parametrize("n_ranks", [2, 5])
def test_small_variables_in_slices(synchronize, n_ranks, monkeypatch):
    """With no limit of the size, partial arrays are in private memory, and are added by a collective."""
    monkeypatch.setattr(shared_variables, "LEAST_BYTES", 1)
    synchronize(n_ranks)
    _, _, expected = run(norm_of_gradients, theano.function)
    function, variables, found = run(norm_of_gradients, by_rows)
    close(found, expected, 1e-9, 1e-9)
    check_replicas(variables, n_ranks)
    assert len(function._graph.slices.variables) == 2


def test_a_random_tree_of_operations(session):
    """Leaves are old values, gradients, numbers, rows, and results that the graph computes in full."""
    choose = random.Random(7)
    for _ in range(8):
        seed = choose.random()
        _, _, expected = run(lambda seed=seed: tree(random.Random(seed)), theano.function, 2)
        _, variables, found = run(lambda seed=seed: tree(random.Random(seed)), by_rows, 2)
        close(found, expected, 1e-9, 1e-9)
        check_replicas(variables, session)


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
                values += [function(DATA)[i] for i in (2, 0)]
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
