"""Shared variables whose values exist once on a node: the values on each rank after any changes, and the memory."""

import os

import numpy as np
import pytest
from backend import T, theano
from process_state import kill, worker_pids
from scripts import run_script

import synkhronos as synk
from synkhronos._memory import look_at_free_memory
from synkhronos._session import current, replicas

SMALL, LARGE = 100, 5000  # elements: copied to each rank, and stored once
STEPS = 60


@pytest.fixture(autouse=True)
def slices_of_small_variables(monkeypatch):
    monkeypatch.setattr("synkhronos._sharding.slices.LEAST_BYTES", 1)


class Model:
    """What each rank has of two variables, next to the variables."""

    def __init__(self, n_ranks, seed):
        self.n_ranks, self.rng = n_ranks, np.random.RandomState(seed)
        self.variables = [theano.shared(self.rng.randn(size), f"v{size}") for size in (SMALL, LARGE)]
        self.values = [[var.get_value() for _ in range(n_ranks)] for var in self.variables]
        x = T.dmatrix("x")
        step = [(var, 0.5 * var + x.sum(0)[: var.shape[0]]) for var in self.variables]
        self.plain = synk.function([x], [], updates=step)
        self.by_plan = {
            plan: synk.function([x], [], updates=step, exact=True, plan=plan) for plan in ("rows", "controller")
        }
        moved = [(var, T.concatenate([var[1:], var[:1]])) for var in self.variables]
        self.moving = synk.function([], [], updates=moved, exact=True, plan="controller")
        self.alone = theano.function([], [], updates=[(var, 2 * var + 1) for var in self.variables])
        sums = [var.dimshuffle("x", 0).sum(1) + 0 * x.sum() for var in self.variables]  # one row on each rank
        self.sums = synk.function([x], [(one, "gather") for one in sums])
        self.given = self.rng.randn(2 * n_ranks + 1, LARGE)
        synk.distribute()

    def set_all(self, make):
        """Set each variable on all ranks to the value of ``make(values of the ranks)``."""
        for values in self.values:
            values[:] = [make(values)] * self.n_ranks

    def change(self, kind):
        """Make a change of one kind, of the variables and of the model."""
        pick = self.rng.randint(2)
        var, values, rank = self.variables[pick], self.values[pick], self.rng.randint(self.n_ranks)
        new = self.rng.randn(len(values[0]))
        if kind == "set here":
            var.set_value(new)
            values[0] = new
        elif kind == "set on a rank":
            synk.set_value(rank, var, new)
            values[rank] = new
        elif kind == "plain":
            self.plain(self.given)
            parts = np.array_split(self.given, self.n_ranks)
            for of_var in self.values:
                of_var[:] = [0.5 * one + part.sum(0)[: len(one)] for one, part in zip(of_var, parts)]
        elif kind in self.by_plan:
            synk.broadcast(self.variables)
            self.by_plan[kind](self.given)
            self.set_all(lambda ranks: 0.5 * ranks[0] + self.given.sum(0)[: len(ranks[0])])
        elif kind == "moving":
            synk.broadcast(self.variables)
            self.moving()
            self.set_all(lambda ranks: np.roll(ranks[0], -1))
        elif kind == "backend":
            self.alone()
            for of_var in self.values:
                of_var[0] = 2 * of_var[0] + 1
        elif kind == "broadcast":
            synk.broadcast(var)
            values[:] = [values[0]] * self.n_ranks
        elif kind == "broadcast a value":
            synk.broadcast(var, new)
            values[:] = [new] * self.n_ranks
        elif kind == "all_reduce":
            synk.all_reduce(var, "avg")
            values[:] = [np.mean(values, axis=0)] * self.n_ranks
        elif kind == "reduce":
            synk.reduce(var, "sum", in_place=True)
            values[0] = np.sum(values, axis=0)
        elif kind == "sequence":
            with synk.sequence():
                self.plain(self.given)
                synk.all_reduce(self.variables, "max")
            parts = np.array_split(self.given, self.n_ranks)
            self.set_all(lambda ranks: np.max([0.5 * v + p.sum(0)[: len(v)] for v, p in zip(ranks, parts)], axis=0))

    def check(self):
        """Compare every rank's values with the model, read in two ways."""
        for var, values in zip(self.variables, self.values):
            for rank, expected in enumerate(values):
                found = var.get_value() if rank == 0 else synk.get_value(rank, var)
                np.testing.assert_allclose(found, expected, 1e-9, 1e-9, err_msg=f"{var} on rank {rank}")
        for found, values in zip(self.sums(self.given), self.values):
            np.testing.assert_allclose(found, [one.sum() for one in values], 1e-8, 1e-7)


