"""PyMC's functions on a model in `parallel(model)`, compared with the same calls outside of it."""

import contextlib
import functools
import io
import logging
import sys
import threading

import numpy as np
import pytest
from backend import T, theano

pm = pytest.importorskip("pymc", reason="PyMC is not installed")

import arviz as az  # noqa: E402
import xarray as xr  # noqa: E402
from pymc.sampling import mcmc  # noqa: E402
from pymc.smc import sampling  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.extensions.pymc import parallel, report  # noqa: E402

N = 70
#: Hardly optimized and not compiled, because the mode does not affect these tests.
FLAGS = {} if theano.config.linker == "numba" else {"mode": "FAST_COMPILE", "linker": "py", "cxx": ""}
QUIET = {"progressbar": False, "random_seed": 3}
SHORT = {**QUIET, "quiet": True, "compute_convergence_checks": False, "chains": 1, "cores": 1, "draws": 4, "tune": 4}
SMC = {**QUIET, "compute_convergence_checks": False, "chains": 1, "cores": 1}

RNG = np.random.default_rng(0)
X, GROUPS = RNG.normal(size=N), RNG.integers(4, size=N)
Y = 0.5 * X + GROUPS + RNG.normal(size=N)


@pytest.fixture(autouse=True)
def quick():
    logging.getLogger("pymc").setLevel(logging.ERROR)
    with theano.config.change_flags(**FLAGS):
        yield


def hierarchical():
    """A model with dims, a deterministic with a row for each observation, and a potential over data."""
    x, groups = pm.Data("x", X, dims="obs"), pm.Data("groups", GROUPS, dims="obs")
    a, b = pm.Normal("a", dims="group"), pm.Normal("b")
    mu = pm.Deterministic("mu", a[groups] + b * x, dims="obs")
    y = pm.Data("observed", Y, dims="obs")
    pm.Deterministic("share", 1 - T.var(y - mu) / T.var(y))
    pm.Normal("y", mu, pm.HalfNormal("s"), observed=y, dims="obs")
    pm.Potential("penalty", -0.01 * T.sqr(mu).sum())


def line():
    a, s = pm.Normal("a", shape=2), pm.HalfNormal("s")
    pm.Normal("y", a[0] + a[1] * X, s, observed=Y)


def discrete():
    z, k = pm.Bernoulli("z", 0.4), pm.Categorical("k", [0.2, 0.3, 0.5])
    change, b = pm.DiscreteUniform("change", 0, N), pm.Normal("b")
    pm.Normal("y", T.switch(np.arange(N) < change, b, z) + 0.1 * k, 1.0, observed=Y)


def model_of(build):
    with pm.Model(coords={"obs": np.arange(N), "group": list("abcd")}) as model:
        build()
    return model


def point_of(model):
    rng = np.random.default_rng(1)
    start = model.initial_point()
    return {k: v + 0.1 * rng.normal(size=v.shape) if v.dtype.kind == "f" else v for k, v in start.items()}


def posterior(n=3):
    rng = np.random.default_rng(5)
    values = {
        "a": (("chain", "draw", "group"), rng.normal(size=(1, n, 4))),
        "b": (("chain", "draw"), rng.normal(size=(1, n))),
        "s": (("chain", "draw"), rng.uniform(1, 2, size=(1, n))),
    }
    return xr.Dataset(values, coords={"chain": [0], "draw": np.arange(n), "group": list("abcd")})


def set_rows(n):
    coords = {"obs": np.arange(n)}
    pm.set_data({"x": X[:n], "groups": GROUPS[:n], "observed": Y[:n]}, coords=coords)


def three_rows():
    pm.Normal("y", pm.Normal("a"), pm.HalfNormal("s"), observed=Y[:3])


