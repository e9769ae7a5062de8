"""Models of PyMC with each of its distributions as a likelihood of many rows, and how `parallel` divides them."""

import functools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt

N = 71  # rows: PyMC's constants count as data from 65 numbers on
_RNG = np.random.default_rng(0)
X, GROUP = _RNG.normal(size=(N, 2)), _RNG.integers(0, 3, N)

#: Ways in which the rows get their parameters.
WAYS = ("scalar", "vector", "indexed")

#: How a model is divided: each rank computes its rows, and ranks only combine sums; the log-probability is such a sum,
#: but other results, mostly rows of the gradient, are gathered; the log-probability needs all rows on every rank; PyMC
#: computes the model alone.
ROWS, GATHERED, FULL, PYMC = DIVISIONS = ("rows", "gathered", "full", "pymc")


class Case(NamedTuple):
    """A model, and how it is expected to be divided.

    Attributes
    ----------
    kind, name : str
        Together they identify the model. The name begins with the name of the distribution, except in the gallery.
    build : callable
        Builds the model in its context; ``build(way)`` if there are `ways`.
    division : str
        One of `DIVISIONS`.
    reason : str
        Why the model is not divided like others.
    ways : tuple of str
        Ways in which the rows get their parameters.
    is_product : bool
        Whether the likelihood is a product over rows.
    """

    kind: str
    name: str
    build: Callable
    division: str
    reason: str
    ways: tuple
    is_product: bool


CASES: list[Case] = []


def case(kind, name, division=ROWS, reason="", ways=(), is_product=None):
    """Enter the decorated function in the list of models; see `Case`.

    By default, the likelihood is taken for a product over rows if it is divided.
    """
    is_product = division in (ROWS, GATHERED) if is_product is None else is_product

    def enter(build):
        CASES.append(Case(kind, name, build, division, reason, tuple(ways), is_product))
        return build

    return enter


#: Functions from real numbers to the domain of a parameter, and a value in it, from which data are drawn.
DOMAINS = {
    "real": (lambda x: x, 0.3),
    "positive": (lambda x: pt.exp(x / 3), 1.2),
    "above 2": (lambda x: 2 + pt.exp(x / 3), 3.5),
    "unit": (lambda x: pt.sigmoid(x), 0.4),
}

