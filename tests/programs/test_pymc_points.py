"""Evaluation of the points of several chains at once, for PyMC models."""

import ctypes
import threading

import numpy as np
import pytest

pytest.importorskip("pymc", reason="PyMC is not installed")

from synkhronos.extensions.pymc._combiner import Combiner

from synkhronos.extensions.pymc.points import Density, Each, Evaluator

DOUBLES = ctypes.POINTER(ctypes.c_double)
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_uint64, DOUBLES, DOUBLES, DOUBLES, ctypes.c_void_p)
DEADLINE = 60


def evaluate(combiner, point):
    """Call the combiner as a sampler does; return the code, the value and the gradient."""
    gradient, value = np.full(len(point), -7.0), np.full(1, -7.0)
    arrays = [array.ctypes.data_as(DOUBLES) for array in (point, gradient, value)]
    code = FUNCTION(combiner.function)(len(point), *arrays, combiner.argument)  # ctypes releases Python's lock
    return code, value[0], gradient


class Chains:
    """Threads that evaluate points."""

    def __init__(self, n, run):
        self.results = [None] * n
        self._threads = [threading.Thread(target=self._run, args=(run, i), daemon=True) for i in range(n)]
        for one in self._threads:
            one.start()

    def _run(self, run, i):
        self.results[i] = run(i)

    def join(self):
        for one in self._threads:
            one.join(DEADLINE)
            assert not one.is_alive()
        return self.results


def squares(sizes):
    """Return a density, which notes the numbers of its points in ``sizes``."""

    def by_rows(points):
        sizes.append(len(points))
        return -(points**2).sum(axis=1), -2 * points

    return Density(by_rows, None, 10**6)


@pytest.mark.parametrize("n_chains", [1, 2, 4, 9])
def test_each_chain_gets_its_own_results(n_chains):
    sizes, failures = [], []
    evaluator = Evaluator(squares(sizes), n_chains, 3, failures.append)
    rng = np.random.default_rng(0)
    points = rng.normal(size=(n_chains, 200, 3))
    found = Chains(n_chains, lambda i: [evaluate(evaluator.combiner, point) for point in points[i]]).join()
    evaluator.close()
    for of_chain, results in zip(points, found):
        for point, (code, value, gradient) in zip(of_chain, results):
            assert code == 0 and value == -(point**2).sum() and np.array_equal(gradient, -2 * point)
    assert sum(sizes) == n_chains * 200 and max(sizes) <= n_chains and not failures


def test_points_that_wait_are_one_call():
    combiner = Combiner(4, 2)
    points, values, gradients = np.empty((4, 2)), np.empty(0), np.empty((0, 2))
    chains = Chains(3, lambda i: evaluate(combiner, np.full(2, float(i))))
    taken = 0
    while taken < 3:  # the first exchange may take one point before the others have arrived
        k = combiner.exchange(values, gradients, points)
        values, gradients = points[:k, 0].copy(), points[:k].copy()
        taken += k
    more = Chains(1, lambda i: evaluate(combiner, np.full(2, 5.0)))
    assert combiner.exchange(values, gradients, points) == 1 and np.array_equal(points[0], [5, 5])
    combiner.close()
    assert [(code, value) for code, value, _ in chains.join()] == [(0, 0), (0, 1), (0, 2)]
    assert more.join()[0][0] == -1


@pytest.mark.parametrize(
    ("value", "gradient", "code"), [(1.0, 1.0, 0), (np.nan, 1.0, 4), (-np.inf, 1.0, 4), (1.0, np.inf, 3)]
)
def test_numbers_that_are_not_finite_are_divergences(value, gradient, code):
    density = Density(lambda points: (np.full(len(points), value), np.full(points.shape, gradient)), None, 10**6)
    evaluator = Evaluator(density, 1, 2, pytest.fail)
    assert evaluate(evaluator.combiner, np.zeros(2))[0] == code
    evaluator.close()


def test_an_exception_ends_all_chains_and_is_noted():
    failures = []

    def fail(points):
        raise ZeroDivisionError

    evaluator = Evaluator(Density(fail, None, 10**6), 2, 1, failures.append)
    codes = [code for code, *_ in Chains(2, lambda i: evaluate(evaluator.combiner, np.zeros(1))).join()]
    assert codes == [-1, -1] and [type(one) for one in failures] == [ZeroDivisionError]
    assert evaluate(evaluator.combiner, np.zeros(1))[0] == -1
    evaluator.close()


def test_closing_wakes_chains_that_wait():
    combiner = Combiner(1, 1)
    chains = Chains(3, lambda i: evaluate(combiner, np.zeros(1))[0])  # more than there are slots
    assert combiner.exchange(np.empty(0), np.empty((0, 1)), np.empty((1, 1))) == 1
    combiner.close()
    assert chains.join() == [-1, -1, -1]
    assert combiner.exchange(np.empty(1), np.empty((1, 1)), np.empty((1, 1))) == 0


def test_arguments_are_checked():
    combiner = Combiner(2, 3)
    assert evaluate(combiner, np.zeros(2))[0] == -1
    small, integers = np.empty((1, 3)), np.empty((2, 3), "int64")
    for points in (small, integers):
        with pytest.raises(ValueError, match="expected arrays of float64"):
            combiner.exchange(np.empty(0), np.empty((0, 3)), points)
    with pytest.raises(ValueError, match="at least one thread"):
        Combiner(0, 3)


def test_functions_of_one_point_are_called_for_each():
    values, gradients = Each(lambda point: (point.sum(), 2 * point))(np.arange(6.0).reshape(3, 2))
    assert values.tolist() == [1, 5, 9] and gradients.tolist() == [[0, 2], [4, 6], [8, 10]]