KINDS = [
    *("set here", "set on a rank", "plain", "rows", "controller", "moving", "backend", "broadcast"),
    *("broadcast a value", "all_reduce", "reduce", "sequence"),
]


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_changes(session, seed):
    model = Model(session, seed)
    for kind in model.rng.choice(KINDS, STEPS):
        model.change(kind)
        model.check()


def heap_bytes():
    """Return the bytes in use in each rank's part of the shared heap."""
    return [in_use for in_use, _, _ in current("test").report()[1]]


def test_workers_have_no_copies(synchronize):
    n_ranks = synchronize(3)
    var, x = theano.shared(np.zeros(1_000_000), "var"), T.dvector("x")
    before = heap_bytes()
    total = synk.function([x], (var.sum() + x.sum(), "sum"))
    step = synk.function([x], [], updates=[(var, var + x.sum())], exact=True, plan="controller")

    def added():
        return [round((now - then) / var.get_value(borrow=True).nbytes) for now, then in zip(heap_bytes(), before)]

    assert total(np.ones(3)) == 3
    assert added() == [1, 0, 0]
    for number in range(1, 4):
        step(np.ones(3))
        assert total(np.ones(3)) == 3 + 3 * number * n_ranks * 1_000_000
        assert added() == [1, 0, 0]
    synk.set_value(1, var, np.zeros(1_000_000))  # now each worker has its own
    assert added() == [1, 1, 1]
    synk.broadcast(var)
    assert total(np.ones(3)) == 3 + 9 * n_ranks * 1_000_000
    assert added() == [1, 0, 0]


def test_a_value_that_the_program_has_set_is_not_changed_for_the_others(synchronize):
    n_ranks = synchronize(3)
    var, x = theano.shared(np.ones(LARGE), "var"), T.dvector("x")
    total = synk.function([x], (var.sum() + 0 * x.sum(), "sum"))
    double = theano.function([], [], updates=[(var, 2 * var)])
    before = var.get_value(borrow=True)
    assert total(np.ones(3)) == n_ranks * LARGE
    double()
    assert total(np.ones(3)) == (n_ranks + 1) * LARGE
    double()
    assert total(np.ones(3)) == (n_ranks + 3) * LARGE
    assert (before == 1).all()