@pytest.mark.parametrize("build", [line, hierarchical, three_rows])
def test_functions_in_later_sessions(no_session, build):
    """Later sessions do not have the data yet; one of them may have more ranks than there are rows."""
    model = model_of(build)
    point = point_of(model)
    right = model.compile_logp()(point)
    with synk.session(2):
        with parallel(model):
            function = model.compile_logp()
        np.testing.assert_allclose(function(point), right, rtol=1e-12)
    for n_ranks, plan in ((2, "rows"), (3, "controller"), (1, "auto"), (5, "rows"), (2, "auto")):
        with synk.session(n_ranks, plan=plan):
            for _ in range(3):
                np.testing.assert_allclose(function(point), right, rtol=1e-12)


def test_blocks_of_threads_end_in_any_order(synchronize):
    """After the block of one thread, that of another thread samples; after both, PyMC is as before."""
    synchronize(2)
    settings = {**SHORT, "chains": 2, "cores": 2, "nuts_sampler": "pymc"}
    attributes = [(mcmc, "_iter_sample"), (mcmc, "setup_cores_blas_cores"), (sampling, "setup_cores_blas_cores")]
    before = [getattr(*one) for one in attributes]
    has_begun, is_alone, drawn = threading.Event(), threading.Event(), []

    def sample():
        with parallel(model_of(line)):
            has_begun.set()
            assert is_alone.wait(60)
            drawn.append(pm.sample(**settings).posterior["a"].values)

    other = threading.Thread(target=sample)
    with parallel(model_of(line)):
        other.start()
        assert has_begun.wait(60)
    is_alone.set()
    other.join()
    assert [getattr(*one) for one in attributes] == before
    with model_of(line):
        np.testing.assert_allclose(drawn[0], pm.sample(**{**settings, "cores": 1}).posterior["a"].values, rtol=1e-5)


def test_an_interrupt_ends_the_chains_of_its_thread(synchronize, monkeypatch):
    """The chains of another thread pass through the blocks of both threads, and go on."""
    synchronize(2)
    main = threading.get_ident()

    def draws(*, chain):
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        yield chain

    monkeypatch.setattr(mcmc, "_iter_sample", draws)
    drawn = []
    models = model_of(line), model_of(line)
    with parallel(models[0]), parallel(models[1]):
        for chain in (0, 1):
            with pytest.raises(KeyboardInterrupt):
                next(mcmc._iter_sample(chain=chain))
        other = threading.Thread(
            target=lambda: drawn.append([*mcmc._iter_sample(chain=0), *mcmc._iter_sample(chain=1)])
        )
        other.start()
        other.join()
    assert drawn == [[0, 1]]


def test_report_on_a_model_with_discrete_parameters(synchronize, capfd):
    synchronize(2)
    report(model_of(discrete))
    assert capfd.readouterr().out.startswith(f"log-probability and gradient of 1 parameters; {N} rows on 2 ranks\n")


CALLS = {}


@pytest.mark.parametrize("as_data", [False, True])
def test_models_of_pymc_dims_are_divided_by_constants_only(synchronize, as_data):
    import pymc.dims as pmd

    synchronize(2)
    with pm.Model(coords={"obs": np.arange(N), "column": np.arange(2)}) as model:
        dims = {"x": ("obs", "column"), "y": ("obs",)}
        arrays = {"x": np.stack([X, X**2], axis=1), "y": Y}
        if as_data:
            x, y = (pmd.Data(name, arrays[name], dims=dims[name]) for name in arrays)
        else:
            x, y = (pmd.as_xtensor(arrays[name], dims=dims[name]) for name in arrays)
        mu = (x * pmd.Normal("b", dims="column")).sum("column")
        pmd.Normal("observed", mu, pmd.HalfNormal("s"), observed=y)
    expected = model.compile_logp()(point_of(model))
    warns = pytest.warns(RuntimeWarning, match="no data that can be sharded") if as_data else contextlib.nullcontext()
    with warns, parallel(model):
        function = model.compile_logp()
    np.testing.assert_allclose(function(point_of(model)), expected, rtol=1e-12)
    assert isinstance(function.f, theano.compile.Function) == as_data


