"""`sequence`: the calls of a block are sent as one message, and give the results of separate calls."""

import contextlib
import functools
import json
import signal
import threading
import warnings

import numpy as np
import pytest
from backend import T, theano
from comparison import shares
from deadline import wait_for
from hypothesis import given
from hypothesis import strategies as st

import synkhronos as synk
from synkhronos._session.lifecycle import current

DATA = np.random.RandomState(3).randint(-9, 9, (11, 3)).astype("float64")


@functools.cache
def built():
    """Build a step of gradient descent on integers, in three parts, other functions, and their variables."""
    x = T.dmatrix("x")
    w, g = theano.shared(np.zeros(3), "w"), theano.shared(np.zeros(3), "g")
    rows, picked = theano.shared(np.zeros((1, 3)), "rows"), theano.shared(np.zeros((1, 3)), "picked")
    error = ((T.dot(x, w) - 1) ** 2).mean()
    gradient = synk.function([x], error, updates=[(g, T.grad(error, w))], name="gradient")
    update = synk.function([], updates=[(w, w - 2.0**-10 * g)], name="update")
    total = synk.function([x], [(x.sum(), "sum"), (2 * x, "gather")], name="total")
    picked_sum = synk.function([], (rows.sum(), "sum"), sliceable_shareds=[rows], name="picked")
    own = synk.function([x], (x.sum() + w.sum(), None), updates=[(picked, x[:1])], name="own")
    return gradient, update, total, picked_sum, own, w, g, rows, picked


@pytest.fixture
def parts(session):
    """Return the functions and variables, distributed, with all variables set to 0."""
    w, g, rows, picked = built()[5:]
    synk.distribute()
    synk.broadcast([w, g, rows, picked], [np.zeros(3), np.zeros(3), np.zeros((1, 3)), np.zeros((1, 3))])
    return built()


def n_sent():
    """Return the number of messages sent to the ranks."""
    return current().replica._group.sync.sent


def step(gradient, update, g, data, **options):
    loss = gradient(data, **options)
    synk.all_reduce(g, weights=gradient.counts)
    update()
    return loss


