"""Plans of exact functions: results as the serial program's, and replicas that are valid whenever a rank reads them."""

import contextlib
import functools
import logging
import os
import pickle
import weakref

import numpy as np
import pytest
from backend import MRG_RandomStreams, RandomStreams, T, lasagne, theano
from comparison import close
from process_state import kill, worker_pids

import synkhronos as synk
from synkhronos._api.checks import Serial
from synkhronos._api.functions import Function
from synkhronos._native import native
from synkhronos._session import current
from synkhronos._session.replicas import StaleReplicas
from synkhronos.extensions import checkpoint

PLANS = ("rows", "controller")
COLUMNS, HIDDEN = 12, 400  # so that variables lie in the shared heap, and outside


def values(n, seed=0):
    rng = np.random.RandomState(seed)
    return rng.randn(n, COLUMNS), rng.randint(0, 3, n).astype("int32")


class Net:
    """A small network, with a function that trains it by Adam and returns its loss and predictions."""

    def __init__(self, build, **options):
        x, y = T.dmatrix("x"), T.ivector("y")
        rng = np.random.RandomState(1)
        self.params = [
            theano.shared(rng.randn(*shape) * 0.2, f"w{shape}") for shape in ((COLUMNS, HIDDEN), (HIDDEN, 3))
        ]
        scores = T.nnet.softmax(T.tanh(x.dot(self.params[0])).dot(self.params[1]))
        loss = -T.log(scores[T.arange(y.shape[0]), y]).mean()
        self.rate = theano.shared(0.01, "rate")
        updates = lasagne.updates.adam(loss, self.params, self.rate)
        self.state = list(updates)
        self.step = build([x, y], [loss, scores], updates=updates, **options)
        if build is not theano.function:
            rows = build([x, y], [loss, scores], updates=updates, **{**options, "plan": "rows"})
            self.by_plan = {"controller": self.step, "rows": rows}
        self._initial = [var.get_value() for var in (*self.state, self.rate)]

    def restart(self):
        for var, value in zip((*self.state, self.rate), self._initial):
            var.set_value(value)
        return self


@functools.cache
def built():
    return Net(synk.function, exact=True, plan="controller"), Net(theano.function)


def restarted():
    """Return a network whose step the controller computes alone, and the same with the serial program."""
    ours, theirs = built()
    synk.distribute()
    ours.restart()
    synk.broadcast([*ours.state, ours.rate])
    return ours, theirs.restart()


@pytest.fixture
def nets():
    """Return the networks, in a session that the test has asked for first."""
    return restarted()