def test_without_a_nutpie_that_can_be_imported(synchronize, monkeypatch, tmp_path):
    synchronize(2)
    tmp_path.joinpath("nutpie.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nutpie", raising=False)
    with parallel(model_of(line)):
        drawn = pm.sample(nuts_sampler="pymc", **SHORT)
    assert drawn.posterior.sizes["draw"] == SHORT["draws"]


def call(build):
    def add(function):
        CALLS[function.__name__] = (build, function)
        return function

    return add


# -- functions of a model


@call(hierarchical)
def compile_logp(model):
    return [model.compile_logp()(point_of(model)), model.compile_logp(sum=False)(point_of(model))]


@call(line)
def compile_d2logp(model):
    return model.compile_d2logp(negate_output=False)(point_of(model))


@call(hierarchical)
def compile_fn(model):
    outputs = model.replace_rvs_by_values([model["mu"], model["share"]])
    return model.compile_fn(outputs, inputs=model.value_vars, on_unused_input="ignore")(point_of(model))


@call(hierarchical)
def inputs_in_the_middle(model):
    a, b, mu, share = (model[name] for name in ("a", "b", "mu", "share"))
    values = [pm.compile([a, b], [share, mu])(np.arange(4.0), 2.0), pm.compile([mu], share)(np.arange(float(N)))]
    return [*values, pm.compile([mu], [mu.sum(), share], on_unused_input="ignore")(X)]


@call(hierarchical)
def inputs_and_givens_that_depend_on_constants(model):
    b = model["b"]
    grown = T.exp(T.as_tensor(X + 0.5))
    value = (grown * b).sum() + T.log(grown).sum()
    return [
        pm.compile([b, grown], value)(2.0, X**2 + 1),
        pm.compile([b], value, givens={grown: T.as_tensor(X**2 + 1)})(2.0),
        pm.compile([b], value)(2.0),
    ]


@call(hierarchical)
def givens(model):
    a, b, x, mu, share = (model[name] for name in ("a", "b", "x", "mu", "share"))
    of_data = {x: T.as_tensor(X[::-1].copy())}
    return [
        pm.compile([a, b], share, givens=of_data)(np.ones(4), 2.0),
        pm.compile([a], share, givens={**of_data, b: x.sum()})(np.ones(4)),
        pm.compile([], share, givens=[(mu, T.as_tensor(Y**2))])(),
    ]


@call(hierarchical)
def a_few_gradients(model):
    function = model.logp_dlogp_function(grad_vars=[model.rvs_to_values[model["a"]]], ravel_inputs=True)
    function.set_extra_values(point_of(model))
    return function(np.arange(4.0))


@call(hierarchical)
def tempered(model):
    function = model.logp_dlogp_function(tempered=True, ravel_inputs=True)
    function.set_extra_values({})
    function.set_weights(np.array([0.3]))
    return function(np.arange(6.0) / 9)


@call(hierarchical)
def checks(model):
    model.check_start_vals(point_of(model))
    return [model.point_logps(point_of(model), round_vals=9), model.initial_point(2), model.eval_rv_shapes()]


@call(line)
def debug(model):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        model.debug(point_of(model), verbose=True)
    return len(out.getvalue())


@call(hierarchical)
def copies_of_models(model):
    models = [pm.do(model, {"b": 2.0}), pm.observe(model, {"b": 1.5})]
    models.append(pm.model.transform.optimization.freeze_dims_and_data(model))
    return [one.compile_logp()(point_of(one)) for one in models]


@call(hierarchical)
def a_picture(model):
    return len(pm.model_to_mermaid(model))


@call(hierarchical)
def functions_after_set_data(model):
    function, found = model.compile_logp(), []
    for n in (5, 1, 0, N - 1):
        set_rows(n)
        found.append(function(point_of(model)))
    return [*found, model.compile_logp(sum=False)(point_of(model))]


# -- predictions


