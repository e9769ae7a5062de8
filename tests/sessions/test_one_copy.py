"""Shared variables whose values exist once on a node: the values on each rank after any changes, and the memory."""

import os

import numpy as np
import pytest
from backend import T, theano
from process_state import kill, worker_pids

import synkhronos as synk
from synkhronos._session import current

SMALL, LARGE = 100, 5000  # elements: copied to each rank, and stored once
STEPS = 60


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
