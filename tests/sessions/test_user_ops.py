"""Operations that programs define: their signatures, and their draws from the global generators."""

import importlib
import os
import random
import signal

import numpy as np
import pytest
from backend import T, ifelse, on_theano, theano, theano_only
from comparison import assert_close, close
from deadline import wait_for
from process_state import worker_pids

import synkhronos as synk
from synkhronos._processes import ProcessGroup

if not on_theano:
    from pytensor.tensor.blockwise import Blockwise

X = np.random.RandomState(3).rand(7, 3)


class Calibrated(theano.Op):
    """Multiply by a constant input that ``make_node`` adds."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x, T.constant(np.array([1.0, 2.0, 3.0]))], [T.dmatrix()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0] * inputs[1]

    def grad(self, inputs, gradients):
        return [gradients[0] * inputs[1], T.zeros_like(inputs[1])]

    def pullback(self, inputs, outputs, gradients):
        return self.grad(inputs, gradients)


class Listed(theano.Op):
    """Add the arrays of a list, which ``make_node`` takes."""

    __props__ = ()

    def make_node(self, arrays):
        return theano.Apply(self, list(arrays), [T.dmatrix()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.asarray(sum(inputs))


class Jitter(theano.Op):
    """Add noise of NumPy's global generator, and draw a number from the module ``random``."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type(), T.dscalar()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0] + np.random.normal(size=inputs[0].shape)  # noqa: NPY002
        outputs[1][0] = np.asarray(random.random())

    def grad(self, inputs, gradients):
        return [gradients[0]]

    def pullback(self, inputs, outputs, gradients):
        return self.grad(inputs, gradients)


class Failing(Listed):
    """Raise an error for two rows."""

    def perform(self, node, inputs, outputs):
        if inputs[0].shape[0] == 2:
            raise ZeroDivisionError("two rows")
        outputs[0][0] = inputs[0] * 1.0


class Counting(theano.Op):
    """Write the number of calls into the input."""

    destroy_map = {0: [0]}  # noqa: RUF012

    def __init__(self):
        self.n = 0

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        self.n += 1
        inputs[0][...] = self.n
        outputs[0][0] = inputs[0]


class Elementary(theano.scalar.UnaryScalarOp):
    """Add noise to each number."""

    def impl(self, x):
        return x + np.random.normal()  # noqa: NPY002


class Unfiltered(theano.Op):
    """Return a NumPy scalar instead of an array."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [T.dscalar()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0].sum()


class Scaled(theano.Op):
    """Multiply by a property of the operation, which ``perform`` gets as ``params``."""

    __props__ = ("factor",)
    if on_theano:
        params_type = theano.gof.ParamsType(factor=theano.scalar.float64)

    def __init__(self, factor):
        self.factor = factor

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs, params):
        outputs[0][0] = inputs[0] * params.factor


def scan(*args, **kwargs):
    return theano.scan(*args, **kwargs)[0] if on_theano else theano.scan(*args, return_updates=False, **kwargs)


def signatures(x, w):
    y = Calibrated()(x * w)
    loss = T.sqr(y).mean()
    listed = Listed()([x, 2 * x, x + w])
    loop = scan(lambda row, other: T.dot(Calibrated()(other), row), sequences=x, non_sequences=x)
    return [loss, y, T.grad(loss, w), listed, listed.sum(), loop], w - 0.1 * T.grad(loss, w)


def trained(x, w):
    y, number = Jitter()(x * w)
    loss = T.sqr(y).mean() + number
    return [loss, y, number], w - 0.1 * T.grad(loss, w) + 0.01 * number


def twice(x, w):
    y = Jitter()(Jitter()(x)[0] * 2)[0]
    return [y, y.sum(axis=0)], w


def in_a_loop(x, w):
    steps = scan(lambda h: Jitter()(h)[0] * 0.5, outputs_info=x, n_steps=3)
    return [steps[-1], steps.sum()], w


def in_a_map(x, w):
    rows = scan(lambda row: Jitter()(row)[0], sequences=x)
    return [rows, rows.sum()], w


def in_a_loop_without_rows(x, w):
    steps = scan(lambda h: Jitter()(h)[0] * 0.5, outputs_info=T.outer(w, w), n_steps=3)
    return [T.dot(x, steps[-1])], steps[-1][0]


def in_a_branch(x, w):
    y = ifelse(T.gt(x.sum(), 0), Jitter()(x)[0], 2 * x)
    return [y, y.sum()], w


def of_no_rows(x, w):
    return [x.sum()], w + Jitter()(w)[0]


def within_another(x, w):
    a = T.dmatrix("a")
    within = theano.compile.builders.OpFromGraph([a], [Jitter()(a)[0].sum(axis=0)])
    return [within(x)], w


def elementwise(x, w):
    noisy = T.Elemwise(Elementary(theano.scalar.upgrade_to_float, name="noisy"))
    y = noisy(x)
    return [y.sum(axis=0), y], noisy(w + y.mean(axis=0))


def of_each_row(x, w):
    y = Blockwise(Jitter(), "(n)->(n),()")(x)[0]
    return [y.sum(axis=0), y], w + y.mean(axis=0)


PROGRAMS = [signatures, trained, twice, in_a_loop, in_a_map, in_a_loop_without_rows, in_a_branch, of_no_rows]
PROGRAMS += [within_another, elementwise]
PROGRAMS += [pytest.param(of_each_row, marks=pytest.mark.skipif(on_theano, reason="Theano does not have Blockwise"))]


def results(program, build, calls):
    """Return the results of calls, and the variable's value after each of them, from fixed seeds."""
    x, w = T.dmatrix("x"), theano.shared(np.array([1.0, -2.0, 0.5]), "w")
    outputs, new = program(x, w)
    function = build([x], outputs, updates=[(w, new)])
    np.random.seed(5)  # noqa: NPY002
    random.seed(6)
    found = []
    for n in calls:
        found += [*function(X[:n]), w.get_value()]
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_the_serial_ones(session, program):
    calls = (7, 2, 1)
    expected = results(program, theano.function, calls)
    got = results(program, lambda *args, **kwargs: synk.function(*args, exact=True, **kwargs), calls)
    close(got, expected)
    assert not synk.check_replicas()


