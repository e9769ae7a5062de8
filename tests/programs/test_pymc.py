"""PyMC models, divided by the rows of their data, compared with PyMC alone."""

import contextlib
import functools
import os
import re
import signal
import types
from pathlib import Path

import numpy as np
import pytest
from backend import T, theano
from process_state import wait_for_end, worker_pids
from scripts import python_path, run_script

import synkhronos as synk
from synkhronos._sharding import Prediction

pm = pytest.importorskip("pymc", reason="PyMC is not installed")

from synkhronos.extensions.pymc import parallel, report  # noqa: E402
from synkhronos.extensions.pymc.building import ModelFunction  # noqa: E402
from synkhronos.extensions.pymc.rows import ModelData  # noqa: E402

N = 71
NUMBA = theano.config.linker == "numba"
#: Fully optimized and not compiled, unless the tests run with numba.
FLAGS = {} if NUMBA else {"linker": "py", "cxx": ""}
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False, "chains": 1, "cores": 1}


@pytest.fixture(autouse=True)
def linker():
    with theano.config.change_flags(**FLAGS):
        yield


def draws(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def hierarchical(n=N, data=lambda name, value: value):
    groups = np.arange(n) * 7 % 5
    x = draws(n, 3)
    y = x.dot([1, -1, 0.5]) + groups + draws(n, seed=1)
    mean, spread = pm.Normal("mean"), pm.HalfNormal("spread")
    a = pm.Normal("a", mean, spread, shape=5)
    b = pm.Normal("b", shape=3)
    rate = a[data("groups", groups)] + T.dot(data("x", x), b)
    pm.Normal("y", rate, pm.HalfNormal("s"), observed=data("observed", y))


def of_data():
    hierarchical(data=pm.Data)


def logistic():
    x = draws(N, 3)
    pm.Bernoulli("y", logit_p=pm.Normal("c") + T.dot(x, pm.Normal("b", shape=3)), observed=x[:, 0] > 0)


def poisson():
    rate = pm.Deterministic("rate", T.exp(T.dot(draws(N, 3), pm.Normal("b", shape=3))))
    pm.Poisson("y", rate, observed=np.arange(N) % 4)


def crossed():
    g, h, x = np.arange(N) % 7, np.arange(N) * 3 % 5, draws(N)
    u, v = pm.Normal("u", 0, pm.HalfNormal("su"), shape=7), pm.Normal("v", shape=5)
    sigma = pm.Exponential("sigma", 1.0, shape=5)
    pm.StudentT("y", nu=4, mu=u[g] + v[h] * x, sigma=sigma[h], observed=draws(N, seed=2))


def mixture():
    weights = pm.Dirichlet("weights", np.ones(3))
    pm.NormalMixture("y", weights, pm.Normal("mu", shape=3), pm.HalfNormal("s", shape=3), observed=draws(N))


def hidden_markov():
    """Many short sequences, one in each row."""
    move = pm.Dirichlet("move", np.ones(2), shape=(2, 2))
    density = pm.logp(pm.Normal.dist(pm.Normal("mu", shape=2), 1), T.as_tensor_variable(draws(17, 4))[:, :, None])

    def step(here, before, move):
        return pm.math.logsumexp(before[:, :, None] + move, axis=1, keepdims=False) + here

    states = theano.scan(
        step, [density.dimshuffle(1, 0, 2)], [T.zeros((17, 2))], non_sequences=[T.log(move)], return_updates=False
    )
    pm.Potential("sequences", pm.math.logsumexp(states[-1], axis=1).sum())


def gaussian_process():
    process = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(1, pm.Gamma("length", 2, 1)))
    x = np.linspace(0, 1, 17)[:, None]
    process.marginal_likelihood("y", X=x, y=np.sin(6 * x[:, 0]), sigma=pm.HalfNormal("s"))


def missing():
    y = draws(N)
    y[::9] = np.nan
    pm.Normal("y", T.dot(draws(N, 3, seed=1), pm.Normal("b", shape=3)), pm.HalfNormal("s"), observed=y)


def potential():
    b = pm.Normal("b", shape=3)
    density = pm.logp(pm.Normal.dist(T.dot(draws(N, 3), b), pm.HalfNormal("s")), draws(N, seed=1))
    pm.Potential("weighted", (np.linspace(0, 1, N) * density).sum())
    pm.Potential("penalty", -(b**4).sum())


