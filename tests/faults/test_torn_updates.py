"""Workers that die in a step, and interrupts of it: all of its updates are made or none, and the error says which.

SYNKHRONOS_KILLS is the number of kills at random instants, and of those at chosen points of the update.
"""

import mmap
import os
import random
import signal
import time

import numpy as np
import pytest
from backend import T, theano
from comparison import close
from every_function import RandomKills, restarted
from interrupts import Interrupt, handled_by, interrupt
from process_state import kill, worker_pids

import synkhronos as synk
from synkhronos._rank import Replica, steps

KILLS = int(os.environ.get("SYNKHRONOS_KILLS", "25"))
SIDE, ROWS = 150, 24
PIECE = 2048  # eleven pieces of a variable
x = T.dmatrix("x")


@pytest.fixture(autouse=True)
def slices_of_small_variables(monkeypatch):
    monkeypatch.setattr("synkhronos._sharding.slices.LEAST_BYTES", 1)


def made():
    """Return a random number of rows and of Adam's variables, and its updates, as a step of training has them."""
    rng = np.random.RandomState(0)
    w, m, v = (theano.shared(rng.rand(SIDE, SIDE), name) for name in "wmv")
    b, t = theano.shared(np.zeros(SIDE), "b"), theano.shared(0.0, "t")
    turned = theano.shared(rng.rand(SIDE, SIDE), "turned")  # the controller alone sets it
    loss = T.sqr(T.tanh(x.dot(w)) + b).mean()
    g, of_b = T.grad(loss, [w, b])
    m_new, v_new = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    new = w - 0.01 * m_new / (T.sqrt(v_new) + 1e-8)
    updates = [(m, m_new), (v, v_new), (w, new), (b, b - 0.1 * of_b), (t, t + 1), (turned, turned[::-1])]
    return [w, m, v, b, t, turned], loss, updates


class Training:
    """A step on all ranks, and the same step of the backend alone."""

    def __init__(self, n_ranks, **options):
        self.rng, self.n_ranks = np.random.RandomState(1), n_ranks
        self.serial, loss, updates = made()
        self.expected = theano.function([x], loss, updates=updates)
        self.variables, loss, updates = made()
        synk.fork(n_ranks, plan="rows", **{"restart_workers": True, **options})
        self.step = synk.function([x], loss, updates=updates, exact=True)
        self.data = self.rng.randn(ROWS, SIDE)
        self()
        self.follow()

    def __call__(self):
        return self.step(self.data)

    def follow(self, is_complete=True):
        """Compare all values on all ranks with those of the serial program."""
        if is_complete:
            self.expected(self.data)
            self.data = self.rng.randn(ROWS, SIDE)
        values = [var.get_value() for var in self.variables]
        close(values, [var.get_value() for var in self.serial], 1e-9, 1e-9)
        for rank in range(1, self.n_ranks):
            for var, value in zip(self.variables, values):
                np.testing.assert_array_equal(synk.get_value(rank, var), value)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(steps, "PIECE", PIECE)


@pytest.mark.timeout(90 + 3 * KILLS)
@pytest.mark.parametrize("n_ranks", [2, 3, 5])
def test_workers_are_killed_at_random_instants(no_session, small_pieces, n_ranks):
    training, kills = Training(n_ranks), RandomKills(KILLS)
    kills.measure(training)
    training.follow()
    for _ in kills:
        errors = []

        def attempt(errors=errors):
            try:
                training()
            except synk.WorkerRestarted as error:
                errors.append(error)
                raise

        if kills.hit(attempt):
            assert errors[0].updated is not None
            assert f"{'all updates' if errors[0].updated else 'no update'} of the call" in str(errors[0])
            training.follow(errors[0].updated)
        else:
            restarted(synk.broadcast, training.variables)
            training.follow()
        training()
        training.follow()
    synk.close()


# ---------------------------------------------------------------- points within the update

NOBODY, ALL = -1, -2
POINTS = ("before the ranks meet", "met", "begun", "computed", "noted", "half copied", "copied")


