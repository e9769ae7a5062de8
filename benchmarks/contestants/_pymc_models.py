"""PyMC models of different kinds, on generated data. They are those of most users: regressions and a mixture."""

import numpy as np
import pymc as pm


def hierarchical(rows, rng):
    """Linear regression with 20 covariates, and a level for each of 8 groups."""
    x, group = rng.normal(size=(rows, 20)), rng.integers(0, 8, rows)
    y = x @ np.linspace(-1, 1, 20) + rng.normal(size=8)[group] + rng.normal(size=rows)
    level = pm.Normal("level", pm.Normal("mean"), pm.HalfNormal("spread"), shape=8)
    pm.Normal("y", level[group] + x @ pm.Normal("slope", shape=20), pm.HalfNormal("noise"), observed=y)


def crossed(rows, rng):
    """Logistic regression with 5 covariates, and levels for 50 groups of one kind and 20 of another."""
    x, g, h = rng.normal(size=(rows, 5)), rng.integers(0, 50, rows), rng.integers(0, 20, rows)
    eta = x @ np.linspace(-0.5, 0.5, 5) + rng.normal(size=50)[g] + rng.normal(size=20)[h]
    u = pm.Normal("u", 0, pm.HalfNormal("spread_u"), shape=50)
    v = pm.Normal("v", 0, pm.HalfNormal("spread_v"), shape=20)
    y = (rng.random(rows) < 1 / (1 + np.exp(-eta))).astype(int)
    pm.Bernoulli("y", logit_p=pm.Normal("a") + x @ pm.Normal("b", shape=5) + u[g] + v[h], observed=y)


def negative_binomial(rows, rng):
    """Regression of counts with 20 covariates."""
    x = rng.normal(size=(rows, 20))
    mean = np.exp(1 + x @ np.linspace(-0.2, 0.2, 20))
    mu = pm.math.exp(pm.Normal("a") + x @ pm.Normal("b", shape=20))
    pm.NegativeBinomial("y", mu=mu, alpha=pm.HalfNormal("alpha"), observed=rng.negative_binomial(5, 5 / (5 + mean)))


def ordered(rows, rng):
    """Ordered logistic regression with 5 covariates, and 5 categories."""
    x = rng.normal(size=(rows, 5))
    y = np.digitize(x @ np.linspace(-0.5, 0.5, 5) + rng.logistic(size=rows), [-1, 0, 1, 2])
    order = pm.distributions.transforms.ordered
    cutpoints = pm.Normal("cutpoints", 0, 2, shape=4, transform=order, initval=[-1, 0, 1, 2])
    eta = x @ pm.Normal("b", shape=5)
    pm.OrderedLogistic("y", eta=eta, cutpoints=cutpoints, compute_p=False, observed=y)


def mixture(rows, rng):
    """Mixture of three normal distributions."""
    y = np.where(rng.random(rows) < 0.3, rng.normal(-2, 1, rows), rng.normal(2, 0.5, rows))
    mu = pm.Normal("mu", 0, 3, shape=3, initval=[-2.0, 0.0, 2.0])
    pm.NormalMixture("y", pm.Dirichlet("weights", np.ones(3)), mu, pm.HalfNormal("sigma", shape=3), observed=y)


def build(name, rows):
    """Return the model with a name."""
    with pm.Model() as model:
        globals()[name](rows, np.random.default_rng(0))
    return model