CASES = {
    "array": (lambda: DATA, {}),
    "batch": (lambda: DATA, {"batch": [9, 0, 9, 4, 2, 2, 1]}),
    "few": (lambda: DATA, {"batch": 2}),
    "slices": (lambda: DATA, {"num_slices": 3}),
    "data": (lambda: synk.data(DATA), {"batch": slice(1, 10)}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_one_message_and_bitwise_equal(parts, case):
    gradient, update, _, _, _, w, g, _, _ = parts
    make, options = CASES[case]
    data = make()
    one_by_one = [(step(gradient, update, g, data, **options), w.get_value()) for _ in range(3)]
    synk.broadcast(w, np.zeros(3))
    for loss, value in one_by_one:
        before = n_sent()
        with synk.sequence():
            future = step(gradient, update, g, data, **options)
            assert n_sent() == before
        assert n_sent() == before + 1
        assert future.result() == loss
        np.testing.assert_array_equal(w.get_value(), value)
    assert synk.check_replicas([w, g]) == {}
    assert update.counts == (1,) * current().n_ranks


def drawn_part(draw, n_ranks):
    """Draw a call or a collective, as a function of the fixture `parts`, on integers, whose sums are exact."""
    kind = draw(st.integers(0, 6))
    n, seed = draw(st.integers(1, 12)), draw(st.integers(0, 99))
    data = np.random.RandomState(seed).randint(-9, 9, (n, 3)).astype("float64")
    batch = draw(st.one_of(st.none(), st.lists(st.integers(0, n - 1), min_size=1, max_size=7)))
    slices, rank = draw(st.integers(1, 3)), seed % n_ranks

    def run(parts):
        _, update, total, _, own, w, g, rows, picked = parts
        if kind == 0:
            return total(data, batch=batch, num_slices=slices)
        if kind == 1:
            return own(data, batch=batch)
        if kind == 2:
            return update()
        if kind == 3:
            return synk.all_reduce([g, w], op="max")
        if kind == 4:
            return synk.broadcast(g, data[0])
        if kind == 5:
            return synk.set_value(rank, [w, picked], [data[0], data[:1]])
        return synk.scatter(rows, data)

    return run


@given(st.data())
def test_any_sequence_does_what_its_parts_do(parts, session, draw_from):
    drawn = [drawn_part(draw_from.draw, session) for _ in range(draw_from.draw(st.integers(1, 6)))]
    variables = list(parts[5:])
    found = []
    for block in (contextlib.nullcontext, synk.sequence):
        synk.broadcast(variables, [np.zeros(3), np.zeros(3), np.zeros((1, 3)), np.zeros((1, 3))])
        with block():
            results = [run(parts) for run in drawn]
        results = [one.result() if isinstance(one, synk.Future) else one for one in results]
        found.append([results, [synk.get_value(rank, variables) for rank in range(session)]])
    np.testing.assert_equal(*found)


def test_inputs_are_read_at_the_time_of_the_call(parts):
    total = parts[2]
    data = DATA.copy()
    for repeat in range(3):  # reuses staging memory, then needs more
        n = 11 if repeat < 2 else 9000
        data = np.resize(DATA, (n, 3)).copy()
        with synk.sequence():
            futures = []
            for i in range(4):
                data[:] = i
                futures.append(total(data))
            futures.append(total(DATA, batch=[3, 1, 1]))
            data[:] = 77
        for i, future in enumerate(futures[:4]):
            assert future.result()[0] == 3 * n * i
            np.testing.assert_array_equal(future.result()[1], np.full((n, 3), 2.0 * i))
        np.testing.assert_array_equal(futures[4].result()[1], 2 * DATA[[3, 1, 1]])
    np.testing.assert_array_equal(total(DATA)[1], 2 * DATA)


def test_variables_are_set_in_order(parts, session):
    _, update, total, picked_sum, own, w, g, rows, _ = parts
    ones = synk.data(np.ones((11, 3)))
    with synk.sequence():
        first = picked_sum(batch_s=slice(0, 1))  # asks ranks for lengths
        synk.broadcast(g, [1.0, 2.0, 3.0])
        update()
        synk.broadcast(g, [1000.0] * 3)
        update()
        synk.scatter(rows, ones)
        synk.set_value(session - 1, g, [5.0, 6.0, 7.0])
        synk.reduce(g, op="sum")
        assert own(DATA) is not None
        summed = total(ones)
        ones.set_value(np.zeros((400, 3)))  # in new memory: `summed` still reads the old
    assert summed.result()[0] == 33
    assert first.result() == 0
    expected = -(2.0**-10) * (np.array([1.0, 2.0, 3.0]) + 1000)
    np.testing.assert_array_equal(synk.gather(w), [expected] * session)
    assert picked_sum() == 33
    assert synk.get_lengths(rows) == [stop - start for start, stop in shares(11, session)]
    np.testing.assert_array_equal(g.get_value(), (session - 1) * 1000.0 + np.array([5.0, 6.0, 7.0]))


def test_results_of_the_controller_alone_are_kept(parts, session):
    own, w = parts[4], parts[5]
    start, stop = shares(11, session)[0]
    with synk.sequence():
        futures = [own(DATA), own(DATA, batch=slice(0, 1))]
        synk.broadcast(w, [1.0, 1.0, 1.0])
        futures.append(own(DATA))
    assert [one.result() for one in futures] == [DATA[start:stop].sum(), DATA[:1].sum(), DATA[start:stop].sum() + 3]


def test_results_are_not_available_in_the_block(parts):
    total = parts[2]
    with synk.sequence():
        future = total(DATA)
        with pytest.raises(synk.SessionError, match="after it"):
            future.result()
        assert "pending" in repr(future)
        with pytest.raises(TypeError):
            float(future)
        with pytest.raises(TypeError, match="input x"):
            total(future)
    assert future.result()[0] == DATA.sum()
    assert "pending" not in repr(future)


def test_an_exception_in_the_block_sends_nothing(parts):
    gradient, update, total, _, _, w, g, _, _ = parts
    synk.broadcast(g, np.ones(3))
    wrongs = [(lambda: total(DATA[:, 0]), TypeError), (lambda: synk.all_reduce(g, weights=[-1.0]), ValueError)]
    for wrong, error in [*wrongs, (lambda: 1 / 0, ZeroDivisionError)]:
        before = n_sent()
        with pytest.raises(error), synk.sequence():
            future = update()
            wrong()
        assert n_sent() == before
        with pytest.raises(synk.SessionError, match=error.__name__):
            future.result()
        assert repr(future) == "<synkhronos.Future, failed>"
    np.testing.assert_array_equal(w.get_value(), np.zeros(3))
    with synk.sequence():
        pass
    assert n_sent() == before
    with synk.sequence():  # a single part is sent as outside of a block
        future = gradient(DATA)
    assert n_sent() == before + 1
    assert future.result() == 1


@pytest.fixture
def reader(parts):
    """Return an exact function that reads a variable on each rank, and the variable."""
    x, rows = T.dvector("x"), theano.shared(np.arange(3.0), "read")
    f = synk.function([x], (x * rows.sum()).sum(), exact=True)
    assert f(np.ones(11)) == 33
    return f, rows


def test_an_exception_in_the_block_leaves_a_value_unsent(reader):
    f, var = reader
    var.set_value(np.ones(4))
    with pytest.raises(ZeroDivisionError), synk.sequence():
        synk.broadcast(var)
        1 / 0  # noqa: B018
    assert f(np.ones(11)) == 44
    assert synk.check_replicas(var) == {}


def test_an_exception_in_the_block_leaves_variables_scattered_or_equal(reader, session):
    f, var = reader
    with pytest.raises(ZeroDivisionError), synk.sequence():
        synk.scatter(var, np.arange(3.0))
        1 / 0  # noqa: B018
    assert f(np.ones(11)) == 33
    synk.scatter(var, np.ones(session))
    for collective in (synk.all_reduce, synk.broadcast, lambda var: synk.broadcast(var, np.ones(2))):
        with pytest.raises(ZeroDivisionError), synk.sequence():
            collective(var)
            1 / 0  # noqa: B018
        with pytest.raises(ValueError, match="was scattered"):
            f(np.ones(11))


class Alarm(Exception):
    """The exception of a signal handler."""


def give_alarm(number, frame):
    raise Alarm


def test_an_interrupt_before_the_block_is_sent_leaves_a_value_unsent(reader):
    """The handler runs while the end of the block waits for a call of another thread."""
    f, var = reader
    var.set_value(np.ones(4))
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with current().lock:
            is_held.set()
            is_over.wait(60)

    other, before = threading.Thread(target=hold), signal.signal(signal.SIGALRM, give_alarm)
    try:
        with pytest.raises(Alarm), synk.sequence():
            synk.broadcast(var)
            future = synk.function([], var.sum())()
            other.start()
            assert is_held.wait(60)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
    finally:
        signal.signal(signal.SIGALRM, before)
        is_over.set()
        other.join()
    with pytest.raises(synk.SessionError, match="Alarm"):
        future.result()
    assert f(np.ones(11)) == 44


def test_values_of_complete_parts_are_kept_on_all_ranks(parts, session):
    """Of a block that fails: the broadcast of a value that the controller has computed alone, and an update of it."""
    x, w, other = T.dvector("x"), theano.shared(np.ones(3), "own"), theano.shared(np.zeros(1), "other")
    alone = synk.function([x], updates=[(w, w + x.sum())], exact=True, plan="controller")
    double = synk.function([], updates=[(w, 2 * w)])
    double()
    alone(np.ones(5))
    if session > 1:
        for rank in range(session):
            synk.set_value(rank, other, np.zeros(rank))
        alone(np.ones(2))
        with pytest.raises(ValueError), synk.sequence():
            synk.broadcast(w)
            double()
            synk.all_reduce(other)
        assert synk.check_replicas(w) == {}
        np.testing.assert_array_equal(synk.get_value(session - 1, w), 2 * np.full(3, 9.0))


def test_a_part_that_fails_leaves_variables_scattered(reader, session):
    """The rows of the part before it are on the ranks."""
    f, var = reader
    other = theano.shared(np.zeros(1), "other")
    for rank in range(session):
        synk.set_value(rank, other, np.zeros(rank))
    if session > 1:
        with pytest.raises(ValueError), synk.sequence():
            synk.scatter(var, np.ones(session))
            synk.all_reduce(other)
        with pytest.raises(ValueError, match="was scattered"):
            f(np.ones(11))


def test_parts_that_need_an_answer_must_be_first(parts, session):
    _, update, total, picked_sum, _, w, _, rows, _ = parts
    asking = (synk.gather, synk.broadcast, synk.get_shapes, functools.partial(synk.reduce, in_place=False))
    refused = [*(functools.partial(one, w) for one in asking), synk.check_replicas, lambda: synk.get_value(0, w)]
    refused += [lambda: synk.all_gather(rows), lambda: picked_sum(batch_s=slice(0, 1))]
    for one in refused:
        with synk.sequence():
            one()
        before = n_sent()
        with pytest.raises(synk.SessionError, match="first in the block"), synk.sequence():
            update()
            one()
        assert n_sent() == before
    with pytest.raises(ValueError, match="check_against_theano"), synk.sequence():
        update()
        total(DATA, check_against_theano=True)
    with synk.sequence():
        future = total(DATA, check_against_theano=True)
    assert future.result()[0] == DATA.sum()
    with pytest.raises(synk.SessionError, match="do not nest"), synk.sequence(), synk.sequence():
        raise AssertionError
    x = T.dmatrix("x")
    borrowed = synk.function([x], theano.Out(x.sum(), borrow=True), name="borrowed")
    with pytest.raises(TypeError, match="borrow"), synk.sequence():
        borrowed(DATA)


def test_the_environment_compares_the_first_part_alone(parts, monkeypatch):
    gradient, update, total, _, _, _, g, _, _ = parts
    monkeypatch.setenv("SYNKHRONOS_CHECK", "1")
    with synk.sequence():
        loss = gradient(DATA)
        synk.all_reduce(g, weights=gradient.counts)
        update()
        after = total(DATA)
    assert loss.result() == 1
    assert after.result()[0] == DATA.sum()


@pytest.mark.numba
def test_new_functions_are_distributed(parts, session):
    w = parts[5]
    more = theano.shared(np.arange(3.0), "more")
    x = T.dmatrix("x")
    new = synk.function([x], ((x * 5).sum(), "sum"), updates=[(w, w + more)])
    newer = synk.function([x], ((x * w).sum(), "sum"))
    with synk.sequence():
        futures = [new(DATA), newer(DATA), new(DATA, num_slices=2)]
    assert [one.result() for one in futures] == [5 * DATA.sum(), (DATA * np.arange(3)).sum(), 5 * DATA.sum()]
    np.testing.assert_array_equal(synk.gather(w), [2 * np.arange(3.0)] * session)


def test_a_call_that_would_mix_rows_is_refused_before_anything_is_sent(parts, session):
    total = parts[2]
    if session == 1:
        return
    x = T.dmatrix("x")
    rows = synk.function([x], x.sum(axis=1), name="rows")
    even = np.ones((2 * session, 3))
    with pytest.raises(ValueError, match="row for each data point"), synk.sequence():
        right = total(even)
        rows(even)
    with pytest.raises(synk.SessionError, match="row for each data point"):
        right.result()


def test_other_threads_are_not_recorded(parts):
    total = parts[2]
    found = []

    def work():
        found.append(total(DATA + 1)[0])
        with synk.sequence():
            future = total(DATA + 2)
        found.append(future.result()[0])

    thread = threading.Thread(target=work)
    with synk.sequence():
        futures = [total(DATA)]
        thread.start()
        wait_for(lambda: found, "the call of the other thread")
        assert len(found) == 1  # the other block waits for this one
        futures.append(total(3 * DATA))
    thread.join(60)
    assert [future.result()[0] for future in futures] == [DATA.sum(), 3 * DATA.sum()]
    assert found == [(DATA + 1).sum(), (DATA + 2).sum()]


def test_replicas_are_compared_before_a_sequence(synchronize):
    synchronize(2, check_replicas=4)
    gradient, update, _, _, _, w, g, _, _ = built()
    synk.distribute()
    synk.broadcast([w, g], [np.zeros(3)] * 2)
    synk.set_value(1, w, np.ones(3))
    found = []
    for _ in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with synk.sequence():
                step(gradient, update, g, DATA)
        found.append([str(one.message) for one in caught])
        assert all(one.filename == __file__ for one in caught)
    assert [len(one) for one in found] == [0, 1, 0, 0]
    assert "the replicas of w differ" in found[1][0]


def test_traces_name_the_parts(two, tmp_path):
    gradient, update, _, _, _, _, g, _, _ = built()
    synk.distribute()
    with synk.trace(tmp_path / "trace.json") as measured, synk.sequence():
        step(gradient, update, g, DATA)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        spans = {event["name"]: event for event in events if event["ph"] == "X" and event["pid"] == rank}
        full = spans["Sequence (Call gradient, AllReduce, Call update)"]
        order = [spans[name] for name in ("Call gradient", "AllReduce", "Call update")]
        assert full["ts"] <= order[0]["ts"]
        assert order[-1]["ts"] + order[-1]["dur"] <= full["ts"] + full["dur"] + 1e-3
        for one, other in zip(order, order[1:]):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3
        assert sum(measured.seconds[rank].values()) == pytest.approx(measured.elapsed[rank], rel=1e-9)
        assert measured.seconds[rank]["function"] > 0


def test_a_session_that_is_closed_in_the_block(two):
    gradient = built()[0]
    with pytest.raises(synk.SessionError, match="closed"), synk.sequence():
        future = gradient(DATA)
        synk.close()
    with pytest.raises(synk.SessionError, match="closed"):
        future.result()


@pytest.mark.parametrize("name", ["all_reduce", "reduce"])
def test_consecutive_reductions_of_different_variables_meet_once(session, monkeypatch, name):
    variables = [theano.shared(np.arange(4.0) + i, f"v{i}") for i in range(6)]
    synk.distribute()
    synk.broadcast(variables)
    transport, reduce = current().replica._exchange.transport, getattr(synk, name)
    seen, before = [], getattr(transport, name)
    monkeypatch.setattr(transport, name, lambda arrays, *others: seen.append(len(arrays)) or before(arrays, *others))
    with synk.sequence():
        for var in variables[:4]:
            reduce(var, "sum")
        reduce(variables[0], "sum")  # again
        reduce(variables[4:], "sum")
        reduce(variables[1], "max")
    assert seen == [4, 3, 1]
    n = session
    factors = [n * n if name == "all_reduce" else 2 * n - 1, n, n, n, n, n]
    for i, (var, factor) in enumerate(zip(variables, factors)):
        assert (var.get_value() == factor * (np.arange(4.0) + i)).all()
    assert name == "reduce" or synk.check_replicas(variables) == {}


def test_the_part_whose_shapes_differ_is_named(session):
    if session == 1:
        pytest.skip("a single rank has no other shapes")
    variables = [theano.shared(np.ones(4), f"v{i}") for i in range(3)]
    synk.distribute()
    synk.broadcast(variables)
    synk.set_value(1, variables[1], np.ones(5))
    with pytest.raises((ValueError, synk.WorkerError), match="v1"), synk.sequence():
        for var in variables:
            synk.all_reduce(var, "sum")
    assert [var.get_value().tolist() for var in (variables[0], variables[2])] == [[session] * 4, [1] * 4]