class Trap:
    """A point of the update at which a worker kills itself.

    Parameters
    ----------
    monkeypatch : MonkeyPatch
    """

    def __init__(self, monkeypatch):
        self.memory = np.frombuffer(mmap.mmap(-1, 64), np.int64)  # shared with workers: rank, point, piece
        self.memory[0] = NOBODY
        own = {name: getattr(steps.Steps, name) for name in ("prepare", "carry_out", "_set_others", "_note")}

        def prepare(this, *arguments):
            self.reach("before the ranks meet", this)
            own["prepare"](this, *arguments)

        def carry_out(this):
            self.reach("met", this)
            own["carry_out"](this)

        def set_others(this):
            self.reach("begun", this)
            own["_set_others"](this)

        def note(this, notes, number, new):
            self.reach("copied", this, number - 1)
            self.reach("computed", this, number)
            own["_note"](this, notes, number, new)
            self.reach("noted", this, number)
            if self.is_here("half copied", this, number):
                update, piece, _ = list(steps._pieces(this._prepared.updates, this._rank, len(this._notes)))[number - 1]
                for block, value in zip(update.blocks, new):
                    half = value.size // 2
                    block[piece][:half] = value[:half]
            self.reach("half copied", this, number)

        for name, one in (
            ("prepare", prepare),
            ("carry_out", carry_out),
            ("_set_others", set_others),
            ("_note", note),
        ):
            monkeypatch.setattr(steps.Steps, name, one)

    def is_here(self, point, this, piece=0):
        rank, at, number = self.memory[:3]
        is_meant = this._rank in (rank, *(range(1, len(this._notes)) if rank == ALL else ()))
        return is_meant and POINTS[at] == point and (not piece or piece == number)

    def reach(self, point, this, piece=0):
        if self.is_here(point, this, piece):
            if self.memory[0] != ALL:
                self.memory[0] = NOBODY
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(90 + 3 * KILLS)
@pytest.mark.parametrize("n_ranks", [2, 3, 5])
def test_workers_are_killed_at_points_of_the_update(no_session, small_pieces, monkeypatch, n_ranks):
    trap, chance = Trap(monkeypatch), random.Random(7)
    training = Training(n_ranks)
    for number in range(KILLS):
        n_pieces = -(-SIDE * SIDE // PIECE // n_ranks)
        point = POINTS[number % len(POINTS)]
        trap.memory[1:3] = POINTS.index(point), chance.randint(1, max(1, n_pieces - 1))
        trap.memory[0] = chance.randrange(1, n_ranks)
        error = restarted(training)
        assert error.updated is (point != "before the ranks meet")
        training.follow(error.updated)
        training()
        training.follow()
    synk.close()


def test_all_workers_die_in_one_update(no_session, small_pieces, monkeypatch):
    """The controller computes all that is left."""
    trap = Trap(monkeypatch)
    training = Training(3)
    trap.memory[:3] = ALL, POINTS.index("half copied"), 2
    error = restarted(training)
    trap.memory[0] = NOBODY
    assert error.updated and set(error.ranks) == {1, 2}
    training.follow()
    training()
    training.follow()
    synk.close()


def check_that_the_session_breaks_after_the_step(training):
    with pytest.raises(synk.WorkerDied, match="all updates of the call were made"):
        training()
    synk.close()
    training.n_ranks = 1
    training.follow()


def test_a_session_without_restarts_completes_the_step_before_it_breaks(no_session, small_pieces, monkeypatch):
    trap = Trap(monkeypatch)
    training = Training(3, restart_workers=False)
    trap.memory[:3] = 1, POINTS.index("half copied"), 2
    check_that_the_session_breaks_after_the_step(training)


def test_an_interrupt_at_any_instant(no_session, small_pieces):
    """The session stays usable, and all ranks have the values before the step or after it."""
    training = Training(3)
    count = training.variables[4]
    start = time.perf_counter()
    training()
    took = time.perf_counter() - start
    training.follow()
    n_raised = 0
    for number in range(KILLS):
        before = float(count.get_value())
        with handled_by(interrupt):
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, took * (number + 0.5) / KILLS))
                training()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                n_raised += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        training.follow(count.get_value() > before)
    assert n_raised
    synk.close()


def test_a_worker_that_cannot_compute_its_part(no_session, small_pieces, monkeypatch):
    """The controller does it, and the error of the worker is raised."""
    own = steps.Steps._note
    broken = np.frombuffer(mmap.mmap(-1, 8), np.int64)

    def note(this, notes, number, new):
        if broken[0] and number == 2 and this._rank == 1:
            broken[0] = 0
            raise MemoryError("none is left")
        own(this, notes, number, new)

    monkeypatch.setattr(steps.Steps, "_note", note)
    training = Training(3)
    broken[0] = 1
    with pytest.raises(synk.WorkerError, match="none is left"):
        training()
    training.follow()
    training()
    training.follow()
    synk.close()


def test_values_that_are_lost_are_named(no_session, small_pieces, monkeypatch, caplog):
    """A worker dies while it copies new values that only its private memory has."""
    monkeypatch.setattr(steps.Steps, "_note", lambda this, notes, number, new: put(notes, steps._NOTED, -number))
    trap = Trap(monkeypatch)
    training = Training(2, restart_workers=False)
    trap.memory[:3] = 1, POINTS.index("half copied"), 2
    with pytest.raises(synk.WorkerDied):
        training()
    assert "the values of m, v, w are incomplete, and must be set again" in caplog.text
    synk.close()


def put(array, place, value):
    array[place] = value


def test_a_worker_dies_between_calls(no_session):
    training = Training(3)
    kill(worker_pids()[0])
    error = restarted(training)
    training.follow(error.updated)
    training()
    training.follow()
    synk.close()


def test_a_handler_closes_the_session_within_an_update(no_session, small_pieces, monkeypatch):
    """The controller completes the step after it has ended the workers."""
    own, is_reached = steps.Steps._note, np.frombuffer(mmap.mmap(-1, 8), np.int64)

    def note(this, notes, number, new):
        own(this, notes, number, new)
        if this._rank == 1 and is_reached[0] == 1:
            is_reached[0] = 2
            os.kill(os.getppid(), signal.SIGALRM)
            signal.pause()

    monkeypatch.setattr(steps.Steps, "_note", note)
    training = Training(3, restart_workers=False)
    is_reached[0] = 1
    with handled_by(lambda *_: synk.close()), pytest.raises(synk.SessionError, match="the session was closed"):
        training()
    assert is_reached[0] == 2
    training.n_ranks = 1
    training.follow()


def test_workers_that_cannot_be_replaced(no_session, small_pieces, monkeypatch):
    """The error says that the step is complete."""
    trap, own = Trap(monkeypatch), Replica._load
    dies = np.frombuffer(mmap.mmap(-1, 8), np.int64)

    def load(this, command):
        if this.rank == 1 and dies[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        own(this, command)

    monkeypatch.setattr(Replica, "_load", load)
    training = Training(2)
    dies[0] = 1
    trap.memory[:3] = 1, POINTS.index("half copied"), 2
    check_that_the_session_breaks_after_the_step(training)