def multivariate():
    root, _, _ = pm.LKJCholeskyCov("root", n=3, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0, shape=3))
    pm.MvNormal("y", pm.Normal("mu", shape=3), chol=root, observed=draws(N, 3))


def likelihoods_of_two_lengths():
    b = pm.Normal("b", shape=3)
    pm.Normal("y", T.dot(draws(N, 3), b), 1, observed=draws(N, seed=1))
    pm.Poisson("z", T.exp(b[0]), observed=np.arange(25) % 4)


def censored():
    y = np.clip(draws(N, seed=1), -1, 1)
    pm.Censored("y", pm.Normal.dist(T.dot(draws(N, 3), pm.Normal("b", shape=3)), 1), lower=-1, upper=1, observed=y)


def ordered():
    eta = T.dot(draws(N, 3), pm.Normal("b", shape=3))
    cuts = pm.Normal("cuts", 0, 2, shape=3, transform=pm.distributions.transforms.ordered, initval=[-1, 0, 1])
    pm.OrderedLogistic("y", eta=eta, cutpoints=cuts, observed=np.arange(N) % 4, compute_p=False)


def categorical():
    pm.Categorical("y", logit_p=T.dot(draws(N, 3), pm.Normal("b", shape=(3, 5))), observed=np.arange(N) % 5)


def potential_of_data():
    x, y = pm.Data("x", draws(N, 3)), pm.Data("y", draws(N, seed=1))
    pm.Potential("rows", -T.sqr(y - T.dot((x - x.mean(axis=0)) / x.std(axis=0), pm.Normal("b", shape=3))))


def truncated():
    """Terms whose parts have checks of parameters, which some values of "b" do not pass."""
    sigma = pm.Normal("b", initval=1.0) + np.linspace(0, 1, N)
    pm.Truncated("y", pm.Normal.dist(0, sigma), lower=-1, upper=1, observed=np.clip(draws(N), -0.9, 0.9))


def zero_inflated():
    p = pm.math.sigmoid(draws(N) * pm.Normal("b"))
    pm.ZeroInflatedPoisson("y", p, pm.math.exp(draws(N, seed=1) * pm.Normal("c")), observed=np.arange(N) % 4)


def latent():
    """A model with a parameter for each row."""
    z = pm.Normal("z", shape=N)
    pm.NegativeBinomial("y", mu=T.exp(pm.HalfNormal("s") * z), alpha=2.0, observed=np.arange(N) % 4)


MODELS = [
    *(hierarchical, of_data, logistic, poisson, crossed, mixture, hidden_markov, gaussian_process, missing, potential),
    *(multivariate, latent, likelihoods_of_two_lengths, censored, potential_of_data),
    *(ordered, categorical, truncated, zero_inflated),
]
#: Models for which ranks gather rows of values or gradients. For all other models, ranks only add sums.
GATHERED = {gaussian_process, latent}


@functools.cache
def model_of(build):
    with pm.Model() as model:
        build()
    return model


@functools.cache
def model_density(build):
    """Return PyMC's own function for the log-probability and its gradient."""
    return model_of(build).logp_dlogp_function(ravel_inputs=True)._pytensor_function


@functools.cache
def alone(build):
    """Return the values and gradients of PyMC's own function at some points."""
    function = model_density(build)
    n = sum(value.size for value in model_of(build).initial_point().values())
    points = [0.3 * draws(n, seed=seed) for seed in range(3)]
    return [(point, *function(point)) for point in points]


def check(function, expected):
    for point, value, gradient in expected:
        divided = function._pytensor_function(point)
        np.testing.assert_allclose(divided[0], value, rtol=1e-10)
        np.testing.assert_allclose(divided[1], gradient, rtol=0, atol=1e-10 * abs(gradient).max())