@call(hierarchical)
def sample_prior_predictive(model):
    drawn = pm.sample_prior_predictive(3, random_seed=1)
    return [values_of(drawn.prior), values_of(drawn.prior_predictive)]


@call(hierarchical)
def draw(model):
    return pm.draw([model["mu"], model["y"], model["share"]], 2, random_seed=1)


@call(hierarchical)
def sample_posterior_predictive(model):
    names = [None, ["mu", "share"]]
    drawn = [pm.sample_posterior_predictive(posterior(), var_names=one, **QUIET) for one in names]
    return [values_of(one.posterior_predictive) for one in drawn]


@call(hierarchical)
def predictions_of_new_data(model):
    set_rows(5)
    drawn = pm.sample_posterior_predictive(posterior(), var_names=["mu", "y"], predictions=True, **QUIET)
    return values_of(drawn.predictions)


@call(hierarchical)
def compute_deterministics(model):
    return values_of(pm.compute_deterministics(posterior(), progressbar=False))


@call(hierarchical)
def compute_log_densities(model):
    tree = xr.DataTree.from_dict({"posterior": posterior(40)})
    pm.compute_log_likelihood(tree, progressbar=False)
    pm.compute_log_prior(tree, progressbar=False)
    loo = az.loo(tree, reff=1.0)
    return [values_of(tree.log_likelihood), values_of(tree.log_prior), loo.elpd, loo.se, loo.p]


# -- samplers


@call(hierarchical)
def metropolis(model):
    return values_of(pm.sample(step=pm.Metropolis(), **SHORT).posterior)


@call(line)
def other_steps(model):
    steps = [pm.Slice, pm.DEMetropolisZ]
    drawn = [pm.sample(step=step(), **SHORT) for step in steps]
    drawn.append(pm.sample(step=pm.DEMetropolis(), **{**SHORT, "chains": 3}))
    return [values_of(one.posterior) for one in drawn]


@call(discrete)
def compound_steps(model):
    z, k, change = (model[name] for name in ("z", "k", "change"))
    steps = [pm.BinaryGibbsMetropolis([z]), pm.CategoricalGibbsMetropolis([k]), pm.Metropolis([change])]
    steps.append(pm.NUTS([model["b"]]))
    return values_of(pm.sample(step=steps, **SHORT).posterior)


@call(line)
def sample_smc(model):
    drawn = [pm.sample_smc(12, kernel=kernel, **SMC) for kernel in (pm.smc.kernels.IMH, pm.smc.kernels.MH)]
    return [values_of(one.posterior) for one in drawn]


@call(hierarchical)
def find_map(model):
    found = pm.find_MAP(progressbar=False)
    return {name: np.round(value, 3) for name, value in found.items()}


@call(line)
def fit(model):
    found = []
    for method, options in (("advi", {}), ("fullrank_advi", {}), ("svgd", {"inf_kwargs": {"n_particles": 5}})):
        np.random.seed(1)  # noqa: NPY002 (from which PyMC draws the first particles)
        made = pm.fit(5, method=method, **QUIET, **options)
        found += [made.mean.eval(), values_of(made.sample(3, random_seed=1).posterior)]
    return found


def values_of(group):
    return {name: group[name].values for name in group.data_vars}


def leaves_of(found):
    if isinstance(found, dict):
        found = [found[name] for name in sorted(found)]
    if isinstance(found, (list, tuple)):
        return [leaf for one in found for leaf in leaves_of(one)]
    return [np.asarray(found)]


@functools.cache
def alone(name):
    build, function = CALLS[name]
    with model_of(build) as model:
        return leaves_of(function(model))


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_those_of_pymc_alone(synchronize, name):
    synchronize(2)
    build, function = CALLS[name]
    with parallel(model_of(build)) as model:
        found = leaves_of(function(model))
    assert len(found) == len(alone(name))
    for one, expected in zip(found, alone(name)):
        assert one.shape == expected.shape
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-7)