def test_steps_with_alternating_plans_and_sizes_are_the_serial_ones(session, nets):
    ours, theirs = nets
    data = [synk.data(value) for value in values(64, 9)]
    for i, n in enumerate((40, 1, 3, 64, 2, 17, 40, 5)):
        step = ours.by_plan[PLANS[(i // 2) % 2]]
        close(step(*values(n, i)), theirs.step(*values(n, i)))
        rows = slice(i, i + 5) if i % 2 else [3, 1, 4, 1, 5]
        close(step(*data, batch=rows), theirs.step(*(value[rows] for value in values(64, 9))))
        if step is ours.step:
            assert step.counts == (5, *[0] * (session - 1))
    close(ours.state, theirs.state)
    assert not synk.check_replicas()


def read_by_get_value(net, session):
    return [synk.get_value(session - 1, var) for var in net.params]


def read_by_gather(net, session):
    return [value[-1] for value in synk.gather(net.params, nd_up=1)]


def read_by_reduction(net, session):
    return list(synk.reduce(net.params, "max", in_place=False))


def read_by_all_reduce(net, session):
    synk.all_reduce(net.params, "sum")
    return [var.get_value() / session for var in net.params]


def read_by_function(net, session):
    return synk.function([], [(1 * var, "min") for var in net.params])()


def read_in_sequence(net, session):
    function = synk.function([], [(1 * var, "min") for var in net.params])
    with synk.sequence():
        first, second = function(), function()
    close(first.result(), second.result())
    return second.result()


def read_in_child_process(net, session):
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        with os.fdopen(write, "wb") as pipe:
            pickle.dump([var.get_value() for var in net.params], pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pickle.load(pipe)
    os.wait()
    return found


READERS = [
    read_by_get_value,
    read_by_gather,
    read_by_reduction,
    read_by_all_reduce,
    read_by_function,
    read_in_sequence,
    read_in_child_process,
]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_readers_see_the_values_that_the_controller_has_computed(session, nets, read):
    ours, theirs = nets
    for net in nets:
        net.step(*values(8))
    synk.distribute()
    for net in nets:
        net.step(*values(9, 1))
    close(read(ours, session), [var.get_value() for var in theirs.params])
    assert not synk.check_replicas(ours.params)


def test_all_stale_values_are_sent_in_one_message_and_only_when_they_are_needed(session, nets, caplog):
    ours, _ = nets
    synk.distribute()
    with caplog.at_level(logging.DEBUG, "synkhronos"):
        for _ in range(3):
            ours.step(*values(8))
        assert not [line for line in caplog.messages if line.startswith("broadcast")]
        synk.get_value(0, ours.params[0])
        synk.get_value(0, ours.params)
    sent = [line for line in caplog.messages if line.startswith("broadcast")]
    assert len(sent) == 1
    copied = current("test").stale.copied(ours.params)  # the ranks view the others in the controller's memory
    assert [var for var in ours.params if f" {var}" in sent[0]] == copied
    assert copied


def test_values_that_the_program_sets_are_given_to_all_ranks_by_an_exact_call_only(session, nets):
    ours, theirs = nets
    first, serial = ours.params[0], theirs.params[0]
    for net in nets:
        net.step(*values(8))
    synk.distribute()
    for net in nets:
        net.step(*values(8, 1))
    updated = first.get_value()
    first.set_value(2 * updated)
    if session > 1:
        close(synk.get_value(session - 1, first), updated)  # as after the same update on all ranks
    serial.set_value(2 * updated)
    for net in nets:
        net.rate.set_value(0.003)
        net.step(*values(8, 2))
    close(synk.get_value(session - 1, first), serial.get_value())
    assert synk.get_value(session - 1, ours.rate) == 0.003


def test_an_update_in_place_by_the_backend_alone_stays_on_the_controller(session, nets):
    ours, _ = nets
    var = ours.params[0]
    double = theano.function([], [], updates=[(var, var * 2)])
    ours.step(*values(8))
    synk.distribute()
    ours.step(*values(8))
    updated = var.get_value()
    double()
    close(var.get_value(), 2 * updated)
    if session > 1:
        close(synk.get_value(session - 1, var), updated)


def test_a_broadcast_sends_what_the_controller_has_now(session, nets):
    ours, _ = nets
    var = ours.params[0]
    synk.distribute()
    ours.step(*values(8))
    var.set_value(np.ones((2, 5)))
    synk.broadcast(ours.params)
    close(synk.get_value(session - 1, var), np.ones((2, 5)))
    assert not synk.check_replicas(ours.params)


@pytest.mark.parametrize("kind", [RandomStreams, MRG_RandomStreams])
def test_draws_are_those_of_the_serial_program_whichever_plan_made_the_earlier_ones(session, kind):
    x = T.dmatrix("x")
    built = []
    for build in (functools.partial(synk.function, exact=True), theano.function):
        drawn = kind(7).uniform(size=x.shape, dtype="float64")
        plans = PLANS if build is not theano.function else (None,)
        built.append([build([x], x + drawn, **({"plan": plan} if plan else {})) for plan in plans])
    ours, (reference,) = built
    for i in range(6):
        given = values(5 + i, i)[0]
        close(ours[(i // 2) % 2](given), reference(given))


def test_a_checkpoint_has_the_updated_values(two, nets, tmp_path):
    ours, theirs = nets
    for net in nets:
        net.step(*values(8))
    checkpoint.save(tmp_path / "state", ours.state)
    for var in ours.state:
        var.set_value(0 * var.get_value())
    checkpoint.load(tmp_path / "state", ours.state)
    close(ours.state, theirs.state)
    assert not synk.check_replicas(ours.state)


def test_a_replaced_worker_gets_the_updated_values(synchronize):
    synchronize(3, restart_workers=True)
    nets = ours, theirs = restarted()
    steps = ours.by_plan["rows"], theirs.step
    for step in steps:
        step(*values(8))
    for net in nets:
        net.step(*values(8, 1))
    kill(worker_pids()[0])
    for net in nets:
        net.step(*values(8, 2))  # needs no worker
    with pytest.raises(synk.WorkerRestarted):
        steps[0](*values(8, 3))
    synk.broadcast(ours.state)
    for net in nets:
        net.step(*values(8, 4))
    for step in steps:
        step(*values(8, 5))
    close(ours.state, theirs.state)
    assert not synk.check_replicas(ours.state)


def test_a_call_that_fails_changes_no_variable(session, nets):
    ours, _ = nets
    ours.step(*values(8))
    synk.distribute()
    before = [var.get_value() for var in ours.state]
    with pytest.raises(synk.WorkerError, match="The controller computed this call alone"):
        ours.step(values(8)[0], np.full(8, 99, "int32"))
    with pytest.raises(TypeError):
        ours.step(values(8)[0].astype("complex128"), values(8)[1])
    close(ours.state, before, 0, 0)
    assert not synk.check_replicas(ours.state)


@pytest.mark.parametrize("plan", ["rows", "controller"])
@pytest.mark.parametrize("n_before", [0, 3])
def test_an_error_in_the_data_has_the_same_class_with_each_plan(two, plan, n_before):
    """Also in a repeated call, which takes a shorter path."""
    x, y = T.dmatrix("x"), T.ivector("y")
    table, total = theano.shared(np.zeros(5), "table"), theano.shared(0.0, "total")
    updates = [(total, total + x.sum())]
    function = synk.function([x, y], table[y] + x[:, 0], updates=updates, exact=True, plan=plan, name="lookup")
    given = np.ones((4, 3))
    for _ in range(n_before):
        function(given, np.zeros(4, "int32"))
    with pytest.raises(synk.WorkerError, match=r"^rank 0 \(cpu\) failed in Call lookup: IndexError: ") as caught:
        function(given, np.full(4, 99, "int32"))
    assert isinstance(caught.value.exception, IndexError) and caught.value.rank == 0
    assert ("computed this call alone" in str(caught.value)) == (plan == "controller")
    assert "Traceback" in caught.value.traceback_text
    close(function(given, np.zeros(4, "int32")), np.ones(4))
    close(total.get_value(), 12.0 * (n_before + 1))
    plain = synk.function([x, y], table[y] + x[:, 0], exact=True, plan=plan)
    with pytest.raises(synk.WorkerError, match="IndexError: ") as caught:
        plain(given, np.full(4, 99, "int32"))
    assert caught.value.updated is False  # it has no updates


def test_slices_sequences_and_calls_without_rows_use_all_ranks(two, nets):
    ours, theirs = nets
    data = values(8)
    close(ours.step(*data, num_slices=2), theirs.step(*data))
    assert ours.step.counts == (4, 4)
    with synk.sequence():
        futures = [ours.step(*data), ours.step(*data)]
    close([future.result() for future in futures], [theirs.step(*data), theirs.step(*data)])
    x = T.dmatrix("x")
    total = synk.function([x], x.sum(), exact=True, plan="controller")
    assert total(np.zeros((0, 2))) == 0
    assert total.counts == (0, 0)
    close(ours.state, theirs.state)


def test_inputs_and_outputs_are_those_of_the_serial_program(session):
    x, scale, shift = T.dmatrix("x"), T.dscalar("scale"), T.dvector("shift")
    total = theano.shared(0.0, "total")
    function = synk.function(
        [x],
        [x * scale + shift, x.sum(), T.log(x).min()],
        [scale, shift],
        [(total, total + x.sum())],
        exact=True,
        plan="controller",
    )
    given, ones = np.arange(1.0, 9.0).reshape(4, 2), np.ones(2)
    doubled, added, least = function(given, 2.0, ones)
    close([doubled, added, least], [2 * given + 1, 36.0, 0.0])
    close(function(given.tolist(), 3.0, ones, output_subset=[1, 0]), [36.0, 3 * given + 1])
    close(function(given, 2.0, ones, check_against_theano=True)[1], 36.0)
    close(total.get_value(), 3 * 36.0)
    doubled[:] = 0  # results belong to the program
    close(function(given, 2.0, ones)[0], 2 * given + 1)


def test_the_plan_of_the_session_is_the_default(no_session):
    x = T.dmatrix("x")
    synk.fork(2, use_gpu=False, plan="controller")
    alone, divided = (synk.function([x], x.sum(), exact=True, plan=plan) for plan in (None, "rows"))
    given = values(6)[0]
    close([alone(given), divided(given)], [given.sum()] * 2)
    assert (alone.counts, divided.counts) == ((6, 0), (3, 3))
    synk.close()
    synk.fork(2, use_gpu=False, plan="rows")
    close(alone(given), given.sum())
    assert alone.counts == (3, 3)


@pytest.mark.parametrize("distributed_at", [0, 11])
def test_repeated_calls_on_the_controller(session, distributed_at, monkeypatch):
    """A third call with the same shapes takes a shorter path; whatever differs from it takes the usual one."""
    usual, usual_call = [], Function.__call__
    monkeypatch.setattr(Function, "__call__", lambda self, *args: usual.append(self) or usual_call(self, *args))
    x, y, total = T.dmatrix("x"), T.dvector("y"), theano.shared(np.zeros(3), "total")
    updates = [(total, total + x.sum(axis=0))]
    function = synk.function([x, y], [x * y[:, None], total.sum()], updates=updates, exact=True, plan="controller")
    rng, expected, kept = np.random.RandomState(0), np.zeros(3), []
    for i in range(40):
        if i == distributed_at:
            synk.distribute()
        n = 7 if i % 8 < 6 else 4
        given, factor = rng.randn(n, 3), rng.randn(n)
        if i == 5:
            total.set_value(expected + 1)
            expected = expected + 1
        if i % 10 == 9:
            given = np.asfortranarray(given)
        if i == 20:
            synk.broadcast(total, 2 * expected)
            expected = 2 * expected
        if i == 30:
            given = given.tolist()
        if i == 33:
            with pytest.raises(TypeError):
                function(given, factor.astype("complex128"))
            with pytest.raises(ValueError, match="different numbers"):
                function(given, factor[1:])
        context = synk.profile() if i == 25 else contextlib.nullcontext()
        with context:
            product, before = function(given, factor)
        kept.append((product, np.asarray(given) * factor[:, None]))
        close(before, expected.sum())
        expected = expected + np.sum(given, axis=0)
        assert function.counts == (n, *[0] * (session - 1))
        if i in (12, 21):
            close(synk.gather(total, nd_up=1), [expected] * session)
        if i == 4:
            assert len(usual) == 2  # since then, all calls have taken the shorter path
    for product, right in kept:
        close(product, right)
    synk.close()
    with pytest.raises(synk.SessionError, match="no session"):
        function(given, factor)


def test_repeated_calls_for_some_of_the_outputs(session):
    x, total = T.dmatrix("x"), theano.shared(np.zeros(3), "total")
    outputs = [x.sum(axis=0), x.max()]
    function = synk.function([x], outputs, updates=[(total, total + x.sum(axis=0))], exact=True, plan="controller")
    synk.distribute()
    given = values(5)[0][:, :3]
    right = [given.sum(axis=0), given.max()]
    for subset in ([1], None, [0], [], [1], None):
        keywords = {} if subset is None else {"output_subset": subset}
        for _ in range(3):
            found = function(given, **keywords)
            assert len(found) == len(right if subset is None else subset)
            for i, one in zip([0, 1] if subset is None else subset, found):
                close(one, right[i])
    close(total.get_value(), 18 * right[0])


def test_repeated_calls_are_compared_if_the_environment_asks(two, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_CHECK", "1")
    compared, compare = [], Serial.compare
    monkeypatch.setattr(Serial, "compare", lambda self, *args: compared.append(self) or compare(self, *args))
    x, total = T.dmatrix("x"), theano.shared(np.zeros(3), "total")
    function = synk.function([x], x.sum(), updates=[(total, total + 1)], exact=True, plan="controller")
    for keywords in 2 * [{}] + 2 * [{"check_against_theano": False}] + 3 * [{}]:
        function(values(5)[0], **keywords)
    assert len(compared) == 5


@pytest.mark.parametrize("name", ["add", "end", "note_values"])
@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupt_while_a_new_value_is_noted(two, monkeypatch, name, is_done):
    place = native if name == "note_values" else StaleReplicas
    x, factor = T.dmatrix("x"), theano.shared(np.ones(COLUMNS), "factor")
    function, given = synk.function([x], x.dot(factor), exact=True, plan="rows"), values(6)[0]
    function(given)
    factor.set_value(np.full(COLUMNS, 2.0))
    usual = getattr(place, name)

    def interrupted(*args):
        monkeypatch.setattr(place, name, usual)
        if is_done:
            usual(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        function(given)
    close(function(given), 2 * given.sum(axis=1))


def test_invalid_plans_are_refused(two, monkeypatch):
    x, data = T.dmatrix("x"), theano.shared(np.zeros((4, 2)), "data")
    with pytest.raises(ValueError, match="plan is 'columns'; expected 'auto', 'rows', 'controller' or None"):
        synk.function([x], x.sum(), exact=True, plan="columns")
    with pytest.raises(ValueError, match="plan or whole without exact=True"):
        synk.function([x], x.sum(), plan="rows")
    with pytest.raises(ValueError, match="does not have all data"):
        synk.function([], data.sum(), sliceable_shareds=[data], exact=True, plan="controller")
    drawn = RandomStreams(1).normal(x.shape)
    with pytest.raises(ValueError, match="does not have all data"):
        synk.function([x], x + drawn, exact=True, random="own", plan="controller")
    synk.close()
    with pytest.raises(ValueError, match="plan is 'columns'; expected 'auto' or 'rows' or 'controller'"):
        synk.fork(2, plan="columns")
    monkeypatch.setenv("SYNKHRONOS_PLAN", "fast")
    with pytest.raises(ValueError, match="plan is 'fast'"):
        synk.fork(2)


@pytest.mark.parametrize("rows", [2, slice(1, 3), [3, 0]], ids=["number", "slice", "list"])
def test_batches_of_rows_along_another_axis(session, rows):
    x = T.dmatrix("x")
    given = np.arange(16.0).reshape(4, 4)
    expected = given[:, :rows] if isinstance(rows, int) else given[:, rows]
    for plan in PLANS:
        function = synk.function([x], x.sum(axis=0), exact=True, plan=plan, shard={x: 1})
        for value in (given, synk.data(given)):
            close(function(value, batch=rows), expected.sum(axis=0))


def test_variables_that_share_an_array_are_different_on_all_ranks(three):
    array = np.ones((50, 60))
    variables = [theano.shared(array, borrow=True) for _ in range(2)]
    added = [(var, var + i) for i, var in enumerate(variables)]
    for plan in PLANS:
        synk.function([], [], updates=added, exact=True, plan=plan)()
        assert not synk.check_replicas(variables)
    values = synk.get_value(2, variables)
    close([value[0, 0] for value in values], [1.0, 3.0])


def test_a_session_that_ends_forgets_stale_values(no_session):
    synk.fork(2, use_gpu=False)
    var = theano.shared(np.zeros(4000), "var")
    step = synk.function([], [], updates=[(var, var + 1)], exact=True, plan="controller")
    synk.distribute()
    step()
    value = weakref.ref(var.get_value(borrow=True))
    synk.close()
    var.set_value(np.zeros(3))
    assert value() is None
    synk.fork(2, use_gpu=False)
    step()
    close(synk.get_value(1, var), np.ones(3))


def test_no_gradient_is_computed_twice(two):
    x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.zeros((3, 4)), "w")
    loss = T.sqr(T.tanh(x.dot(w)).sum(axis=1) - y).sum()
    mean, square = (theano.shared(np.zeros((3, 4))) for _ in range(2))
    gradient = T.grad(loss, w)
    means = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
    updates = [*zip((mean, square), means), (w, w - means[0] / T.sqrt(means[1] + 1))]
    for plan in PLANS:
        function = synk.function([x, y], loss, updates=updates, exact=True, plan=plan)
        for compiled in (function._theano, function._user.compile()):
            names = [type(node.op).__name__ for node in compiled.maker.fgraph.toposort()]
            assert sum(name.startswith(("Dot", "Gemm")) for name in names) == 2, names