@pytest.mark.parametrize(
    ("build", "n_ranks"),
    [*((build, 3) for build in MODELS), *((build, n) for build in (hierarchical, of_data, missing) for n in (1, 2, 5))],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_density_and_gradient(synchronize, build, n_ranks):
    synchronize(n_ranks)
    with parallel(model_of(build)) as model:
        function = model.logp_dlogp_function(ravel_inputs=True)
    check(function, alone(build))
    kinds = [one.collective for one in function._pytensor_function.partition]
    assert kinds
    assert any("gather" in kind for kind in kinds) == (build in GATHERED), kinds


@pytest.mark.parametrize(
    ("build", "n_ranks"),
    [*((build, 2) for build in MODELS), *((build, n) for build in (hierarchical, of_data, missing) for n in (1, 3, 5))],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_points_of_several_chains(synchronize, build, n_ranks):
    nutpie = pytest.importorskip("nutpie")
    synchronize(n_ranks)
    with parallel(model_of(build)) as model:
        density = nutpie.compile_pymc_model(model).logp_func
    points, values, gradients = map(np.stack, zip(*alone(build)))
    for k in (3, 1):
        found = density(points[:k])
        np.testing.assert_allclose(found[0], values[:k], rtol=1e-10)
        np.testing.assert_allclose(found[1], gradients[:k], rtol=0, atol=1e-10 * abs(gradients).max())


def test_the_hierarchical_model_has_at_most_two_exchanges(synchronize):
    synchronize(2)
    with parallel(model_of(hierarchical)) as model:
        function = model.logp_dlogp_function(ravel_inputs=True)
    partition = function._pytensor_function.partition
    assert [one.collective for one in partition] == ["all-reduce (sum)"] * 5
    assert len({one.meeting for one in partition}) <= 2
    assert sum(value.get_value().nbytes for value in function._pytensor_function.get_shared()) < N * 5 * 8 * 0.6


def test_report(synchronize, capfd):
    synchronize(2)
    report(model_of(logistic))
    out = capfd.readouterr().out
    first, titles, *_, last = out.splitlines()
    assert first == f"log-probability and gradient of 4 parameters; {N} rows on 2 ranks" and "collective" in titles
    verdict = r"(this model does not gain|the ranks are [\d.e+]+ times as fast)"
    assert re.fullmatch(r"one evaluation: [\d.e+]+ ms, [\d.e+]+ ms by PyMC alone in this process: " + verdict, last)
    rows = [line for line in out.splitlines() if "all-reduce" in line]
    assert len(rows) == 5 and all(Path(__file__).name in line and "test_report" not in line for line in rows), rows
    with pytest.warns(RuntimeWarning, match="no data that can be sharded"):
        with pm.Model() as model:
            pm.Normal("x")
        report(model)
    assert not capfd.readouterr().out


def test_new_data_are_seen(synchronize):
    synchronize(3)
    with pm.Model() as model:
        hierarchical(data=pm.Data)
    with parallel(model):
        function = model.logp_dlogp_function(ravel_inputs=True)
    n = 40
    new = {"groups": np.arange(n) % 5, "x": draws(n, 3, seed=5), "observed": draws(n, seed=6)}
    with model:
        pm.set_data(new)
    plain = model.logp_dlogp_function(ravel_inputs=True)._pytensor_function
    point = 0.3 * draws(11)
    check(function, [(point, *plain(point))])


def test_data_of_different_lengths_are_named(synchronize):
    synchronize(2)
    with pm.Model() as model:
        hierarchical(data=pm.Data)
    point = model.initial_point()
    with parallel(model):
        functions = [model.compile_logp()]
        pm.set_data({"x": draws(39, 3), "groups": np.arange(40) % 5, "observed": draws(40)})
        functions.append(model.compile_logp())
    for function in functions:
        with pytest.raises(ValueError, match=r"different lengths.*pm\.Data 'x': 39") as raised:
            function(point)
        assert "pm.Data 'observed': 40" in str(raised.value)


def test_independent_data_may_have_different_lengths(synchronize):
    synchronize(2)
    with pm.Model() as model:
        b = pm.Normal("b")
        for name in ("one", "other"):
            pm.Normal(name, b, 1, observed=pm.Data(f"data of {name}", draws(N)))
    plain = model.compile_dlogp()
    with parallel(model):
        function = model.compile_dlogp()
        for n in (40, 1, 0):
            pm.set_data({"data of one": draws(n)})
            with pytest.warns(RuntimeWarning, match="different lengths") if n == 40 else contextlib.nullcontext():
                divided = function({"b": 0.3})
            np.testing.assert_allclose(divided, plain({"b": 0.3}), rtol=1e-10)


class Timed:
    """Function with given predictions."""

    plan = "auto"

    def __init__(self, rows, controller):
        self.partition = types.SimpleNamespace(plans=[Prediction(N, rows, controller, "timed")])

    def __call__(self, point):
        return point


def test_one_warning_if_ranks_gain_nothing(synchronize):
    synchronize(2)
    options = {"many": None, "warn": ModelData(model_of(logistic), None).warn_of_times}
    made = [ModelFunction(Timed(*times), [], dict, dict, **options) for times in [(1, 2), (4.2e-4, 1e-5), (4, 1)]]
    with pytest.warns(RuntimeWarning) as warned:
        for one in made * 20:
            assert one(1.5) == 1.5
    (warning,) = warned
    message = "the controller alone evaluates the model in about 0.01 ms, and all ranks in 0.42 ms, so the controller"
    assert message in str(warning.message)
    assert warning.filename == __file__


def test_few_rows(synchronize):
    synchronize(3)
    with pm.Model() as model:
        hierarchical(data=pm.Data)
    plain, point = model.compile_dlogp(), model.initial_point()
    with parallel(model):
        function = model.compile_dlogp()
        for n in (2, 1, 0, 3, 50):
            pm.set_data({"x": draws(n, 3), "groups": np.arange(n) % 5, "observed": draws(n)})
            np.testing.assert_allclose(function(point), plain(point), rtol=1e-9, atol=1e-12)
        assert any("sum" in one.collective for one in model.compile_dlogp().f.partition)


@pytest.mark.parametrize("shape", [(1, 60), (2, 60), (60, 1), (2, 5), (3, 3), (1, 1), (2,), (1,)], ids=str)
def test_data_of_any_shape_are_sharded_if_an_axis_is_longer_than_1(synchronize, shape):
    synchronize(2)
    with pm.Model() as model:
        mean = pm.Normal("mu", shape=(shape[0], 1) if len(shape) == 2 else None)
        pm.Normal("y", mean, pm.HalfNormal("s"), observed=draws(*shape))
    point = {"mu": draws(*model["mu"].shape.eval()), "s_log__": np.array(0.2)}
    plain = [model.compile_logp()(point), model.compile_dlogp()(point)]
    small = max(shape) == 1
    warns = pytest.warns(RuntimeWarning, match="no data that can be sharded") if small else contextlib.nullcontext()
    with warns, parallel(model):
        functions = [model.compile_logp(), model.compile_dlogp()]
    assert [hasattr(one.f, "partition") for one in functions] == [not small] * 2
    for function, expected in zip(functions, plain):
        np.testing.assert_allclose(function(point), expected, rtol=1e-10)


@pytest.mark.parametrize("build", [hierarchical, of_data, multivariate], ids=lambda build: build.__name__)
def test_the_rows_of_a_replaced_worker_are_restored(synchronize, build):
    synchronize(3, restart_workers=True)
    with parallel(model_of(build)) as model:
        function = model.logp_dlogp_function(ravel_inputs=True)
    check(function, alone(build))
    pid = worker_pids()[0]
    os.kill(pid, signal.SIGKILL)
    wait_for_end([pid])
    with pytest.raises(synk.WorkerRestarted) as caught:
        function._pytensor_function(alone(build)[0][0])
    assert caught.value.lost == []
    check(function, alone(build))


def test_draws_are_those_of_pymc(synchronize):
    synchronize(2)
    options = {**QUIET, "draws": 8, "tune": 8, "random_seed": 3, "nuts_sampler": "pymc"}
    with model_of(hierarchical):
        alone = pm.sample(**options)
    with parallel(model_of(hierarchical)):
        together = pm.sample(**options)
    for name in ("mean", "spread", "a", "b", "s"):
        np.testing.assert_allclose(together.posterior[name], alone.posterior[name], rtol=1e-6)


def test_map_and_advi(synchronize):
    synchronize(2)
    model = model_of(logistic)
    found = []
    for context in (model, parallel(model)):
        with context:
            best = pm.find_MAP(progressbar=False, include_transformed=False)
            found.append((best["b"], pm.fit(30, random_seed=4, progressbar=False)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    np.testing.assert_allclose(found[1][1].hist, found[0][1].hist, rtol=1e-9)
    np.testing.assert_allclose(found[1][1].mean.eval(), found[0][1].mean.eval(), rtol=1e-8)


@pytest.mark.parametrize(
    ("options", "n_chains"),
    [({}, 4), ({"chains": 2}, 2), ({"cores": 3}, 3), ({"chains": 3, "cores": 2, "mp_ctx": "forkserver"}, 3)],
)
def test_chains_follow_each_other(synchronize, monkeypatch, options, n_chains):
    """With any ``chains`` and ``cores``, `pm.sample` makes the draws that PyMC makes, on a machine with many cores."""
    synchronize(2)
    monkeypatch.setattr("pymc.sampling.mcmc._cpu_count", lambda: 8)
    quiet = {**QUIET, "draws": 3, "tune": 3, "nuts_sampler": "pymc", "random_seed": 5}
    model = model_of(logistic)
    with model:
        expected = pm.sample(**{**quiet, "chains": n_chains})
    del quiet["chains"], quiet["cores"]
    with parallel(model):
        drawn = pm.sample(**quiet, **options)
    assert drawn.posterior["b"].shape[:2] == (n_chains, 3)
    np.testing.assert_allclose(drawn.posterior["b"], expected.posterior["b"], rtol=1e-6)


@pytest.mark.parametrize("between", [False, True])
def test_ctrl_c_ends_all_chains(synchronize, monkeypatch, between):
    """The draws so far are those of the chain that was interrupted; the next sampling starts again."""
    synchronize(2)
    options = {**QUIET, "draws": 8, "tune": 4, "nuts_sampler": "pymc", "chains": 3}
    drawn = []

    def note(trace, draw):
        drawn.append(draw.chain)
        if len(drawn) == 10 and not between:
            raise KeyboardInterrupt

    def update(*args, **kwargs):  # of the progress bars, between two draws
        if len(drawn) == 10 and between:
            raise KeyboardInterrupt

    with parallel(model_of(logistic)):
        with monkeypatch.context() as patched:
            patched.setattr(pm.sampling.mcmc.MCMCProgressBarManager, "update", update)
            found = pm.sample(callback=note, **options)
        assert drawn == [0] * 10 and found.posterior["b"].shape[:2] == (1, 6)
        assert pm.sample(**options).posterior["b"].shape[:2] == (3, 8)


def test_chains_of_smc_follow_each_other(synchronize):
    synchronize(2)
    with parallel(model_of(logistic)):
        drawn = pm.sample_smc(20, chains=2, cores=2, random_seed=5, progressbar=False, compute_convergence_checks=False)
    assert drawn.posterior["b"].shape[:2] == (2, 20)


def test_models_that_cannot_be_divided(synchronize, no_session):
    with pytest.raises(synk.SessionError, match=r"pymc\.parallel: there is no session"), parallel(model_of(logistic)):
        pass
    synchronize(2)
    with pytest.raises(TypeError, match=r"pymc\.Model"), parallel("a model"):
        pass
    with pytest.raises(ValueError, match="got rows=12"), parallel(model_of(logistic), rows=12):
        pass


NUTPIE = """
    import pymc as pm
    import nutpie
    from pathlib import Path
    from synkhronos._graph.ops import Collective
    from synkhronos.extensions.pymc import building, parallel

    controller, failing = os.getpid(), Path(sys.argv[1], "failing")
    meet = Collective.perform

    def perform(self, *args):
        if os.getpid() != controller and failing.exists():
            raise ArithmeticError("in a worker")
        meet(self, *args)

    Collective.perform = perform
    if theano.config.linker != "numba":
        theano.config.linker, theano.config.cxx = "py", ""
    quiet = dict(progressbar=False, quiet=True, compute_convergence_checks=False, chains=1, cores=1, random_seed=1)
    with pm.Model() as model:
        x = np.random.RandomState(0).randn(61, 3)
        pm.Normal("y", pm.math.dot(x, pm.Normal("b", shape=3)), observed=x.sum(axis=1))

    synk.fork(2)
    with parallel(model):
        drawn = pm.sample(draws=100, tune=100, nuts_sampler="nutpie", **quiet)
        assert drawn.posterior["b"].shape == (1, 100, 3) and drawn.sample_stats["diverging"].sum() == 0
        assert abs(drawn.posterior["b"].mean() - 1) < 0.1, drawn.posterior["b"].mean()
        drawn = pm.sample(draws=10, tune=10, nuts_sampler="nutpie", **{**quiet, "chains": 3, "cores": 2})
        assert drawn.posterior["b"].shape == (3, 10, 3)
        compiled = nutpie.compile_pymc_model(model)
        drawn = nutpie.sample(compiled, draws=10, tune=10, chains=2, cores=2, progress_bar=False)
        assert drawn.posterior["b"].shape == (2, 10, 3)
        fixed = dict(draws=9, tune=9, seed=5, progress_bar=False)
        for chains in (1, 4):
            one, other = (nutpie.sample(compiled, chains=chains, **fixed) for _ in range(2))
            assert one.posterior["b"].equals(other.posterior["b"])  # whatever points were evaluated together
        print("chains at once")

    def sample_until(end, chains=1):
        call = building.ModelFunction.__call__
        calls = []

        def count(self, *args):
            calls.append(1)
            if len(calls) == 1000:  # more than ten draws take while the chain is tuned
                end()
            return call(self, *args)

        building.ModelFunction.__call__ = count
        try:
            with parallel(model):
                drawn = pm.sample(draws=10 ** 6, tune=10, nuts_sampler="nutpie", **{**quiet, "chains": chains})
            assert drawn.posterior.sizes["chain"] == chains and 0 < drawn.posterior.sizes["draw"] < 10 ** 6
            print("draws so far")
        except BaseException as error:
            print(type(error).__name__, flush=True)
            assert not failing.exists() or "ArithmeticError: in a worker" in str(error), error
        building.ModelFunction.__call__ = call

    def fail():
        raise ZeroDivisionError

    sample_until(fail)
    sample_until(failing.touch)
    failing.unlink()
    for chains in (1, 3):
        sample_until(lambda: os.kill(os.getpid(), signal.SIGINT), chains)
    with parallel(model):  # the session is still usable
        pm.sample(draws=5, tune=5, nuts_sampler="nutpie", **quiet)
    sample_until(lambda: os.kill(worker_pids()[0], signal.SIGKILL))
    synk.close()
"""


def test_nutpie_raises_the_error_of_a_failed_call(tmp_path):
    pytest.importorskip("nutpie")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    out, _ = run_script(NUTPIE, str(tmp_path), fresh=True, timeout=850 if NUMBA else 150, environment=environment)
    assert out.splitlines() == [
        "chains at once",
        "ZeroDivisionError",
        "WorkerError",
        *["draws so far"] * 2,
        "WorkerDied",
    ]


def matrix_of_positions():
    """A covariate whose entries, but not its rows, are 0, 1, 2, …, and one whose rows are."""
    t = np.arange(2 * N).reshape(N, 2)
    pm.Normal("y", 1e-2 * t * pm.Normal("b"), 1, observed=draws(N, 2))
    pm.Normal("trend", 1e-2 * np.arange(N) * pm.Normal("c"), 1, observed=draws(N, seed=1))


IN_BLOCKS = [ordered, categorical, matrix_of_positions, logistic, mixture, crossed, censored, truncated, zero_inflated]


@pytest.mark.parametrize("build", IN_BLOCKS)
def test_likelihoods_over_rows_are_computed_in_blocks_with_one_exchange(synchronize, build):
    synchronize(3)
    model = model_of(build)
    nutpie = pytest.importorskip("nutpie")
    with parallel(model):
        function = model.logp_dlogp_function(ravel_inputs=True)
        density = nutpie.compile_pymc_model(model).logp_func
    check(function, alone(build))
    for one in (function._pytensor_function, density):
        assert type(one.exact).__name__ == "ExactFunction" and "meetings: 1;" in str(one.partition)
        kinds = {node.op.__class__.__name__ for node in one.exact.maker.fgraph.apply_nodes}
        assert "Scan" in kinds, kinds  # the loop over blocks


def test_parameters_that_are_not_allowed(synchronize):
    synchronize(3)
    model, nutpie = model_of(truncated), pytest.importorskip("nutpie")
    points = np.array([[1.0], [-0.9], [-3.0], [2.0]])  # at the second one, some standard deviations are negative
    expected = [model_density(truncated)(point) for point in points]
    assert [bool(np.isfinite(value)) for value, _ in expected] == [True, False, False, True]
    with parallel(model):
        function = model.logp_dlogp_function(ravel_inputs=True)._pytensor_function
        density = nutpie.compile_pymc_model(model).logp_func
        raising = theano.function(model.value_vars, model.logp())
        named = model.compile_logp()
    for found, (value, gradient) in zip([*map(function, points), *zip(*density(points))], expected * 2):
        np.testing.assert_allclose(found[0], value, rtol=1e-10)
        np.testing.assert_allclose(found[1], gradient, rtol=1e-10)
    assert np.isclose(raising(1.0), expected[0][0])
    with pytest.raises(pm.logprob.utils.ParameterValueError, match="sigma > 0"):
        raising(-0.9)
    assert np.isclose(named({"b": 1.0}), expected[0][0])
    np.testing.assert_array_equal(named({"b": -0.9}), model.compile_logp()({"b": -0.9}))
    np.testing.assert_array_equal(function.copy()(points[1])[0], expected[1][0])
