"""Models of PyMC with each of its distributions as a likelihood of many rows."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt

N = 71  # rows: PyMC's constants count as data from 65 numbers on
_RNG = np.random.default_rng(0)
X, GROUP = _RNG.normal(size=(N, 2)), _RNG.integers(0, 3, N)

#: Ways in which the rows get their parameters.
WAYS = ("scalar", "vector", "indexed")

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


def parameter(name, domain, way):
    """Return a free parameter of all rows."""
    into, _ = DOMAINS[domain]
    if way == "scalar":
        return into(pm.Normal(name))
    return into(pt.dot(X, pm.Normal(name, shape=2)) if way == "vector" else pm.Normal(name, shape=3)[GROUP])


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
        weights = pm.Dirichlet("weights", np.ones(2))
        pm.Mixture("y", weights, [of(**parameters, **fixed), of(**other, **fixed)], observed=data)
    elif kind == "CustomDist":

        def dist(*given):
            *values, size = given
            return of(**dict(zip(parameters, values)), **fixed, size=size)

        pm.CustomDist("y", *parameters.values(), dist=dist, observed=data, shape=len(data))
    else:
        pm.Potential("y", pm.logp(of(**parameters, **fixed), data).sum())


MODIFIED = [
    *(("Censored", name) for name in ("Normal", "Weibull", "Gamma", "Poisson")),
    *(("Truncated", name) for name in ("Normal", "Gumbel", "Exponential", "Poisson")),
    *(("Mixture", name) for name in ("Normal", "Poisson", "Gamma", "StudentT", "Binomial")),
    *(("CustomDist", name) for name in ("Normal", "Poisson", "Gamma")),
    *(("Potential", name) for name in ("Normal", "Bernoulli", "StudentT")),
]
