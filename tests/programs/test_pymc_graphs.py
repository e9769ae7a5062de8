"""Graphs of PyMC that are rewritten before the ranks divide them: data alone, missing values, leaves, assertions."""

import numpy as np
import pytest
from backend import T, theano

import synkhronos as synk

pm = pytest.importorskip("pymc", reason="PyMC is not installed")

from pymc.exceptions import ImputationWarning  # noqa: E402

from synkhronos._sharding import blocking  # noqa: E402
from synkhronos.extensions.pymc import parallel  # noqa: E402

N = 71


@pytest.fixture(autouse=True)
def linker():
    """Optimize fully and do not compile, unless the tests run with numba."""
    flags = {} if theano.config.linker == "numba" else {"linker": "py", "cxx": ""}
    with theano.config.change_flags(**flags):
        yield


def draws(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def check(model, points):
    """Compare the log-probability and its gradient with PyMC's own; return the divided function."""
    plain = model.logp_dlogp_function(ravel_inputs=True)._pytensor_function
    with parallel(model):
        divided = model.logp_dlogp_function(ravel_inputs=True)._pytensor_function
    for point in points:
        (value, gradient), expected = divided(point), plain(point)
        np.testing.assert_allclose(value, expected[0], rtol=1e-10)
        np.testing.assert_allclose(gradient, expected[1], rtol=0, atol=1e-10 * abs(expected[1]).max())
    return divided


def collectives(function):
    return {one.collective for one in function.partition}


def test_what_depends_on_data_alone_is_computed_once(synchronize):
    """The basis functions of a process, the exponentials of covariates, and the sum of a product of data."""
    synchronize(2)
    x, y = draws(N, 3), draws(N, seed=1)
    with pm.Model() as model:
        data = theano.tensor.as_tensor_variable(x)
        process = pm.gp.HSGP(m=[5], c=1.5, cov_func=pm.gp.cov.ExpQuad(1, pm.Gamma("length", 2, 1)))
        mu = process.prior("f", X=np.linspace(0, 1, N)[:, None])
        mu += T.dot(T.exp(data), pm.Normal("b", shape=3)) + T.dot(data.T, data).sum() * pm.Normal("c")
        pm.Normal("y", mu, 1, observed=y)
    divided = check(model, [0.3 * draws(10, seed=seed) for seed in range(2)])
    assert collectives(divided) == {"all-reduce (sum)"}
    shapes = sorted(one.whole.type.shape for one in divided.data)
    assert shapes == [(N,), (N, 3), (N, 5)]  # y, the exponentials, the basis functions


def some(n_columns):
    x = draws(N, n_columns)
    x[::7, 0] = x[3::9, -1] = np.nan
    return x


def one_value(n_columns):
    x = draws(N, n_columns)
    x[5, 0] = np.nan
    return x


def one_column(n_columns):
    x = draws(N, n_columns)
    x[:, 0] = np.nan
    return x


@pytest.mark.parametrize(
    ("make", "n_columns", "n_ranks"),
    [*((some, k, n) for k in (1, 3) for n in (1, 2, 3, 5)), (one_value, 1, 2), (one_value, 3, 2), (one_column, 3, 2)],
)
def test_missing_covariates_are_inserted_by_rows(synchronize, make, n_columns, n_ranks):
    """One column, in which a mask selects rows, and a matrix, in which it selects entries."""
    synchronize(n_ranks)
    x = make(n_columns)
    n_missing = np.isnan(x).sum()
    with pm.Model() as model, pytest.warns(ImputationWarning):
        mean = pm.Normal("mean", shape=n_columns)
        full = pm.Normal("x", mean if n_columns > 1 else mean[0], 1, observed=x if n_columns > 1 else x[:, 0])
        rate = T.dot(full.reshape((N, n_columns)), pm.Normal("b", shape=n_columns))
        pm.Normal("y", rate, pm.HalfNormal("s"), observed=draws(N, seed=1))
    divided = check(model, [0.3 * draws(n_missing + 2 * n_columns + 1, seed=seed) for seed in range(2)])
    if n_missing != N:  # otherwise indices of the missing values count as rows
        assert collectives(divided) == {"all-reduce (sum)"}


@pytest.mark.parametrize(
    ("shape", "share", "n_ranks"),
    [*(((N,), 0.1, n) for n in (1, 2, 3, 5)), ((N,), 0.6, 2), ((N,), 1, 2), ((N, 2), 0.3, 2), ((N, 2), 0.7, 3)],
)
def test_outcomes_of_which_some_are_missing_are_computed_by_rows(synchronize, shape, share, n_ranks):
    """The missing ones are positive parameters, so they have a transform; scales differ between rows."""
    synchronize(n_ranks)
    y = np.exp(draws(*shape, seed=2))
    y[np.random.default_rng(3).random(shape) < share] = np.nan
    n_missing = np.isnan(y).sum()
    groups = np.arange(N) % 4
    with pm.Model() as model, pytest.warns(ImputationWarning):
        a = pm.Normal("a", shape=(4, *shape[1:]))
        rate = a[groups] + T.dot(draws(N, 3), pm.Normal("b", shape=(3, *shape[1:])))
        pm.LogNormal("y", rate, T.exp(0.1 * rate), observed=y)
    n_parameters = 7 * (2 if len(shape) > 1 else 1) + n_missing
    divided = check(model, [0.3 * draws(n_parameters, seed=seed) for seed in range(2)])
    if n_missing != N:  # otherwise indices of the missing values count as rows
        assert collectives(divided) == {"all-reduce (sum)", "all-reduce (min)"}  # the latter for checks
        assert max(one.meeting for one in divided.partition) == 1


def numbers_of_one_value():
    y = draws(N)
    y[::5] = np.nan
    rate = pm.Normal("b") * draws(N, seed=1)
    pm.Normal("y", rate, 1, observed=y)
    pm.Normal("one", rate.sum(), 1, observed=0.5)


def groups_of_which_one_is_empty():
    mu, of = T.dot(draws(N, 3), pm.Normal("b", shape=3)), np.arange(N) % 6
    for group in range(7):
        pm.Normal(f"y{group}", mu[of == group], 1 + group, observed=draws(N)[of == group])


def nothing_but_missing_outcomes():
    pm.Normal("y", T.dot(draws(N, 3), pm.Normal("b", shape=3)), 1, observed=np.full(N, np.nan))


def columns_with_scales():
    y = draws(N, 2)
    y[::4, 0] = y[1::3, 1] = np.nan
    pm.Normal("y", T.dot(draws(N, 3), pm.Normal("b", shape=(3, 2))), pm.HalfNormal("s", shape=2), observed=y)


def as_many_missing_as_observed():
    y = np.exp(draws(70))
    y[::2] = np.nan
    pm.LogNormal("y", pm.Normal("b") * draws(70, seed=1), 1, observed=y)


@pytest.mark.filterwarnings("ignore::pymc.exceptions.ImputationWarning")
@pytest.mark.parametrize(
    "build",
    [
        numbers_of_one_value,
        groups_of_which_one_is_empty,
        nothing_but_missing_outcomes,
        columns_with_scales,
        as_many_missing_as_observed,
    ],
)
def test_models_with_masks(synchronize, build):
    synchronize(2)
    with pm.Model() as model:
        build()
    start = model.initial_point()
    n = sum(value.size for value in start.values())
    divided = check(model, [0.3 * draws(n, seed=seed) for seed in range(2)])
    if build is columns_with_scales:  # the gradients of the scales are sums, too, and one of the missing values
        assert sorted(one.n_bytes for one in divided.partition)[-2] < 100
    plain = model.compile_logp()(start)
    with parallel(model):
        np.testing.assert_allclose(model.compile_logp()(start), plain, rtol=1e-12)


def test_constants_as_long_as_the_selected_values_are_not_taken_for_them(synchronize):
    """As many groups as missing outcomes: the priors of the groups are not computed for all rows."""
    synchronize(2)
    y, means = draws(300), draws(70, seed=1)
    y[::3][:70] = np.nan
    with pm.Model() as model, pytest.warns(ImputationWarning):
        a = pm.Normal("a", means, 1, shape=70)
        pm.Normal("y", a[np.arange(300) % 70], pm.HalfNormal("s"), observed=y)
    divided = check(model, [0.3 * draws(141, seed=seed) for seed in range(2)])
    assert all(one.n_rows == 300 and means[0] not in one.source.data for one in divided.data)


def test_what_a_mask_selects_in_other_computations(synchronize):
    """Maxima, products, parts and pairs of what masks select, and selected values that are inserted elsewhere."""
    synchronize(2)
    mask = np.random.default_rng(3).random(N) < 0.3
    other = np.roll(mask, 1)
    weights = draws(int(mask.sum()), seed=1)
    with pm.Model() as model:
        b = pm.Normal("b", shape=4)
        z = pm.Normal("z", shape=N)
        mu = T.dot(draws(N, 4), b) + z
        some, rest, moved = mu[mask], mu[~mask], mu[other]
        pm.Potential("sums", -(weights * some**2).sum() - T.sqr(rest).sum() / 9)
        pm.Potential("others", -(some.max() ** 2) - T.dot(weights, some) ** 2 - some[:3].sum() ** 2)
        pm.Potential("pairs", -T.sqr(some - moved).sum() - T.sqr(some * b[0] + weights).prod() ** 0.1)
        pm.Potential("cumulated", -T.sqr(T.cumsum(some)).sum() / 99 - T.sqr(mu[mask][:, None] * b).sum())
        mu = T.set_subtensor(mu[mask], T.exp(some) * weights)
        mu = T.inc_subtensor(mu[other], moved)
        mu = T.inc_subtensor(mu[~mask], b[1])
        pm.Normal("y", mu, 1, observed=draws(N, seed=2))
    check(model, [0.1 * draws(N + 4, seed=seed) for seed in range(2)])


@pytest.mark.parametrize("share", [0, 0.1, 1])
def test_masks_of_the_program(synchronize, share):
    """Values that are set, or added, with the mask of all rows and of none, are chosen by rows."""
    synchronize(2)
    mask = np.random.default_rng(3).random(N) < share
    with pm.Model() as model:
        b = pm.Normal("b", shape=3)
        x, y = T.as_tensor_variable(draws(N)), T.as_tensor_variable(draws(int(mask.sum()), seed=1))
        mu = T.set_subtensor((b[0] * x)[mask], b[1] * y)
        mu = T.set_subtensor(mu[mask], 0.5 * mu[mask])
        mu = T.inc_subtensor(mu[mask], b[2], ignore_duplicates=True)
        mu = T.inc_subtensor(mu[mask], b[2])
        mu = T.set_subtensor(mu[~mask], 2.0)
        mu = T.set_subtensor(mu[mask & (np.arange(N) > 9)], b[2])
        pm.Normal("y", mu, 1, observed=draws(N, seed=2))
    check(model, [0.3 * draws(3, seed=seed) for seed in range(2)])


@pytest.mark.parametrize(("n_groups", "least", "most"), [(9, 5, 20), (9000, 1, 2)])
def test_blocks_are_larger_than_the_sums_of_many_groups(synchronize, monkeypatch, n_groups, least, most):
    """For each block, the gradients of all groups are set to zero and added."""
    synchronize(2)

    def limited(step, initial, n, values):
        n = theano.raise_op.Assert("the number of blocks")(n, T.ge(n, least), T.le(n, most))
        return accumulated(step, initial, n, values)

    accumulated = blocking.accumulated
    monkeypatch.setattr(blocking, "accumulated", limited)
    monkeypatch.setattr(blocking, "_BYTES", 45_000)
    with pm.Model() as model:
        effects = pm.Normal("effects", shape=n_groups)
        pm.Normal("y", effects[np.arange(18_000) % n_groups] + pm.Normal("b"), observed=draws(18_000))
    check(model, [0.3 * draws(n_groups + 1)])


def test_a_function_of_other_data_does_not_change_later_ones(synchronize):
    synchronize(2)
    x, m = draws(300, 90), draws(90)
    with pm.Model() as model:
        b = pm.Normal("b", mu=m, shape=90)
        pm.Deterministic("shift", T.exp(b - m))
        pm.Normal("y", T.dot(x, b), 1, observed=draws(300, seed=1))
    plain = model.compile_logp()
    point = {"b": 0.1 * m}
    with parallel(model):
        functions = [model.compile_logp()]
        shift = model.compile_fn(model.replace_rvs_by_values([model["shift"]]), inputs=model.value_vars)
        functions.append(model.compile_logp())
    np.testing.assert_allclose(shift(point)[0], np.exp(-0.9 * m))
    for one in functions:
        np.testing.assert_allclose(one(point), plain(point), rtol=1e-12)
        assert {each.n_rows for each in one.f.data} == {300}


def test_leaves_and_splits_of_the_program_are_kept(synchronize):
    synchronize(2)
    x = draws(N)
    with pm.Model() as model:
        b = pm.Normal("b", shape=4)
        joined = T.concatenate([b[:3], b[3:]])
        one, _ = T.split(T.fill(joined, b[0]), [1, 3], 2)
        pm.Potential("one", -one.sum())
        pm.Normal("y", b[0] * x, 1, observed=draws(N, seed=1))
    check(model, [np.arange(4.0)])
    low, high = T.split(T.exp(T.as_tensor_variable(x)) * b[0], [20, N - 20], 2)
    options = {"on_unused_input": "ignore"}
    with parallel(model):
        of_parts = pm.compile([b, low], low.sum() + high.sum(), **options)
    expected = (2 * np.exp(x[20:])).sum()
    assert np.isclose(of_parts(np.full(4, 2.0), np.zeros(20)), expected)


def test_an_assertion_of_the_program_comes_before_what_it_guards(synchronize):
    synchronize(2)
    groups = np.arange(N) % 5
    with pm.Model() as model:
        data = pm.Data("groups", groups)
        a = pm.Normal("a", shape=5)
        known = theano.raise_op.Assert("unknown group")(data, T.all(data < 5))
        pm.Normal("y", a[known], 1, observed=draws(N))
    with parallel(model):
        function = model.compile_logp()
        assert np.isfinite(function({"a": np.zeros(5)}))
        pm.set_data({"groups": groups + 1})
        with pytest.raises((AssertionError, synk.WorkerError), match="unknown group"):
            function({"a": np.zeros(5)})