#: Univariate distributions, with the domains of their free parameters, and fixed parameters. PolyaGamma is not among
#: them: its density has no gradient.
UNIVARIATE = {
    "AsymmetricLaplace": ({"kappa": "positive", "mu": "real", "b": "positive"}, {}),
    "Bernoulli": ({"p": "unit"}, {}),
    "Beta": ({"alpha": "positive", "beta": "positive"}, {}),
    "BetaBinomial": ({"alpha": "positive", "beta": "positive"}, {"n": 9}),
    "Binomial": ({"p": "unit"}, {"n": 9}),
    "Cauchy": ({"alpha": "real", "beta": "positive"}, {}),
    "ChiSquared": ({"nu": "positive"}, {}),
    "DiscreteUniform": ({}, {"lower": 0, "upper": 9}),
    "DiscreteWeibull": ({"q": "unit", "beta": "positive"}, {}),
    "ExGaussian": ({"mu": "real", "sigma": "positive", "nu": "positive"}, {}),
    "Exponential": ({"lam": "positive"}, {}),
    "Flat": ({}, {}),
    "Gamma": ({"alpha": "positive", "beta": "positive"}, {}),
    "Geometric": ({"p": "unit"}, {}),
    "Gumbel": ({"mu": "real", "beta": "positive"}, {}),
    "HalfCauchy": ({"beta": "positive"}, {}),
    "HalfFlat": ({}, {}),
    "HalfNormal": ({"sigma": "positive"}, {}),
    "HalfStudentT": ({"nu": "above 2", "sigma": "positive"}, {}),
    "HurdleGamma": ({"psi": "unit", "alpha": "positive", "beta": "positive"}, {}),
    "HurdleLogNormal": ({"psi": "unit", "mu": "real", "sigma": "positive"}, {}),
    "HurdleNegativeBinomial": ({"psi": "unit", "mu": "positive", "alpha": "positive"}, {}),
    "HurdlePoisson": ({"psi": "unit", "mu": "positive"}, {}),
    "HyperGeometric": ({}, {"N": 30, "k": 9, "n": 7}),
    "InverseGamma": ({"alpha": "above 2", "beta": "positive"}, {}),
    "Kumaraswamy": ({"a": "positive", "b": "positive"}, {}),
    "Laplace": ({"mu": "real", "b": "positive"}, {}),
    "LogNormal": ({"mu": "real", "sigma": "positive"}, {}),
    "Logistic": ({"mu": "real", "s": "positive"}, {}),
    "LogitNormal": ({"mu": "real", "sigma": "positive"}, {}),
    "Moyal": ({"mu": "real", "sigma": "positive"}, {}),
    "NegativeBinomial": ({"mu": "positive", "alpha": "positive"}, {}),
    "Normal": ({"mu": "real", "sigma": "positive"}, {}),
    "Pareto": ({"alpha": "positive"}, {"m": 0.1}),
    "Poisson": ({"mu": "positive"}, {}),
    "Rice": ({"nu": "positive", "sigma": "positive"}, {}),
    "SkewNormal": ({"mu": "real", "sigma": "positive", "alpha": "real"}, {}),
    "SkewStudentT": ({"a": "positive", "b": "positive", "mu": "real", "sigma": "positive"}, {}),
    "StudentT": ({"nu": "above 2", "mu": "real", "sigma": "positive"}, {}),
    "Triangular": ({"c": "unit"}, {"lower": -0.1, "upper": 1.1}),
    "TruncatedNormal": ({"mu": "real", "sigma": "positive"}, {"lower": -1.0, "upper": 2.0}),
    "Uniform": ({}, {"lower": -1.0, "upper": 2.0}),
    "VonMises": ({"mu": "real", "kappa": "positive"}, {}),
    "Wald": ({"mu": "positive", "lam": "positive"}, {}),
    "Weibull": ({"alpha": "positive", "beta": "positive"}, {}),
    "ZeroInflatedBinomial": ({"psi": "unit", "p": "unit"}, {"n": 9}),
    "ZeroInflatedNegativeBinomial": ({"psi": "unit", "mu": "positive", "alpha": "positive"}, {}),
    "ZeroInflatedPoisson": ({"psi": "unit", "mu": "positive"}, {}),
}
#: Data for distributions of which nothing can be drawn, or not without another package.
_DATA = {"Flat": _RNG.normal(size=N), "HalfFlat": _RNG.gamma(2, size=N)}


def draws(*shape, seed=0):
    """Draw standard normal numbers."""
    return np.random.default_rng(seed).normal(size=shape)


def parameter(name, domain, way, *width):
    """Return a free parameter of all rows: a number, or a vector of a width."""
    into, _ = DOMAINS[domain]
    if way == "scalar":
        return into(pm.Normal(name, shape=width))
    return into(
        pt.dot(X, pm.Normal(name, shape=(2, *width))) if way == "vector" else pm.Normal(name, shape=(3, *width))[GROUP]
    )


def weights_of(n):
    """Return weights of components."""
    return pm.Dirichlet("weights", np.ones(n))


def drawn(distribution, **fixed):
    """Draw a value for each row."""
    return np.asarray(pm.draw(distribution.dist(**fixed), draws=N, random_seed=1))


def univariate(name, way):
    """Build a model with a univariate likelihood."""
    free, fixed = UNIVARIATE[name]
    distribution = getattr(pm, name)
    values = {one: DOMAINS[domain][1] for one, domain in free.items()}
    data = _DATA[name] if name in _DATA else drawn(distribution, **values, **fixed)
    parameters = {one: parameter(f"{one}_", domain, way) for one, domain in free.items()}
    pm.Normal("other")  # so that each model has a parameter
    distribution("y", **parameters, **fixed, observed=data)


