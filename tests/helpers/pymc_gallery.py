"""Well-known models, such as those of PyMC's example gallery, in our own words and with simulated data."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc_models import FULL, GATHERED, PAIRS, N, case, draws, ring, weights_of

LOGISTIC = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
X = draws(N, 3, seed=10)
LINE = X @ [1.0, -0.5, 0.2] + 0.3  # of regressions whose data are simulated
GROUPS = np.arange(N) * 5 % 7
COUNTS = np.random.default_rng(3).poisson(np.exp(LINE / 2))
PANEL = draws(N, 6, seed=14).cumsum(axis=1)
TIMES = np.linspace(0, 5, N)

OWN_PARAMETERS = "the gradient for the rows' own parameters is gathered"
STEPS = "a step uses the values of the step before, and the steps are the rows"
ALONG = "the gradient goes from step to step, and the steps are the rows"


def model(*division, **options):
    """Enter a model in the gallery, by the name of its function, with arguments of `case`."""
    return lambda build: case("gallery", build.__name__.replace("_", " "), *division, **options)(build)


def linear(x=X, name="b"):
    """Return an intercept, plus the product of covariates and coefficients."""
    return pm.Normal(f"{name}0") + pt.dot(x, pm.Normal(name, shape=x.shape[1]))


def centered(name, n):
    """Return effects of groups with an unknown spread, as multiples of standard normal variables."""
    return pm.HalfNormal(f"{name}_spread") * pm.Normal(f"{name}_raw", shape=n)


# -- regressions


@model()
def logistic_regression():
    pm.Bernoulli("y", logit_p=linear(), observed=LINE > 0.2)


@model()
def probit_regression():
    pm.Bernoulli("y", p=pm.math.invprobit(linear()), observed=LINE + draws(N) > 0)


@model()
def poisson_regression_with_exposure():
    exposure = np.random.default_rng(4).uniform(1, 3, N)
    pm.Poisson("y", exposure * pt.exp(linear()), observed=COUNTS)


@model()
def negative_binomial_regression():
    pm.NegativeBinomial("y", mu=pt.exp(linear()), alpha=pm.Exponential("alpha", 1.0), observed=COUNTS)


@model()
def beta_regression():
    mean, precision = pm.math.sigmoid(linear()), pm.HalfNormal("precision", 10)
    pm.Beta("y", mean * precision, (1 - mean) * precision, observed=LOGISTIC(LINE + 0.3 * draws(N)))


@model()
def gamma_regression():
    shape = pm.HalfNormal("shape", 3)
    pm.Gamma("y", alpha=shape, beta=shape / pt.exp(linear()), observed=np.exp(LINE + 0.3 * draws(N)))


@model()
def robust_regression():
    y = LINE + 0.2 * draws(N)
    y[::13] += 5
    pm.StudentT("y", nu=pm.Gamma("nu", 2, 0.1) + 1, mu=linear(), sigma=pm.HalfNormal("s"), observed=y)


@model()
def regression_with_interactions():
    x = np.column_stack([X, X[:, :1] * X[:, 1:], X[:, 1] * X[:, 2], X**2])
    pm.Normal("y", linear(x), pm.HalfNormal("s"), observed=LINE + X[:, 0] * X[:, 1] + draws(N))


@model()
def heteroscedastic_regression():
    pm.Normal("y", linear(), pt.exp(linear(name="log_s")), observed=LINE + draws(N) * np.exp(X[:, 0] / 2))


@model()
def quantile_regression():
    pm.AsymmetricLaplace("y", mu=linear(), b=pm.HalfNormal("b_"), q=0.9, observed=LINE + draws(N))


@model()
def ordered_regression():
    cuts = pm.Normal("cuts", 0, 2, shape=3, transform=pm.distributions.transforms.ordered, initval=[-1, 0, 1])
    eta = pt.dot(X, pm.Normal("b", shape=3))
    pm.OrderedLogistic("y", eta=eta, cutpoints=cuts, observed=np.digitize(LINE + draws(N), [-1, 0, 1]))


@model()
def multinomial_logit():
    logits = pt.dot(X, pm.Normal("b", shape=(3, 3)))
    p = pm.math.softmax(pt.concatenate([pt.zeros((N, 1)), logits], axis=1), axis=1)
    pm.Categorical("y", p=p, observed=np.arange(N) * 7 % 4)


@model()
def discrete_choice():
    """Prices of four products differ for each choice; products have utilities of their own."""
    prices = np.random.default_rng(5).gamma(4, 0.3, size=(N, 4))
    utility = pm.ZeroSumNormal("utility", shape=4) - pm.HalfNormal("sensitivity") * prices
    pm.Categorical("y", logit_p=utility, observed=(prices + draws(N, 4)).argmin(axis=1))


@model()
def lasso():
    b = pm.Laplace("b", 0, pm.HalfCauchy("scale", 1), shape=9)
    pm.Normal("y", pt.dot(draws(N, 9), b), pm.HalfNormal("s"), observed=LINE)


@model()
def horseshoe():
    local, slab = pm.HalfCauchy("local", 1, shape=9), pm.InverseGamma("slab", 2, 2)
    overall = pm.HalfCauchy("overall", 0.1)
    scale = overall * local * pt.sqrt(slab / (slab + overall**2 * local**2))
    pm.Normal("y", pt.dot(draws(N, 9), pm.Normal("b", shape=9) * scale), pm.HalfNormal("s"), observed=LINE)


@model()
def spline_regression():
    knots = np.linspace(0, 5, 8)
    basis = np.maximum(TIMES[:, None] - knots, 0) ** 3 / 30
    pm.Normal("y", linear(basis), pm.HalfNormal("s"), observed=np.sin(2 * TIMES) + 0.2 * draws(N))


@model()
def circular_regression():
    mean = 2 * pt.arctan(linear())
    pm.VonMises("y", mu=mean, kappa=pm.HalfNormal("kappa", 3), observed=2 * np.arctan(LINE))


@model()
def dose_response():
    dose, top, half = np.linspace(0, 8, N), pm.HalfNormal("top", 2), pm.LogNormal("half")
    power = pm.LogNormal("power", 0, 0.3)
    mean = top * (dose + 1e-3) ** power / (half**power + (dose + 1e-3) ** power)
    pm.Normal("y", mean, pm.HalfNormal("s"), observed=dose / (1 + dose) + 0.1 * draws(N))


@model()
def compositional_regression():
    rates = pt.exp(pt.dot(X, pm.Normal("b", 0, 0.3, shape=(3, 4))))
    pm.Dirichlet("y", rates, observed=np.random.default_rng(6).dirichlet([2, 1, 3, 2], N))


# -- few groups, and rows in groups


@model(GATHERED, "each school has an effect of its own, whose gradient is gathered")
def eight_schools():
    effects = np.array([20.0, 7.0, -4.0, 6.0, -2.0, 3.0, 15.0, 10.0])
    errors = np.array([14.0, 9.0, 16.0, 12.0, 9.0, 11.0, 10.0, 17.0])
    pm.Normal("y", pm.Normal("mean", 0, 5) + centered("school", 8), errors, observed=effects)


@model()
def varying_intercepts_and_slopes():
    floor, county_level = (X[:, 0] > 0).astype(float), draws(7)
    intercepts = linear(county_level[:, None], "county") + centered("intercept", 7)
    slopes = pm.Normal("slope") + centered("slopes", 7)
    pm.Normal("y", intercepts[GROUPS] + slopes[GROUPS] * floor, pm.HalfNormal("s"), observed=LINE)


@model()
def correlated_intercepts_and_slopes():
    root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0, shape=2))
    effects = pm.Normal("mean", shape=2) + pt.dot(pm.Normal("raw", shape=(7, 2)), root.T)
    mean = effects[GROUPS, 0] + effects[GROUPS, 1] * X[:, 0]
    pm.Normal("y", mean, pm.HalfNormal("s"), observed=LINE + draws(N))


@model()
def goals_of_clubs():
    """Clubs attack and defend; the home club has an advantage."""
    home, away = np.arange(N) % 6, (np.arange(N) + 1 + np.arange(N) // 6 % 5) % 6
    attack, defense = pm.ZeroSumNormal("attack", shape=6), pm.ZeroSumNormal("defense", shape=6)
    base, advantage = pm.Normal("base"), pm.Normal("advantage")
    pm.Poisson("at_home", pt.exp(base + advantage + attack[home] - defense[away]), observed=COUNTS)
    pm.Poisson("outside", pt.exp(base + attack[away] - defense[home]), observed=COUNTS[::-1].copy())


@model()
def golf_putting():
    """A ball falls into the hole if its angle is small enough for the distance, and its speed is right."""
    distance = np.linspace(2, 20, N)
    angle = pt.exp(pm.Normal("log_angle", -3.5, 0.3)) + np.zeros(N)
    in_angle = 2 * pm.math.invprobit(pt.arcsin((4.25 - 1.68) / 24 / distance) / angle) - 1
    speed = pm.HalfNormal("speed")
    in_speed = pm.math.invprobit(2 / (speed * (distance + 1))) - pm.math.invprobit(-1 / (speed * (distance + 1)))
    pm.Binomial("y", n=80, p=in_angle * in_speed, observed=np.linspace(75, 10, N).astype(int))


@model(GATHERED, OWN_PARAMETERS)
def rates_of_tumors():
    """Each group of animals has its own rate, from one beta distribution."""
    mean, size = pm.Uniform("mean"), pm.Pareto("size", 1.5, 1)
    rates = pm.Beta("rates", mean * size, (1 - mean) * size, shape=N)
    pm.Binomial("y", n=20, p=rates, observed=np.arange(N) * 3 % 7)


@model()
def two_groups_with_t_distributions():
    group = np.arange(N) % 2
    mean, spread = pm.Normal("mean", 0, 2, shape=2), pm.Uniform("spread", 0.1, 5, shape=2)
    nu = pm.Exponential("nu", 1 / 29) + 1
    pm.StudentT("y", nu=nu, mu=mean[group], sigma=spread[group], observed=group + draws(N))


@model()
def conversions_of_two_variants():
    rng, p = np.random.default_rng(7), pm.Beta("p", 2, 20, shape=2)
    visits = rng.integers(50, 90, size=(N, 2))  # per day
    pm.Binomial("y", n=visits, p=p, observed=rng.binomial(visits, [0.1, 0.13]))


@model()
def difference_in_differences():
    treated, after = np.arange(N) % 2, (np.arange(N) > 40).astype(float)
    groups, trend, effect = pm.Normal("groups", shape=2), pm.Normal("trend"), pm.Normal("effect")
    mean = groups[treated] + trend * after + effect * treated * after
    pm.Normal("y", mean, pm.HalfNormal("s"), observed=treated * after + draws(N))


@model()
def mediation():
    x = X[:, 0]
    mediator = 0.5 * x + draws(N)
    to, along, direct = pm.Normal("to"), pm.Normal("along"), pm.Normal("direct")
    pm.Normal("mediator", pm.Normal("m0") + to * x, pm.HalfNormal("sm"), observed=mediator)
    mean = pm.Normal("y0") + along * mediator + direct * x
    pm.Normal("y", mean, pm.HalfNormal("sy"), observed=LINE + mediator)
    pm.Deterministic("indirect", to * along)


@model()
def reaction_times():
    person = GROUPS
    mean, tail = pm.Normal("mean", 0.5, 0.1) + 0.1 * centered("person", 7), pm.HalfNormal("tail", 0.2)
    y = 0.5 + 0.05 * draws(N) + np.random.default_rng(8).exponential(0.1, N)
    pm.ExGaussian("y", mu=mean[person], sigma=pm.HalfNormal("s", 0.1) + 0.02, nu=tail + 0.02, observed=y)


@model()
def paired_comparisons():
    """Players have abilities; the odds of the first player grow with the difference (Bradley and Terry)."""
    first, second = np.arange(N) % 8, (np.arange(N) * 3 + 1) % 8
    ability = pm.ZeroSumNormal("ability", shape=8)
    pm.Bernoulli("y", logit_p=ability[first] - ability[second], observed=np.arange(N) % 3 == 0)


@model()
def answers_with_difficulties():
    """A row is an answer of one of 12 persons to one of 6 questions (Rasch)."""
    person, question = np.arange(N) % 12, np.arange(N) // 12
    ability, difficulty = pm.Normal("ability", shape=12), pm.Normal("difficulty", shape=6)
    pm.Bernoulli("y", logit_p=ability[person] - difficulty[question], observed=draws(N) > 0)


@model(GATHERED, OWN_PARAMETERS)
def answers_with_difficulties_and_weights():
    """A row has all answers of a person, whose ability is a parameter."""
    ability, difficulty = pm.Normal("ability", shape=(N, 1)), pm.Normal("difficulty", shape=6)
    weight = pm.LogNormal("weight", 0, 0.3, shape=6)
    pm.Bernoulli("y", logit_p=weight * (ability - difficulty), observed=draws(N, 6) > 0)


@model()
def matrix_factorization():
    """A row is a rating of one of 12 articles by one of 9 users."""
    user, article = np.arange(N) % 9, np.arange(N) * 5 % 12
    users, articles = pm.Normal("users", shape=(9, 3)), pm.Normal("articles", shape=(12, 3))
    pm.Normal("y", (users[user] * articles[article]).sum(axis=1), pm.HalfNormal("s"), observed=draws(N))


# -- counts with many zeros, and values that are not seen exactly


@model()
def zero_inflated_counts():
    pm.ZeroInflatedPoisson("y", pm.math.sigmoid(linear(name="p")), pt.exp(linear()), observed=np.arange(N) % 4)


@model()
def hurdle_counts():
    mean = pt.exp(linear())
    pm.HurdleNegativeBinomial("y", pm.Beta("p", 2, 2), mean, pm.HalfNormal("alpha") + 1, observed=np.arange(N) % 4)


@model()
def occupancy():
    """Sites are visited five times; at a site without a sighting, there may be no animals."""
    seen = np.where(draws(N)[:, None] > 0, draws(N, 5) > 0.3, 0)
    present, found = linear(), pm.Normal("found")
    sighted = pm.logp(pm.Bernoulli.dist(logit_p=found), seen).sum(axis=1) + pt.log(pm.math.sigmoid(present))
    absent = pt.where(pt.as_tensor(seen.sum(axis=1)) > 0, -np.inf, pt.log(pm.math.sigmoid(-present)))
    pm.Potential("y", pt.logaddexp(sighted, absent).sum())


@model()
def censored_regression():
    y = np.clip(LINE + draws(N), -1, 1)
    pm.Censored("y", pm.Normal.dist(linear(), pm.HalfNormal("s")), lower=-1, upper=1, observed=y)


@model()
def truncated_regression():
    y = np.clip(LINE + draws(N), -0.99, 1.99)
    pm.Truncated("y", pm.Normal.dist(linear(), pm.HalfNormal("s") + 0.5), lower=-1, upper=2, observed=y)


@model()
def interval_censored_regression():
    """Only the unit intervals of the values are known."""
    lower = np.floor(LINE + draws(N))
    of = pm.Normal.dist(linear(), pm.HalfNormal("s") + 0.5)
    pm.Potential("y", pm.math.logdiffexp(pm.logcdf(of, lower + 1), pm.logcdf(of, lower)).sum())


@model()
def weibull_lifetimes():
    """Lifetimes of which some are censored at the end of the study."""
    time = np.exp(LINE / 2 + 0.3 * draws(N))
    end = np.where(time > 2, 2.0, np.inf)
    lifetimes = pm.Weibull.dist(alpha=pm.HalfNormal("shape") + 0.5, beta=pt.exp(linear()))
    pm.Censored("y", lifetimes, lower=None, upper=end, observed=np.minimum(time, 2))


@model()
def piecewise_hazards():
    """Deaths of patients in intervals of time, as counts (Cox's model)."""
    exposure = np.random.default_rng(9).uniform(0.1, 1, size=(N, 4))
    hazards = pm.Gamma("hazards", 1, 1, shape=4)
    risk = pt.exp(pt.dot(X, pm.Normal("b", shape=3)))
    pm.Poisson("y", exposure * hazards * risk[:, None], observed=np.arange(4 * N).reshape(N, 4) * 7 % 11 == 0)


@model(GATHERED, OWN_PARAMETERS)
def errors_of_measurement():
    """The true covariate of each row is a parameter."""
    x = pm.Normal("x", pm.Normal("mean"), pm.HalfNormal("spread"), shape=N)
    pm.Normal("seen", x, 0.3, observed=X[:, 0] + 0.3 * draws(N))
    pm.Normal("y", pm.Normal("b0") + pm.Normal("b") * x, pm.HalfNormal("s"), observed=LINE)


@model()
def missing_outcomes():
    y = LINE + draws(N)
    y[::9] = np.nan
    pm.Normal("y", linear(), pm.HalfNormal("s"), observed=y)


@model()
def missing_covariates():
    x = X[:, 0].copy()
    x[::7] = np.nan
    full = pm.Normal("x", pm.Normal("mean"), pm.HalfNormal("spread"), observed=x)
    pm.Normal("y", pm.Normal("b0") + pm.Normal("b") * full, pm.HalfNormal("s"), observed=LINE)


# -- mixtures and hidden factors


@model()
def mixture_of_normals():
    means = pm.Normal("means", shape=3, transform=pm.distributions.transforms.ordered, initval=[-1, 0, 1])
    pm.NormalMixture("y", weights_of(3), means, pm.HalfNormal("s", shape=3), observed=draws(N) + 3 * (LINE > 0))


@model()
def mixture_of_normals_in_the_plane():
    of = [pm.MvNormal.dist(pm.Normal(f"mean{i}", i, 1, shape=2), np.eye(2)) for i in range(2)]
    pm.Mixture("y", weights_of(2), of, observed=draws(N, 2))


@model()
def mixture_of_regressions():
    means = [linear(name=name) for name in "bc"]
    of = [pm.Normal.dist(mean, pm.HalfNormal(f"s{i}")) for i, mean in enumerate(means)]
    pm.Mixture("y", weights_of(2), of, observed=np.where(draws(N) > 0, LINE, -LINE))


@model()
def dirichlet_process():
    """A mixture of nine components, whose weights are pieces of a stick."""
    pieces = pm.Beta("pieces", 1, pm.Gamma("alpha", 1, 1), shape=9)
    left = pt.concatenate([pt.ones(1), pt.cumprod(1 - pieces)[:-1]])
    weights = pm.Deterministic("weights", pieces * left / (pieces * left).sum())
    pm.NormalMixture("y", weights, pm.Normal("mu", shape=9), pm.HalfNormal("s", shape=9), observed=draws(N))


@model()
def latent_classes():
    """Each class has its own probabilities of six answers; the classes of the rows are summed out."""
    p = pm.Beta("p", 2, 2, shape=(3, 6))
    answers = (draws(N, 1) + draws(N, 6, seed=1) > 0)[:, None, :]
    density = pm.logp(pm.Bernoulli.dist(p), answers).sum(axis=2)
    pm.Potential("y", pm.math.logsumexp(density + pt.log(weights_of(3)), axis=1).sum())


@model(GATHERED, OWN_PARAMETERS)
def factor_analysis():
    factors, loadings = pm.Normal("factors", shape=(N, 2)), pm.Normal("loadings", shape=(2, 5))
    pm.Normal("y", pt.dot(factors, loadings), pm.HalfNormal("s", shape=5), observed=draws(N, 5))


@model()
def principal_components():
    """The factors of the rows are summed out."""
    loadings = pm.Normal("loadings", shape=(5, 2))
    cov = pt.dot(loadings, loadings.T) + pm.HalfNormal("s") ** 2 * pt.eye(5)
    pm.MvNormal("y", pm.Normal("mean", shape=5), cov=cov, observed=draws(N, 5))


@model()
def correlated_outcomes():
    root, _, _ = pm.LKJCholeskyCov("root", n=3, eta=2.0, sd_dist=pm.Exponential.dist(1.0, shape=3))
    mean = pt.dot(X, pm.Normal("b", shape=(3, 3))) + pm.Normal("effects", shape=(7, 3))[GROUPS]
    pm.MvNormal("y", mean, chol=root, observed=draws(N, 3))


@model()
def neural_network():
    hidden = pt.tanh(linear(name="a")[:, None] + pt.dot(X, pm.Normal("w1", shape=(3, 5))))
    hidden = pt.tanh(pt.dot(hidden, pm.Normal("w2", shape=(5, 5))))
    pm.Bernoulli("y", logit_p=pt.dot(hidden, pm.Normal("w3", shape=5)), observed=LINE > 0)


@model()
def weighted_likelihood():
    b = pm.Normal("b", shape=3)
    density = pm.logp(pm.Normal.dist(pt.dot(X, b), pm.HalfNormal("s")), LINE)
    pm.Potential("y", (np.linspace(0, 1, N) * density).sum())


# -- time and space


@model()
def changepoint():
    """Counts of years before and after a change, which is gradual."""
    year, change = np.arange(111.0), pm.Uniform("change", 0, 111)
    early, late = pm.Exponential("early", 1.0), pm.Exponential("late", 1.0)
    after = pm.math.sigmoid(year - change)
    pm.Poisson("y", early * (1 - after) + late * after, observed=np.random.default_rng(2).poisson(3 - year / 50))


@model()
def discrete_changepoint():
    year, change = np.arange(111), pm.DiscreteUniform("change", 0, 110)
    rate = pm.math.switch(change >= year, pm.Exponential("early", 1.0), pm.Exponential("late", 1.0))
    pm.Poisson("y", rate, observed=np.random.default_rng(2).poisson(3 - year / 50))


@model()
def changepoint_summed_out():
    year = np.arange(111)
    rates, counts = pm.Exponential("rates", 1.0, shape=2), np.random.default_rng(2).poisson(3 - year / 50)
    density = pm.logp(pm.Poisson.dist(rates), counts[:, None])  # (year, early or late)
    is_late = (year[:, None] >= year).astype(float)  # (year, change)
    of_changes = (density[:, :1] * (1 - is_late) + density[:, 1:] * is_late).sum(axis=0)
    pm.Potential("y", pm.math.logsumexp(of_changes))


@model(GATHERED, STEPS)
def stochastic_volatility():
    walk = pm.GaussianRandomWalk("walk", sigma=pm.Exponential("step", 10), init_dist=pm.Normal.dist(0, 1), shape=N)
    pm.StudentT("y", nu=pm.Exponential("nu", 0.1), lam=pt.exp(-2 * walk), observed=draws(N))


@model()
def autoregression_with_covariates():
    y = draws(N).cumsum() / 3
    mean = linear() + pm.Normal("rho", 0, 0.5) * pt.concatenate([pt.zeros(1), pt.as_tensor(y)[:-1]])
    pm.Normal("y", mean, pm.HalfNormal("s"), observed=y)


@model()
def autoregression_of_prepared_rows():
    y = draws(N + 1).cumsum() / 3
    pm.Normal("y", linear(np.column_stack([X, y[:-1]])), pm.HalfNormal("s"), observed=y[1:])


@model(FULL, STEPS)
def level_and_trend():
    """A structural time series, by the errors of predictions of one step."""
    y, gains = draws(N).cumsum() / 3, pm.Beta("gains", 2, 2, shape=2)

    def step(here, level, trend, gains):
        error = here - level - trend
        return level + trend + gains[0] * error, trend + gains[1] * error, error

    start = [pm.Normal("level"), pm.Normal("trend"), None]
    _, _, errors = pytensor.scan(step, [pt.as_tensor(y)], start, non_sequences=[gains], return_updates=False)
    pm.Potential("y", pm.logp(pm.Normal.dist(0, pm.HalfNormal("s")), errors).sum())


def forward(density, move):
    """Return the log-probability of sequences with hidden states, for densities of time, sequence and state."""

    def step(here, before, move):
        return pm.math.logsumexp(before[:, :, None] + move, axis=1, keepdims=False) + here

    start = pt.zeros((density.shape[1], 2))
    states = pytensor.scan(step, [density], [start], non_sequences=[pt.log(move)], return_updates=False)
    return pm.math.logsumexp(states[-1], axis=1).sum()


@model()
def many_hidden_markov_chains():
    move = pm.Dirichlet("move", np.ones(2), shape=(2, 2))
    density = pm.logp(pm.Normal.dist(pm.Normal("mu", shape=2), 1), pt.as_tensor(PANEL)[:, :, None])
    pm.Potential("y", forward(density.dimshuffle(1, 0, 2), move))


@model(FULL, STEPS)
def one_hidden_markov_chain():
    move = pm.Dirichlet("move", np.ones(2), shape=(2, 2))
    density = pm.logp(pm.Normal.dist(pm.Normal("mu", shape=2), 1), pt.as_tensor(draws(N))[:, None])
    pm.Potential("y", forward(density[:, None], move))


def trajectory(rates, start, parameters, n=N, dt=0.05):
    """Return the states at `n` times, by steps of Euler."""

    def step(state, *parameters):
        return state + dt * pt.stack(rates(state, *parameters))

    return pytensor.scan(step, None, [start], non_sequences=parameters, n_steps=n, return_updates=False)


@model(GATHERED, ALONG)
def predators_and_prey():
    a, b, c, d = (pm.LogNormal(name, 0, 0.3) for name in "abcd")

    def rates(state, a, b, c, d):
        return a * state[0] - b * state[0] * state[1], c * state[0] * state[1] - d * state[1]

    states = trajectory(rates, pm.LogNormal("start", 0, 0.1, shape=2), [a, b, c, d])
    pm.LogNormal("y", pt.log(states), pm.HalfNormal("s"), observed=np.exp(0.2 * draws(N, 2)))


@model(GATHERED, ALONG)
def epidemic():
    """Susceptible, infected and removed persons; counts of infections."""
    contact, removal = pm.LogNormal("contact", 0.5, 0.3), pm.LogNormal("removal", -0.5, 0.3)

    def rates(state, contact, removal):
        infections = contact * state[0] * state[1]
        return -infections, infections - removal * state[1], removal * state[1]

    states = trajectory(rates, pt.as_tensor([0.95, 0.05, 0.0]), [contact, removal], dt=0.2)
    new = 100 * contact * states[:, 0] * states[:, 1]
    pm.NegativeBinomial("y", mu=new, alpha=pm.HalfNormal("alpha", 5) + 1, observed=np.arange(N) * 5 % 9)


@model()
def advertisement():
    spent, kept = np.random.default_rng(11).gamma(2, 0.5, N), pm.Beta("kept", 2, 2)
    lagged = np.stack([np.concatenate([np.zeros(i), spent[: N - i]]) for i in range(5)], axis=1)
    carried = pt.dot(pt.as_tensor(lagged), kept ** np.arange(5))
    pm.Normal("y", linear() + pm.HalfNormal("b1") * pt.tanh(carried), pm.HalfNormal("s"), observed=LINE)


@model(FULL, "areas depend on their neighbors")
def disease_in_areas():
    effects = pm.CAR("areas", np.zeros(N), ring(N), alpha=pm.Beta("alpha", 2, 2), tau=pm.Gamma("tau", 2, 1), shape=N)
    pm.Poisson("y", pt.exp(linear() + effects), observed=COUNTS)


@model(FULL, PAIRS)
def counts_of_a_gaussian_process():
    process = pm.gp.Latent(cov_func=pm.gp.cov.Matern52(1, pm.Gamma("length", 2, 1)))
    pm.Poisson("y", pt.exp(process.prior("f", X=TIMES[:, None])), observed=COUNTS)


@model()
def smooth_regression_by_basis_functions():
    process = pm.gp.HSGP(m=[9], c=1.5, cov_func=pm.gp.cov.ExpQuad(1, pm.Gamma("length", 2, 1)))
    mean = linear() + process.prior("f", X=TIMES[:, None])
    pm.Normal("y", mean, pm.HalfNormal("s"), observed=np.sin(2 * TIMES) + LINE)


@model()
def yearly_pattern():
    waves = 2 * np.pi * TIMES[:, None] * np.arange(1, 4)
    pattern = pt.dot(np.column_stack([np.sin(waves), np.cos(waves)]), pm.Normal("waves", shape=6))
    pm.Normal("y", pm.Normal("level") + pm.Normal("trend") * TIMES + pattern, pm.HalfNormal("s"), observed=LINE)
