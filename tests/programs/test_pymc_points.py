"""Evaluation of the points of several chains at once, for PyMC models."""

import contextlib
import ctypes
import threading
import time

import numpy as np
import pytest
from backend import theano
from scripts import run_script

pm = pytest.importorskip("pymc", reason="PyMC is not installed")

from synkhronos.extensions.pymc._combiner import Combiner  # noqa: E402

from synkhronos._backends import divert  # noqa: E402
from synkhronos.extensions.pymc.building import Builder, Each  # noqa: E402
from synkhronos.extensions.pymc.nutpie import combiner_of  # noqa: E402
from synkhronos.extensions.pymc.rows import ModelData  # noqa: E402

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


@pytest.mark.parametrize("n_chains", [1, 2, 4, 9])
def test_each_chain_gets_its_own_results(n_chains):
    sizes, failures = [], []

    def density(points):
        sizes.append(len(points))
        return -(points**2).sum(axis=1), -2 * points

    combiner = combiner_of(density, n_chains, 3, failures.append)
    points = np.random.default_rng(0).normal(size=(n_chains, 200, 3))
    found = Chains(n_chains, lambda i: [evaluate(combiner, point) for point in points[i]]).join()
    for of_chain, results in zip(points, found):
        for point, (code, value, gradient) in zip(of_chain, results):
            assert code == 0 and value == -(point**2).sum() and np.array_equal(gradient, -2 * point)
    assert sum(sizes) == n_chains * 200 and max(sizes) <= n_chains and not failures


def test_points_that_arrive_during_a_call_are_the_next_call():
    calls, entered, go_on = [], threading.Event(), threading.Event()

    def density(points):
        calls.append(sorted(points[:, 0]))
        entered.set()
        assert go_on.wait(DEADLINE)
        return points[:, 0], points

    combiner = combiner_of(density, 4, 2, pytest.fail)
    first = Chains(1, lambda i: evaluate(combiner, np.full(2, 7.0)))
    assert entered.wait(DEADLINE)
    arrived = [threading.Event() for _ in range(3)]

    def arrive(i):
        arrived[i].set()
        return evaluate(combiner, np.full(2, float(i)))

    others = Chains(3, arrive)
    assert all(one.wait(DEADLINE) for one in arrived)
    go_on.set()
    assert [(code, value) for code, value, _ in first.join() + others.join()] == [(0, 7), (0, 0), (0, 1), (0, 2)]
    assert calls[0] == [7] and sorted(x for call in calls[1:] for x in call) == [0, 1, 2]


def test_points_of_chains_that_wait_are_one_call():
    sizes = []

    def density(points):
        sizes.append(len(points))
        time.sleep(0.2)  # chains are waited for a tenth of this
        return points[:, 0], points

    combiner = combiner_of(density, 4, 2, pytest.fail)
    Chains(4, lambda i: [evaluate(combiner, np.zeros(2)) for _ in range(6)]).join()
    assert sum(sizes) == 24 and len(sizes) < 18, sizes  # 6 or 7 if no chain is late


def test_a_chain_that_has_ended_is_not_waited_for():
    calls = []

    def density(points):
        calls.append(len(points))
        return points[:, 0], points

    combiner = combiner_of(density, 2, 1, pytest.fail)
    Chains(2, lambda i: [evaluate(combiner, np.zeros(1)) for _ in range((3, 300)[i])]).join()
    assert sum(calls) == 303 and calls[-10:] == [1] * 10


@pytest.mark.parametrize(
    ("value", "gradient", "code"), [(1.0, 1.0, 0), (np.nan, 1.0, 4), (-np.inf, 1.0, 4), (1.0, np.inf, 3)]
)
def test_numbers_that_are_not_finite_are_divergences(value, gradient, code):
    combiner = combiner_of(
        lambda points: (np.full(len(points), value), np.full(points.shape, gradient)), 1, 2, pytest.fail
    )
    assert evaluate(combiner, np.zeros(2))[0] == code


def test_an_exception_ends_all_chains_and_is_noted():
    failures = []

    def fail(points):
        raise ZeroDivisionError

    combiner = combiner_of(fail, 3, 1, failures.append)
    codes = [code for code, *_ in Chains(3, lambda i: evaluate(combiner, np.zeros(1))).join()]
    assert codes == [-1, -1, -1] and [type(one) for one in failures] == [ZeroDivisionError]
    assert evaluate(combiner, np.zeros(1))[0] == -1


def test_closing_wakes_chains_that_wait():
    entered, go_on = threading.Event(), threading.Event()

    def density(points):
        entered.set()
        assert go_on.wait(DEADLINE)
        return points[:, 0], points

    combiner = combiner_of(density, 1, 1, pytest.fail)
    first = Chains(1, lambda i: evaluate(combiner, np.zeros(1))[0])
    assert entered.wait(DEADLINE)
    others = Chains(3, lambda i: evaluate(combiner, np.zeros(1))[0])  # more than there are slots
    combiner.close()
    assert others.join() == [-1, -1, -1]
    go_on.set()
    assert first.join() == [-1]