def modified(kind, name, way):
    """Build a model whose likelihood is a censored, truncated or mixed distribution."""
    free, fixed = UNIVARIATE[name]
    values = {one: DOMAINS[domain][1] for one, domain in free.items()}
    data = drawn(getattr(pm, name), **values, **fixed)
    of = getattr(pm, name).dist
    parameters = {one: parameter(f"{one}_", domain, way) for one, domain in free.items()}
    lower, upper = np.quantile(data, 0.1), np.quantile(data, 0.9)
    if kind == "Censored":
        pm.Censored("y", of(**parameters, **fixed), lower=lower, upper=upper, observed=np.clip(data, lower, upper))
    elif kind == "Truncated":
        inside = np.where((data < lower) | (data > upper), np.median(data), data).astype(data.dtype)
        pm.Truncated("y", of(**parameters, **fixed), lower=lower, upper=upper, observed=inside)
    elif kind == "Mixture":
        other = {one: parameter(f"{one}_2", domain, "scalar") for one, domain in free.items()}
        pm.Mixture("y", weights_of(2), [of(**parameters, **fixed), of(**other, **fixed)], observed=data)
    elif kind == "CustomDist":

        def dist(*given):
            *values, size = given
            return of(**dict(zip(parameters, values)), **fixed, size=size)

        pm.CustomDist("y", *parameters.values(), dist=dist, observed=data, shape=len(data))
    else:
        pm.Potential("y", pm.logp(of(**parameters, **fixed), data).sum())


#: Distributions whose distribution function PyMC does not have.
WITHOUT_CDF = ("AsymmetricLaplace", "HalfStudentT", "Rice", "SkewNormal", "VonMises")
#: Modifications of univariate distributions; those that are tested with parameters in all ways.
MODIFIED = {
    "Censored": ("Normal", "Weibull", "Gamma", "Poisson"),
    "Truncated": ("Normal", "Gumbel", "Exponential", "Poisson"),
    "Mixture": ("Normal", "Poisson", "Gamma", "StudentT", "Binomial"),
    "CustomDist": ("Normal", "Poisson", "Gamma"),
    "Potential": ("Normal", "Bernoulli", "StudentT"),
}

for _name, (_free, _) in UNIVARIATE.items():
    _division = (ROWS,) if _free else (PYMC, "the likelihood has no parameters: PyMC computes it when it compiles")
    case("univariate", _name, *_division, ways=WAYS, is_product=True)(functools.partial(univariate, _name))
for _kind, _names in MODIFIED.items():
    for _name in _names:
        case("modified", f"{_kind} {_name}", ways=WAYS)(functools.partial(modified, _kind, _name))
    for _name in [name for name, (free, _) in UNIVARIATE.items() if free and name not in _names]:
        if _kind not in ("Censored", "Truncated") or _name not in WITHOUT_CDF:
            _way = WAYS[zlib.crc32(f"{_kind} {_name}".encode()) % len(WAYS)]
            case("further modified", f"{_kind} {_name}", ways=[_way])(functools.partial(modified, _kind, _name))


# -- likelihoods of vectors, one for each row

many = functools.partial(case, "multivariate", ways=WAYS)
SIMPLEX = np.random.default_rng(1).dirichlet([2.0, 3.0, 1.5, 1.0], N)
CHOSEN = np.random.default_rng(2).multinomial(9, [0.2, 0.3, 0.1, 0.4], N)
COV = np.array([[1.0, 0.3, 0.0], [0.3, 1.0, 0.2], [0.0, 0.2, 1.5]])


def root():
    """Return an unknown factor of a covariance matrix of three variables."""
    return pm.LKJCholeskyCov("root", n=3, eta=2.0, sd_dist=pm.Exponential.dist(1.0, shape=3))[0]


def covariance():
    """Return a covariance matrix with an unknown scale."""
    return pm.math.exp(pm.Normal("scale")) * COV


@many("MvNormal chol")
def _(way):
    pm.MvNormal("y", parameter("mu", "real", way, 3), chol=root(), observed=draws(N, 3))


@many("MvNormal cov")
def _(way):
    pm.MvNormal("y", parameter("mu", "real", way, 3), cov=covariance(), observed=draws(N, 3))


@many("MvNormal tau")
def _(way):
    pm.MvNormal("y", parameter("mu", "real", way, 3), tau=covariance(), observed=draws(N, 3))


@case("multivariate", "MvNormal with a matrix for each row")
def _():
    scales = parameter("scales", "positive", "vector")
    pm.MvNormal("y", pm.Normal("mu", shape=3), cov=scales[:, None, None] * COV, observed=draws(N, 3))