def test_a_forked_process_keeps_the_values_of_its_start(synchronize):
    synchronize(3)
    var, x = theano.shared(np.ones(LARGE), "var"), T.dvector("x")
    step = synk.function([x], [], updates=[(var, var + x.sum())], exact=True, plan="controller")
    step(np.ones(3))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reader, 1)
        os._exit(int(var.get_value(borrow=True)[-1]))
    step(np.ones(3))
    os.write(writer, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert synk.get_value(1, var)[-1] == 7
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("is_private", [False, True])
def test_new_workers_see_later_updates(synchronize, is_private):
    synchronize(3, restart_workers=True)
    var, x = theano.shared(np.ones(LARGE), "var"), T.dvector("x")
    step = synk.function([x], [], updates=[(var, var + x.sum())], exact=True, plan="controller")
    synk.distribute()
    step(np.ones(3))
    if is_private:
        synk.all_reduce(var)
    kill(worker_pids()[0])
    with pytest.raises(synk.WorkerRestarted):
        synk.get_value(1, var)
    for number in range(2, 4):
        step(np.ones(3))
        assert [synk.get_value(rank, var)[-1] for rank in (1, 2)] == [1 + 3 * number] * 2


def test_new_workers_get_no_rows_that_a_broadcast_has_replaced(synchronize):
    synchronize(3, restart_workers=True)
    var, x = theano.shared(np.zeros((3 * LARGE, 1)), "var"), T.dvector("x")
    total = synk.function([x], (var.sum() + 0 * x.sum(), "sum"))
    rows = np.arange(3.0 * LARGE).reshape(-1, 1)
    synk.distribute()
    synk.scatter(var, rows)
    synk.broadcast(var)
    kill(worker_pids()[0])
    with pytest.raises(synk.WorkerRestarted):
        total(np.ones(3))
    for rank in range(3):
        np.testing.assert_array_equal(synk.get_value(rank, var), rows[:LARGE])
    assert total(np.ones(3)) == 3 * rows[:LARGE].sum()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("action", ["unshare", "send"])
def test_an_interrupt_leaves_no_rank_with_a_wrong_value(synchronize, action, moment):
    """Some workers may have executed the command; each gets the value again."""
    synchronize(3)
    var, x = theano.shared(np.ones(LARGE), "var"), T.dvector("x")
    step = synk.function([x], [], updates=[(var, var + x.sum())], exact=True, plan="controller")
    double = theano.function([], [], updates=[(var, 2 * var)])
    synk.distribute()
    session = current("test")
    stale, keys, first = session.stale, set(session.keys([var])), var.get_value(borrow=True)
    if action == "send":
        var.set_value(np.full(LARGE, 5.0))
        step(np.ones(3))  # the new value is in another block

    def interrupted(command):
        if moment == "after":
            session.issue(command)
        raise KeyboardInterrupt

    with session.lock, pytest.raises(KeyboardInterrupt):
        if action == "send":
            stale.send(interrupted)
        else:
            stale.unshare(keys, interrupted)
    expected = 1
    if action == "unshare":
        double()  # on the controller alone
    else:
        var.set_value(first, borrow=True)  # the array that the workers viewed before
        step(np.ones(3))
        expected = 4
    assert [synk.get_value(rank, var)[0] for rank in (1, 2)] == [expected] * 2
    var.set_value(np.full(LARGE, 2.0))
    step(np.ones(3))
    step(np.ones(3))
    assert [synk.get_value(rank, var)[0] for rank in (1, 2)] == [8, 8]


def test_values_for_which_there_is_no_room_are_copied(synchronize, monkeypatch):
    synchronize(3)
    var, x = theano.shared(np.ones(LARGE), "var"), T.dvector("x")
    step = synk.function([x], [], updates=[(var, var + x.sum())], exact=True, plan="controller")
    session = current("test")
    load, heap = session._functions._load, session.replica.heap

    def load_with_room(bundle, ranks):
        load(bundle, ranks)
        look_at_free_memory(heap, 3)

    monkeypatch.setattr(replicas, "look_at_free_memory", lambda heap, n_ranks: None)
    monkeypatch.setattr(session._functions, "_load", load_with_room)
    heap.trim()
    heap.allow(0)
    synk.distribute()
    assert not workers_view(session, var)
    for number in (1, 2):
        step(np.ones(3))
        assert [synk.get_value(rank, var)[0] for rank in (1, 2)] == [1 + 3 * number] * 2


def workers_view(session, var):
    """Return whether the workers view a variable."""
    return session.stale.shared.intersection(session.keys([var]))


def test_variables_with_one_array_are_separate_on_the_workers(synchronize):
    n_ranks = synchronize(3)
    x = T.dvector("x")
    one, other = (theano.shared(np.ones(LARGE), name) for name in ("one", "other"))
    add = synk.function([x], [(other.sum() + 0 * x.sum(), "sum")], updates=[(one, one + 1)])
    synk.distribute()
    other.set_value(one.get_value(borrow=True), borrow=True)
    synk.broadcast(other)
    for number in range(3):
        assert add(np.ones(3))[0] >= n_ranks * LARGE
        assert [synk.get_value(rank, one)[0] for rank in (1, 2)] == [2 + number] * 2
        assert [synk.get_value(rank, other)[0] for rank in (1, 2)] == [1, 1]


CHILD = """
import os
import numpy as np
from backend import T, theano
import synkhronos as synk

var, x = theano.shared(np.ones(5000), "var"), T.dvector("x")

def build():
    return synk.function([x], [], updates=[(var, var + x.sum())], exact=True, plan="controller")

synk.fork(2, use_gpu=False)
step = build()
step(np.ones(3))
synk.distribute()
pid = os.fork()
if pid == 0:
    synk.fork(2, use_gpu=False)
    own = build()
    synk.distribute()
    for number in (1, 2):
        own(np.ones(3))
        assert synk.get_value(1, var)[0] == 4 + 3 * number
    synk.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
step(np.ones(3))
assert synk.get_value(1, var)[0] == 7
synk.close()
print("done")
"""


def test_a_session_of_a_forked_process_shares_its_own_memory():
    out, _ = run_script(CHILD)
    assert out == "done\n"


class SumInChild(theano.Op):
    """Sum of a vector, which a child process computes."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [T.dscalar()])

    def perform(self, node, inputs, outputs):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writer, str(inputs[0].sum()).encode())
            os._exit(0)
        os.close(writer)
        outputs[0][0] = np.asarray(float(os.read(reader, 100) or "nan"))
        os.close(reader)
        os.waitpid(pid, 0)


def test_a_process_that_a_worker_forks_reads_variables(no_session):
    synk.fork(2, use_gpu=False)
    var, x = theano.shared(np.ones(LARGE), "var"), T.dvector("x")
    total = synk.function([x], (SumInChild()(var) + 0 * x.sum(), "sum"))
    assert total(np.ones(2)) == 2 * LARGE
    assert total(np.ones(2)) == 2 * LARGE