def test_arguments_are_checked():
    combiner = Combiner(print, np.empty((2, 3)), np.empty(2), np.empty((2, 3)))
    assert evaluate(combiner, np.zeros(2))[0] == -1
    for arrays, message in (
        ((np.empty((2, 3)), np.empty(2), np.empty((2, 2))), "one shape"),
        ((np.empty((2, 3)), np.empty(1), np.empty((2, 3))), "one shape"),
        ((np.empty((0, 3)), np.empty(0), np.empty((0, 3))), "one shape"),
        ((np.empty((2, 3), "int64"), np.empty(2), np.empty((2, 3))), "float64 with 2 dimensions"),
        ((np.empty((2, 3)), np.empty((2, 1)), np.empty((2, 3))), "float64 with 1 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            Combiner(print, *arrays)


def test_functions_of_one_point_are_called_for_each():
    values, gradients = Each(lambda point: (point.sum(), 2 * point))(np.arange(6.0).reshape(3, 2))
    assert values.tolist() == [1, 5, 9] and gradients.tolist() == [[0, 2], [4, 6], [8, 10]]


def test_functions_of_other_threads_are_of_one_point(synchronize):
    """While one thread builds a density of several points, such as in `pm.sample`, another thread builds functions."""
    synchronize(2)
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("b"), 1, observed=np.arange(70.0))
    point = {"b": np.array(0.5)}
    expected = model.compile_logp()(point)
    builder = Builder(ModelData(model, None))
    flags = {} if theano.config.linker == "numba" else {"mode": "FAST_COMPILE", "linker": "py", "cxx": ""}
    with contextlib.ExitStack() as ending:
        ending.callback(divert(builder))
        ending.enter_context(theano.config.change_flags(**flags))
        with builder.mapping():
            (of_other,) = Chains(1, lambda i: model.compile_logp()).join()
            (values,) = model.compile_fn([model.logp()], inputs=model.value_vars, point_fn=False)([0.5, 0.5])
    np.testing.assert_allclose(of_other(point), expected, rtol=1e-12)
    np.testing.assert_allclose(values, [expected] * 2, rtol=1e-12)


OWN_MODEL = """
    import nutpie
    import pymc as pm
    from nutpie import compile_pymc_model
    from synkhronos.extensions.pymc import parallel

    if theano.config.linker != "numba":
        theano.config.linker, theano.config.cxx = "py", ""
    settings = dict(draws=20, tune=20, chains=3, seed=4, progress_bar=False)
    x = np.random.RandomState(0).randn(90, 3)
    with pm.Model() as model:
        rows = pm.Data("rows", x[:80])
        pm.Normal("y", pm.math.dot(rows, pm.Normal("b", shape=3)), observed=x[:80].sum(axis=1))

    def draws(compiled):
        return nutpie.sample(compiled, **settings).posterior["b"].values

    serial = draws(nutpie.compile_pymc_model(model))
    for plan in ("controller", "auto", "rows"):
        with synk.session(2, plan=plan):
            with parallel(model):
                compiled = compile_pymc_model(model)
                for options in ({"backend": "jax"}, {"fastmath": True}):
                    try:
                        compile_pymc_model(model, **options)
                        raise AssertionError(options)
                    except (ImportError, ValueError) as error:
                        assert "got nutpie with" in str(error), error
            with parallel(model):  # another block
                found = [draws(compiled) for _ in range(2)]
                assert np.array_equal(*found) and compiled.logp_func.exact.plan == "rows"
                own = [one is not None for one in compiled.own._choices.values()]
                assert not own[0] or np.array_equal(found[0], serial), plan
                assert {"controller": own[0], "rows": not own[0], "auto": True}[plan]
                pm.set_data({"rows": x[:80] * 2})
                assert abs(draws(compiled).mean() - 0.5) < 0.1
                pm.set_data({"rows": x[:80]})
    print("chosen")

    try:
        compiled.benchmark_logp(np.zeros(3), 5, [1])
        raise AssertionError
    except ValueError as error:
        assert "report" in str(error)
    with synk.session(2), parallel(model):
        sampler = nutpie.sample(compiled, blocking=False, **{**settings, "draws": 300})
        try:
            sampler.wait(timeout=0.001)
        except TimeoutError:
            print("timeout")
        sampler.pause()
        sampler.resume()
        assert sampler.wait().posterior["b"].shape == (3, 300, 3)
        sampler = nutpie.sample(compiled, blocking=False, **{**settings, "draws": 10 ** 7})
        del sampler  # ends it
        print("background")
    with pm.Model() as fixed, synk.session(2):
        pm.Normal("z")
        pm.Normal("y", 0, 1, observed=x[:80, 0])
        sample, cores = nutpie.sample, []
        nutpie.sample = lambda *args, **kwargs: cores.append(kwargs.get("cores")) or sample(*args, **kwargs)
        with parallel(fixed):
            drawn = pm.sample(20, tune=20, chains=3, cores=2, nuts_sampler="nutpie", progressbar=False)
        assert drawn.posterior["z"].shape == (3, 20) and cores == [2]
        print("fixed")
    with synk.session(2), parallel(model):
        frozen = compile_pymc_model(model, freeze_model=True)
        assert frozen.logp_func.data and draws(frozen).shape == draws(compiled).shape
        print("frozen")
"""


def test_nutpies_own_model_where_it_is_faster():
    pytest.importorskip("nutpie")
    out, _ = run_script(OWN_MODEL, fresh=True, timeout=850 if theano.config.linker == "numba" else 150)
    assert out.split() == ["chosen", "timeout", "background", "fixed", "frozen"]