def test_results_are_arrays_of_the_declared_type(two):
    x = T.dmatrix("x")
    total = Unfiltered()(x)
    assert_close(synk.function([x], [total, 2 * total], exact=True)(X), [X.sum(), 2 * X.sum()], rtol=1e-12)


@theano_only("operations in Python do not take params there")
def test_operations_that_take_params(two):
    x = T.dmatrix("x")
    assert_close(synk.function([x], Scaled(2.5)(x), exact=True)(X), 2.5 * X, rtol=1e-12)


@pytest.mark.numba
def test_results_by_the_default_linker(two):
    for program in (trained, in_a_loop):
        with synk.parallelize():
            got = results(program, theano.function, (7, 1))
        close(got, results(program, theano.function, (7, 1)))


def test_the_controller_alone_computes(synchronize):
    synchronize(2, master_rank=1)
    x = T.dmatrix("x")
    counting = Counting()
    function = synk.function([x], [counting(2 * x) * 1.0, x.sum()], exact=True)
    for i in (1, 2):
        assert_close(function(X)[0], np.full((7, 3), i), rtol=0)
        assert counting.n == i
    assert [entry.collective for entry in function.partition].count("broadcast") == 1
    assert_close(function(X, num_slices=2)[0], np.full((7, 3), 3), rtol=0)
    with pytest.raises(ValueError, match="blocked=True"):
        synk.function([x], Jitter()(x)[0].sum(), exact=True, blocked=True)


def test_an_error_leaves_the_session_as_it_was(synchronize):
    synchronize(3)
    x = T.dmatrix("x")
    function = synk.function([x], Failing()([x]).sum(axis=0), exact=True)
    for _ in range(2):
        with pytest.raises(synk.WorkerError, match="ZeroDivisionError: two rows"):
            function(X[:2])
        assert_close(function(X), X.sum(axis=0), rtol=1e-12)


# -- initial states of the global generators


def drawn(n):
    """Return the numbers that ranks draw from NumPy, then those from ``random``."""
    x = T.dmatrix("x")
    noise, number = Jitter()(x)
    function = synk.function([x], [(noise, "gather"), (number.dimshuffle("x"), "gather")])
    noise, numbers = function(np.zeros((n, 1)))
    return [*noise.ravel(), *numbers]


def test_ranks_draw_different_numbers_and_the_same_in_each_run(no_session):
    runs = []
    for seed in (1, 1, 2):
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        expected = np.random.RandomState(seed).normal(), random.Random(seed).random()
        with synk.session(3):
            runs.append(drawn(3))
        assert (runs[-1][0], runs[-1][3]) == expected  # the controller draws as a serial program does
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2]}) == 12


def test_a_worker_that_starts_late_draws_the_same_numbers(no_session, monkeypatch):
    run = ProcessGroup._run

    def run_late(group, rank, channel):
        wait_for(lambda: group.sync.sent > 0, "the first command")
        run(group, rank, channel)

    runs = []
    for _ in range(2):
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)
        with synk.session(2):
            runs.append(drawn(2))
        monkeypatch.setattr(ProcessGroup, "_run", run_late)
    assert runs[0] == runs[1]


def test_ranks_have_the_same_states_with_replicate_rng(no_session):
    np.random.seed(1)  # noqa: NPY002
    with synk.session(2, replicate_rng=True):
        noise = drawn(2)
    assert noise[0] == noise[1]


def test_a_worker_that_is_replaced_draws_other_numbers(no_session):
    with synk.session(2, restart_workers=True):
        first = drawn(2)
        os.kill(worker_pids()[0], signal.SIGKILL)
        with pytest.raises(synk.WorkerRestarted):
            drawn(2)
        assert len({*first, *drawn(2)}) == 8


# -- modules that are imported late, and what ranks print

LATE = """
from synkhronos._backends import Apply, Op

class Twice(Op):
    __props__ = ()

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = 2 * inputs[0]
"""


def test_a_late_module_is_found_and_prints_carry_the_rank(no_session, tmp_path, monkeypatch, capfd):
    x = T.dmatrix("x")
    with synk.session(2):
        (tmp_path / "imported_late.py").write_text(LATE)
        monkeypatch.syspath_prepend(str(tmp_path))
        twice = importlib.import_module("imported_late").Twice()(x)
        function = synk.function([x], (theano.printing.Print("twice")(twice), "gather"))
        assert_close(function(np.ones((2, 2))), np.full((2, 2), 2.0), rtol=0)
    printed = capfd.readouterr().out
    line = "twice __str__ = [[2. 2.]]\n"
    # A worker writes each line at once. The backend's print does not, so that the worker's line may interrupt it.
    assert f"rank 1: {line}" in printed
    assert printed.replace(f"rank 1: {line}", "") == line