@many("MvStudentT chol")
def _(way):
    nu = 2 + pm.Exponential("nu", 0.1)
    pm.MvStudentT("y", nu=nu, mu=parameter("mu", "real", way, 3), chol=root(), observed=draws(N, 3))


@many("MvStudentT scale")
def _(way):
    pm.MvStudentT("y", nu=5, mu=parameter("mu", "real", way, 3), scale=covariance(), observed=draws(N, 3))


@many("Dirichlet")
def _(way):
    pm.Dirichlet("y", parameter("a", "positive", way, 4), observed=SIMPLEX)


@many("Multinomial")
def _(way):
    p = pm.math.softmax(parameter("p", "real", way, 4), axis=-1)
    pm.Multinomial("y", n=9, p=p, observed=CHOSEN)


@many("DirichletMultinomial")
def _(way):
    pm.DirichletMultinomial("y", n=9, a=parameter("a", "positive", way, 4), observed=CHOSEN)


@many("StickBreakingWeights")
def _(way):
    pm.StickBreakingWeights("y", alpha=parameter("alpha", "positive", way), K=3, observed=SIMPLEX)


@many("ZeroSumNormal")
def _(way):
    values = draws(N, 4)
    sigma = parameter("sigma", "positive", way)
    sigma = sigma if way == "scalar" else sigma[:, None]
    pm.ZeroSumNormal("y", sigma, observed=values - values.mean(axis=1, keepdims=True), shape=(N, 4))


@many("Categorical p")
def _(way):
    pm.Categorical("y", p=pm.math.softmax(parameter("p", "real", way, 4), axis=-1), observed=CHOSEN.argmax(axis=1))


@many("Categorical logit_p")
def _(way):
    pm.Categorical("y", logit_p=parameter("p", "real", way, 4), observed=CHOSEN.argmax(axis=1))


def cutpoints(n):
    """Return unknown increasing numbers."""
    return pm.Normal("cuts", 0, 2, shape=n, transform=pm.distributions.transforms.ordered, initval=np.arange(n) - 1.0)


def ordered(kind, compute_p, way):
    """Build a model of ordered categories."""
    eta = parameter("eta", "real", way)
    kind("y", eta=eta, cutpoints=cutpoints(3), observed=CHOSEN.argmax(axis=1), compute_p=compute_p)


for _name in ("OrderedLogistic", "OrderedProbit"):
    many(_name)(functools.partial(ordered, getattr(pm, _name), False))
    many(f"{_name} with probabilities")(functools.partial(ordered, getattr(pm, _name), True))


@many("OrderedMultinomial")
def _(way):
    eta = parameter("eta", "real", way)
    pm.OrderedMultinomial("y", eta=eta, cutpoints=cutpoints(3), n=9, observed=CHOSEN, compute_p=False)


@many("NormalMixture")
def _(way):
    mu, sigma = parameter("mu", "real", way, 3), parameter("sigma", "positive", "scalar", 3)
    pm.NormalMixture("y", weights_of(3), mu, sigma, observed=draws(N))


@case("multivariate", "KroneckerNormal", FULL, "one vector of all rows, whose covariance matrix is factorized")
def _():
    rows, columns = (np.exp(-((np.arange(n)[:, None] - np.arange(n)) ** 2)) for n in (9, 8))
    covs = [pm.HalfNormal("scale") * rows + np.eye(9), columns + np.eye(8)]
    pm.KroneckerNormal("y", mu=pm.Normal("mu") * np.ones(72), covs=covs, sigma=0.5, observed=draws(72))


@case("multivariate", "MatrixNormal", FULL, "the covariance matrix of the rows is factorized")
def _():
    rows = pm.math.exp(pm.Normal("scale")) * np.eye(N)
    pm.MatrixNormal("y", mu=np.zeros((N, 3)), rowcov=rows, colchol=root(), observed=draws(N, 3))


def ring(n):
    """Return the adjacency matrix of areas that have two neighbors each."""
    return np.roll(np.eye(n), 1, axis=0) + np.roll(np.eye(n), -1, axis=0)


@case("multivariate", "CAR of one vector", FULL, "each area depends on its neighbors, which are other rows")
def _():
    tau = pm.HalfNormal("tau")
    pm.CAR("y", mu=pt.dot(X, pm.Normal("b", shape=2)), W=ring(N), alpha=0.7, tau=tau, observed=draws(N))


@many("CAR of many vectors")
def _(way):
    mu, tau = parameter("mu", "real", way, 5), pm.HalfNormal("tau")
    pm.CAR("y", mu=mu, W=ring(5), alpha=0.7, tau=tau, observed=draws(N, 5))


@case("multivariate", "ICAR", PYMC, "PyMC computes the differences of neighbors when it compiles")
def _():
    pm.ICAR("y", W=ring(N).astype(int), sigma=pm.HalfNormal("sigma"), observed=draws(N))


@case("multivariate", "ICAR that is latent", GATHERED, "the gradient for the areas is gathered")
def _():
    areas = pm.ICAR("areas", W=ring(N).astype(int), sigma=pm.HalfNormal("sigma"))
    pm.Normal("y", areas, 1, observed=draws(N))


@case("multivariate", "LKJCorr", PYMC, "one matrix has no rows")
def _():
    pm.LKJCorr("y", n=3, eta=pm.HalfNormal("eta") + 1, observed=np.eye(3))


@case("multivariate", "Wishart", PYMC, "one matrix has no rows")
def _():
    pm.Wishart("y", nu=pm.HalfNormal("nu") + 5, V=np.eye(3), observed=np.eye(3) + 0.1)


# -- sequences: many, each of which is a row, or one whose steps are the rows

STEPS = "one sequence, whose steps are the rows"
PATHS = draws(N, 8).cumsum(axis=1) / 3
PATH = draws(N).cumsum() / 3
STEPS_OF_VECTORS = draws(N, 8, 3).cumsum(axis=1) / 3
START = {"init_dist": pm.Normal.dist(0, 1)}


def time_series(name, *division):
    """Enter a model of many sequences, one of one sequence, and one of a latent sequence.

    The decorated function makes them, for a name and ``observed`` or ``shape``.
    """

    def enter(build):
        def latent():
            pm.Normal("seen", build("y", shape=N), 0.5, observed=PATH)

        of_one, of_many = (functools.partial(build, "y", observed=data) for data in (PATH, PATHS))
        case("time series", f"{name} of many sequences")(of_many)
        case("time series", f"{name} of one sequence", *division)(of_one)
        case("time series", f"{name} that is latent", GATHERED, "the gradient for the steps is gathered")(latent)
        return build

    return enter


@time_series("GaussianRandomWalk")
def _(name, **data):
    return pm.GaussianRandomWalk(name, pm.Normal("drift"), sigma=pm.HalfNormal("sigma"), **START, **data)


@time_series("RandomWalk")
def _(name, **data):
    innovations = pm.StudentT.dist(nu=5, sigma=pm.HalfNormal("sigma"))
    return pm.distributions.timeseries.RandomWalk(name, innovation_dist=innovations, **START, **data)


@time_series("AR")
def _(name, **data):
    return pm.AR(name, pm.Normal("rho", 0, 0.3, shape=2), sigma=pm.HalfNormal("sigma"), **START, **data)


@time_series("GARCH11", FULL, STEPS)
def _(name, **data):
    alpha, beta, omega = pm.Beta("alpha", 2, 4), pm.Beta("beta", 2, 4), pm.HalfNormal("omega")
    return pm.GARCH11(name, omega=omega, alpha_1=alpha, beta_1=beta, initial_vol=1.0, **data)


@time_series("EulerMaruyama")
def _(name, **data):
    change = lambda x, rate, noise: (-rate * x, noise)  # noqa: E731
    parameters = [pm.HalfNormal("rate"), pm.HalfNormal("noise")]
    return pm.EulerMaruyama(name, dt=0.1, sde_fn=change, sde_pars=parameters, **START, **data)


def walk_of_vectors(kind, data, **more):
    """Build a random walk of vectors."""
    start = pm.MvNormal.dist(np.zeros(3), chol=np.eye(3))
    getattr(pm, kind)("y", mu=pm.Normal("drift", shape=3), chol=root(), init_dist=start, observed=data, **more)


for _name, _more in (("MvGaussianRandomWalk", {}), ("MvStudentTRandomWalk", {"nu": 5})):
    case("time series", f"{_name} of many sequences")(
        functools.partial(walk_of_vectors, _name, STEPS_OF_VECTORS, **_more)
    )
    case("time series", f"{_name} of one sequence")(
        functools.partial(walk_of_vectors, _name, draws(N, 3).cumsum(axis=0) / 3, **_more)
    )


# -- Gaussian processes

PAIRS = "the covariance matrix of all pairs of rows is factorized"
TIMES = np.linspace(0, 5, N)[:, None]
CURVE = np.sin(2 * TIMES[:, 0]) + 0.2 * draws(N)


def smooth():
    """Return a covariance function."""
    return pm.HalfNormal("height") ** 2 * pm.gp.cov.Matern52(1, pm.Gamma("length", 3, 3))


@case("Gaussian process", "Marginal", FULL, PAIRS)
def _():
    process = pm.gp.Marginal(cov_func=smooth())
    process.marginal_likelihood("y", X=TIMES, y=CURVE, sigma=pm.HalfNormal("s"))


@case("Gaussian process", "Latent", FULL, PAIRS)
def _():
    pm.Normal("y", pm.gp.Latent(cov_func=smooth()).prior("f", X=TIMES), pm.HalfNormal("s"), observed=CURVE)


@case("Gaussian process", "Latent of few times")
def _():
    at = np.arange(N) % 6
    curve = pm.gp.Latent(cov_func=smooth()).prior("f", X=np.arange(6.0)[:, None])
    pm.Normal("y", curve[at], pm.HalfNormal("s"), observed=draws(N))


@case("Gaussian process", "TP", FULL, PAIRS)
def _():
    process = pm.gp.TP(scale_func=smooth(), nu=5)
    pm.Normal("y", process.prior("f", X=TIMES), pm.HalfNormal("s"), observed=CURVE)


@case("Gaussian process", "HSGP")
def _():
    process = pm.gp.HSGP(m=[8], c=1.5, cov_func=smooth())
    pm.Normal("y", process.prior("f", X=TIMES), pm.HalfNormal("s"), observed=CURVE)


@case("Gaussian process", "HSGPPeriodic")
def _():
    process = pm.gp.HSGPPeriodic(m=8, scale=1.0, cov_func=pm.gp.cov.Periodic(1, period=2, ls=pm.Gamma("length", 3, 3)))
    pm.Normal("y", process.prior("f", X=TIMES), pm.HalfNormal("s"), observed=CURVE)


def sparse(approx):
    """Build a Gaussian process that depends on its values at few points."""
    process = pm.gp.MarginalApprox(cov_func=smooth(), approx=approx)
    points = np.linspace(0, 5, 6)[:, None]
    process.marginal_likelihood("y", X=TIMES, Xu=points, y=CURVE, sigma=0.1 + pm.HalfNormal("s"))


for _name in ("VFE", "FITC", "DTC"):
    case("Gaussian process", f"MarginalApprox {_name}")(functools.partial(sparse, _name))


@case("Gaussian process", "MarginalKron", PYMC, "the rows are the pairs of two arrays, of which none has all rows")
def _():
    other = pm.gp.cov.ExpQuad(1, pm.Gamma("length2", 3, 3))
    process = pm.gp.MarginalKron(cov_funcs=[smooth(), other])
    Xs = [np.linspace(0, 3, 9)[:, None], np.linspace(0, 2, 8)[:, None]]
    process.marginal_likelihood("y", Xs=Xs, y=draws(72), sigma=0.1 + pm.HalfNormal("s"))


#: Names that PyMC exports and that are not the likelihood of a model here.
EXCEPTIONS = {
    **dict.fromkeys(("Distribution", "Continuous", "Discrete", "SymbolicRandomVariable"), "base classes"),
    "DensityDist": "an alias of CustomDist",
    "DiracDelta": "has no density with a gradient",
    "Interpolated": "a spline of fixed points, without parameters",
    "LKJCholeskyCov": "a prior of one matrix",
    "Lognormal": "an alias of LogNormal",
    "PolyaGamma": "its density has no gradient",
    "Simulator": "its density is a random simulation",
    "WishartBartlett": "a function that makes a prior of one matrix",
}
