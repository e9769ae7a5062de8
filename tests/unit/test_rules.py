"""Training rules: the formulas of the papers, conserved quantities, schedules, and invalid settings.

Each reference is written in the paper's variables, without the classes and without the simulator.
"""

import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule_simulator import Logistic, N, Network, Quadratic, centre_order, gossip_order, simulate

from synkhronos import rules

STEPS, RATE = 24, 0.1


def in_double(problem):
    """Return a copy of a problem with the same numbers in float64."""
    other = object.__new__(type(problem))
    vars(other).update({name: value.astype("float64") for name, value in vars(problem).items()})
    return other


def sgd(problem):
    return lambda rank, x, step: x - RATE * problem.gradient(rank, x, step)


def assert_close(found, expected, dtype):
    found, expected = np.array(found), np.array(expected)
    assert found.dtype == dtype
    scale = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=0, atol=scale * max(1, np.abs(expected).max()))


PROBLEMS = pytest.mark.parametrize("problem_of", [Quadratic, Logistic, Network])
RANKS = pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32"])


def local_steps(problem, thetas, first, last):
    """Return the parameters of all workers after the local steps ``first`` to ``last``."""
    thetas = [theta.copy() for theta in thetas]
    for t in range(first, last + 1):
        thetas = [theta - RATE * problem.gradient(i, theta, t) for i, theta in enumerate(thetas)]
    return thetas


def paper_local_sgd(problem, K, H=4, switch=0):
    """Lin et al.: w^k <- (1/K) sum of w^k, after each of the first steps, and then after H local steps."""
    w = [problem.x0] * K
    t = 0
    while t < STEPS:
        h = 1 if t < switch else H
        w = local_steps(problem, w, t + 1, min(t + h, STEPS))
        t += h
        if t <= STEPS:
            w = [sum(w) / K] * K
    return w


def paper_slowmo(problem, m, tau=4, beta=0.6, alpha=0.9):
    """Wang et al., algorithm 1, with the outer iterate x_{t,0} and the fast learning rate gamma."""
    x_t0, u, gamma = problem.x0, 0, RATE
    for t in range(STEPS // tau):
        x_tau = sum(local_steps(problem, [x_t0] * m, t * tau + 1, (t + 1) * tau)) / m
        u = beta * u + (x_t0 - x_tau) / gamma
        x_t0 = x_t0 - alpha * gamma * u
    return [x_t0] * m


def paper_bmuf(problem, P, tau=4, zeta=0.8, eta=None, nesterov=False):
    """Chen and Huo: the global model W, and the model W_g that workers start from."""
    eta = 1 - 1 / P if eta is None else eta
    W, W_g, Delta = problem.x0, problem.x0, 0
    for t in range(STEPS // tau):
        W_bar = sum(local_steps(problem, [W_g] * P, t * tau + 1, (t + 1) * tau)) / P
        G = W_bar - W_g
        Delta = eta * Delta + zeta * G
        W = W + Delta
        W_g = W + eta * Delta if nesterov else W
    return [W_g] * P


def delayed(problem, P, merge, H, W):
    """Merge the snapshots of every H-th step W steps later, or at the end, by ``merge(x, s)`` for all workers."""
    x, due = [problem.x0] * P, {}
    for t in range(1, STEPS + 1):
        x = local_steps(problem, x, t, t)
        if t % H == 0:
            due[t + W] = x
        if t in due:
            x = merge(x, due.pop(t))
    for snapshots in due.values():
        x = merge(x, snapshots)
    return x


def paper_diloco(problem, k, H=4, W=0, nu=0.7, mu=0.9):
    """Douillard et al., with Nesterov momentum as in Sutskever et al. (2013): theta and its look-ahead phi."""
    theta = phi = problem.x0
    m = 0

    def merge(thetas, sent):
        nonlocal theta, phi, m
        m = mu * m - nu * sum(phi - theta_i for theta_i in sent) / k
        theta = theta + m
        phi = theta + mu * m
        return [phi + (now - then) for now, then in zip(thetas, sent)]

    return delayed(problem, k, merge, H, W)


def paper_heavy_ball(problem, k, H=4, W=0, nu=0.5, mu=0.6):
    """Polyak: theta_t+1 = theta_t + mu (theta_t - theta_t-1) - nu times the mean of the changes."""
    theta = before = problem.x0

    def merge(thetas, sent):
        nonlocal theta, before
        theta, before = theta + mu * (theta - before) - nu * (theta - sum(sent) / k), theta
        return [theta + (now - then) for now, then in zip(thetas, sent)]

    return delayed(problem, k, merge, H, W)


def paper_delta(problem, P, H=4, W=2):
    """CoCoD-SGD: each worker adds its distance from the mean at sending."""
    return delayed(problem, P, lambda x, s: [a + sum(c - b for c in s) / P for a, b in zip(x, s)], H, W)


def paper_pull(problem, P, H=4, W=3, alpha=0.6):
    """Overlap-Local-SGD: x <- x - alpha (x - z) with the mean z of earlier models."""
    return delayed(problem, P, lambda x, s: [a - alpha * (a - sum(s) / P) for a in x], H, W)


def paper_daso_cycle(problem, P, H=4, W=2):
    """Coquelin et al., equation 1, where all of P networks wait S = W batches."""

    def merge(x, sent):
        S = W
        return [(2 * S * x_i + sum(sent)) / (2 * S + P) for x_i in x]

    return delayed(problem, P, merge, H, W)


AVERAGES = {
    "local": (rules.LocalSGD(4), paper_local_sgd, {}),
    "average": (rules.Average(4), paper_local_sgd, {}),
    "outer": (rules.Outer(4), paper_local_sgd, {}),
    "post-local": (rules.LocalSGD(4, start=5), paper_local_sgd, {"switch": 5}),
    "outer-start": (rules.Outer(4, merge="pull", alpha=1, start=5), paper_local_sgd, {"switch": 5}),
    "slowmo": (rules.SlowMo(4, RATE, beta=0.6, alpha=0.9), paper_slowmo, {}),
    "bmuf": (rules.BMUF(4, zeta=0.8), paper_bmuf, {}),
    "bmuf-nesterov": (rules.BMUF(4, zeta=0.8, nesterov=True), paper_bmuf, {"nesterov": True}),
    "bmuf-eta": (rules.BMUF(4, eta=0.7, nesterov=True), paper_bmuf, {"zeta": 1, "eta": 0.7, "nesterov": True}),
    "diloco": (rules.DiLoCo(4), paper_diloco, {}),
    "diloco-delayed": (rules.DiLoCo(4, delay=3), paper_diloco, {"W": 3}),
    "diloco-as-outer": (rules.Outer(4, 1, 0.7, 0.9, True), paper_diloco, {"W": 1}),
    "diloco-unfinished": (rules.DiLoCo(11, delay=7), paper_diloco, {"H": 11, "W": 7}),
    "heavy-ball": (rules.Outer(4, lr=0.5, momentum=0.6), paper_heavy_ball, {}),
    "heavy-ball-delayed": (rules.Outer(4, 2, 0.5, 0.6, merge="keep"), paper_heavy_ball, {"W": 2}),
    "delta": (rules.Outer(4, 2, merge="delta"), paper_delta, {}),
    "delta-blocking": (rules.Outer(4, merge="delta"), paper_local_sgd, {}),
    "keep": (rules.Outer(4, 2, merge="keep"), paper_delta, {}),
    "pull": (rules.Outer(4, 3, merge="pull", alpha=0.6), paper_pull, {}),
}


@PROBLEMS
@RANKS
@DTYPES
@pytest.mark.parametrize("case", AVERAGES)
def test_averages_follow_the_papers(case, problem_of, n_ranks, dtype):
    rule, paper, options = AVERAGES[case]
    problem = problem_of(n_ranks, dtype)
    run = simulate(rule, sgd(problem), problem.x0, n_ranks, STEPS)
    assert_close(run.x, paper(in_double(problem), n_ranks, **options), dtype)
    vectors = [one for state in run.states for one in state.values() if isinstance(one, np.ndarray)]
    assert {one.dtype for one in vectors} <= {np.dtype(dtype)}


@PROBLEMS
@RANKS
@DTYPES
def test_daso_merges_by_its_formula(problem_of, n_ranks, dtype):
    problem = problem_of(n_ranks, dtype)
    rule = rules.DASO(warmup=0, cooldown=0, every=5, delay=2).plan(STEPS + 4, 1)
    run = simulate(rule, sgd(problem), problem.x0, n_ranks, STEPS)
    assert_close(run.x, paper_daso_cycle(in_double(problem), n_ranks, H=5, W=2), dtype)


@PROBLEMS
@DTYPES
@pytest.mark.parametrize("nodes", [[0], [0, 1], [0, 0, 1, 1], [0, 1, 0, 1, 1]])
def test_hierarchical_averages_take_the_largest_period(nodes, problem_of, dtype):
    problem = problem_of(len(nodes), dtype)
    rule = rules.Hierarchical({2: "node", 3: "node", 4: "all"})
    run = simulate(rule, sgd(problem), problem.x0, len(nodes), STEPS - 1, nodes=nodes)

    double, x = in_double(problem), [problem.x0] * len(nodes)
    for t in range(1, STEPS):
        x = local_steps(double, x, t, t)
        if t % 4 == 0:
            x = [sum(x) / len(x)] * len(x)
        elif t % 2 == 0 or t % 3 == 0:
            x = [sum(b for b, node in zip(x, nodes) if node == mine) / nodes.count(mine) for mine in nodes]
    assert_close(run.x, x, dtype)


CHUNKS = (slice(0, 1), slice(1, 4), slice(4, N))


def paper_downpour(problem, order, n, scale, tau=4):
    """Dean et al., algorithm 1.1: workers push accrued gradients to the server, and fetch its parameters."""
    server = problem.x0.copy()
    theta, accrued, t = [server.copy() for _ in range(n)], np.zeros((n, N)), [0] * n
    for i, chunk in order:
        for _ in range(0 if chunk.start else tau):
            t[i] += 1
            gradient = problem.gradient(i, theta[i], t[i])
            theta[i], accrued[i] = theta[i] - RATE * gradient, accrued[i] + gradient
        server[chunk] -= scale * RATE * accrued[i][chunk]
        theta[i][chunk], accrued[i][chunk] = server[chunk], 0
    return theta, server


def paper_easgd(problem, order, p, alpha, tau=4, delta=0.0):
    """Zhang et al., algorithms 1 and 2: the centre x_tilde, and Nesterov momentum with the rate delta."""
    x_tilde = problem.x0.copy()
    x, v, t = [x_tilde.copy() for _ in range(p)], np.zeros((p, N)), [0] * p
    for i, chunk in order:
        for _ in range(0 if chunk.start else tau):
            t[i] += 1
            v[i] = delta * v[i] - RATE * problem.gradient(i, x[i] + delta * v[i], t[i])
            x[i] = x[i] + v[i]
        x_i = x[i][chunk].copy()
        x[i][chunk] -= alpha * (x_i - x_tilde[chunk])
        x_tilde[chunk] += alpha * (x_i - x_tilde[chunk])
    return x, x_tilde


def nesterov(problem, delta):
    """Return a step with the Nesterov momentum of `paper_easgd`."""
    v = {}

    def step(rank, x, step):
        v[rank] = delta * v.get(rank, np.zeros_like(x)) - RATE * problem.gradient(
            rank, x + delta * v.get(rank, 0 * x), step
        )
        return x + v[rank]

    return step


CENTRES = {
    "asgd": (rules.ASGD(4), paper_downpour, lambda p: {"scale": 1 / p}),
    "asgd-scale": (rules.ASGD(4, scale=0.3), paper_downpour, lambda p: {"scale": 0.3}),
    "easgd": (rules.EASGD(4), paper_easgd, lambda p: {"alpha": 0.9 / p}),
    "easgd-alpha": (rules.EASGD(4, alpha=0.2), paper_easgd, lambda p: {"alpha": 0.2}),
    "eamsgd": (rules.EAMSGD(4, momentum=0.7), paper_easgd, lambda p: {"alpha": 0.9 / p, "delta": 0.7}),
}


@PROBLEMS
@RANKS
@DTYPES
@pytest.mark.parametrize("chunks", [(slice(None),), CHUNKS], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("case", CENTRES)
def test_centres_follow_the_papers(case, chunks, problem_of, n_ranks, dtype):
    rule, paper, options_for = CENTRES[case]
    problem, options = problem_of(n_ranks, dtype), options_for(n_ranks)
    order = centre_order(rule, n_ranks, STEPS, np.random.RandomState(n_ranks), slow=0, chunks=chunks)
    step = nesterov(problem, options["delta"]) if "delta" in options else sgd(problem)
    run = simulate(rule, step, problem.x0, n_ranks, STEPS, order)
    x, centre = paper(in_double(problem), order, n_ranks, **options)
    assert_close(run.x, x, dtype)
    assert_close(run.centre, centre, dtype)


@PROBLEMS
@RANKS
@DTYPES
def test_gossip_follows_the_paper(problem_of, n_ranks, dtype):
    problem, rule = problem_of(n_ranks, dtype), rules.GoSGD(0.4)
    order = gossip_order(rule, n_ranks, STEPS, np.random.RandomState(3), slow=0)
    assert (n_ranks == 1) == (len(order) == 0)
    run = simulate(rule, sgd(problem), problem.x0, n_ranks, STEPS, order)

    # Blot et al., algorithm 3: x_r <- w_r / (w_r + w_s) x_r + w_s / (w_r + w_s) x_s
    double, queues = in_double(problem), {}
    x, w, made = [double.x0] * n_ranks, [1 / n_ranks] * n_ranks, [0] * n_ranks
    drained = [("merge", r, STEPS, s) for s in range(n_ranks) for r in range(n_ranks)]
    for kind, r, steps, s in [*order, *(("step", r, STEPS, r) for r in range(n_ranks)), *drained]:
        for t in range(made[r] + 1, steps + 1):
            x[r] = x[r] - RATE * double.gradient(r, x[r], t)
        made[r] = steps
        if kind == "send":
            w[r] /= 2
            queues[r, s] = x[r], w[r]
        elif (s, r) in queues:
            x_s, w_s = queues.pop((s, r))
            x[r], w[r] = w[r] / (w[r] + w_s) * x[r] + w_s / (w[r] + w_s) * x_s, w[r] + w_s
    assert_close(run.x, x, dtype)
    assert_close(run.weights, w, "float64")


ORDERS = given(n_ranks=st.integers(1, 6), seed=st.integers(0, 2**32 - 1), slow=st.sampled_from([None, 0]))


def recorded(seed):
    """Return a step with random changes, and the dict of these changes by rank."""
    rng, changes = np.random.RandomState(seed), {}

    def step(rank, x, step):
        changes.setdefault(rank, []).append(rng.randn(N))
        return x + changes[rank][-1]

    return step, changes


@given(n_ranks=st.integers(1, 6), seed=st.integers(0, 2**32 - 1), every=st.integers(1, 9), data=st.data())
def test_delta_conserves_the_sum(n_ranks, seed, every, data):
    rule = rules.Outer(every, data.draw(st.integers(0, every - 1)), merge="delta")
    step, changes = recorded(seed)
    run = simulate(rule, step, np.ones(N), n_ranks, STEPS)
    assert_close(np.sum(run.x, axis=0), n_ranks + np.sum([*changes.values()], axis=(0, 1)), "float64")


@ORDERS
def test_each_exchange_of_easgd_conserves_the_sum_with_the_centre(n_ranks, seed, slow):
    rng, rule = np.random.RandomState(seed), rules.EASGD(4)
    order = centre_order(rule, n_ranks, STEPS, rng, slow, CHUNKS)
    step, changes = recorded(seed)
    run = simulate(rule, step, np.ones(N), n_ranks, STEPS, order)
    total = n_ranks + 1 + np.sum([*changes.values()], axis=(0, 1))
    assert_close(np.sum(run.x, axis=0) + run.centre, total, "float64")
    x, centre = rng.randn(2, N)
    assert_close(sum(rule.meet(x, centre, rule.begin(x, n_ranks))), x + centre, "float64")


@ORDERS
def test_the_centre_of_asgd_is_the_start_and_all_scaled_changes(n_ranks, seed, slow):
    rule = rules.ASGD(5, scale=0.4)  # the last 4 of 24 steps are not exchanged
    order = centre_order(rule, n_ranks, STEPS, np.random.RandomState(seed), slow, CHUNKS)
    step, changes = recorded(seed)
    run = simulate(rule, step, np.ones(N), n_ranks, STEPS, order)
    assert_close(run.centre, 1 + 0.4 * sum(np.sum(one[:20], axis=0) for one in changes.values()), "float64")


@ORDERS
def test_gossip_conserves_weights_and_weighted_sums_in_flight(n_ranks, seed, slow):
    rng, rule = np.random.RandomState(seed), rules.GoSGD(0.5)
    x0 = rng.randn(n_ranks, N)
    order = gossip_order(rule, n_ranks, STEPS, rng, slow)
    order = order[: rng.randint(len(order) + 1)]
    for drain in (False, True):
        run = simulate(rule, lambda rank, x, step: x, x0, n_ranks, STEPS, order, drain=drain)
        assert bool(run.in_flight) <= (not drain)
        x, weights = zip(*run.in_flight, *zip(run.x, run.weights))
        assert_close(sum(weights), 1.0, "float64")
        assert_close(sum(w * one for one, w in zip(x, weights)), x0.mean(axis=0), "float64")


@PROBLEMS
@pytest.mark.parametrize(
    "rule",
    [rules.Average(4), rules.LocalSGD(4, start=3), rules.Outer(4, 3, merge="delta"), rules.ASGD(4, 1), rules.GoSGD(1)],
    ids=lambda rule: rule.name,
)
def test_one_rank_trains_as_the_serial_program(rule, problem_of):
    problem = problem_of(1, "float64")
    x = problem.x0
    for t in range(1, STEPS + 1):
        x = x - RATE * problem.gradient(0, x, t)
    assert_close(simulate(rule, sgd(problem), problem.x0, 1, STEPS).x[0], x, "float64")


ALL = [
    *(rule for rule, _, _ in AVERAGES.values()),
    *(rule for rule, _, _ in CENTRES.values()),
    rules.Hierarchical(),
    rules.DASO().plan(10, 12),
    rules.GoSGD(),
    rules.BSP(),
]
EACH = pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)


@EACH
@DTYPES
def test_methods_change_no_argument_and_keep_the_dtype(rule, dtype):
    x, y, z = np.random.RandomState(0).randn(3, N).astype(dtype)
    arguments = (x, y, z)
    for one in arguments:
        one.flags.writeable = False
    if rule.engine == "average":
        state = rule.begin(x, 3)
        results = [*(rule.after(x, y, z, age, state) for age in (0, 2, 0)), rule.before(x, state)]
    elif rule.engine == "centre":
        state = rule.begin(x, 3)
        results = [*rule.meet(y, z, state), *rule.meet(z, y, state)]
    else:
        state, results = {}, [rule.merge(x, 0.5, y, 0.25)[0]] if rule.engine == "gossip" else []
    results += [one for one in state.values() if isinstance(one, np.ndarray)]
    assert {one.dtype for one in results} <= {np.dtype(dtype)}
    for index, one in enumerate(results):
        assert not any(np.shares_memory(one, other) for other in (*arguments, *results[:index]))


@pytest.mark.parametrize("number", [np.float64, np.float32])
def test_settings_of_numpy_types_keep_float32(number):
    x = np.ones(N, "float32")
    half = number(0.5)
    for rule in (rules.Outer(4, lr=half, momentum=half), rules.SlowMo(4, half, half, half), rules.BMUF(4, half, half)):
        assert rule.after(x, x, x, 0, rule.begin(x, np.int64(2))).dtype == "float32"
    for rule in (rules.ASGD(4, half), rules.EASGD(4, half), rules.EASGD(4, beta=half)):
        assert {one.dtype for one in rule.meet(x, x, rule.begin(x, np.int64(2)))} == {x.dtype}
    merged, weight = rules.GoSGD(half).merge(x, half, x, half)
    assert merged.dtype == "float32" and type(weight) is float


@EACH
def test_rules_are_pickled_and_named(rule):
    other = pickle.loads(pickle.dumps(rule))
    assert other == rule and other.name == rule.name and hash(other) == hash(rule)
    assert rule.name.startswith(type(rule).__name__ + "(")
    assert rule.engine == "none" or f"{rule.every if hasattr(rule, 'every') else rule.probability}" in rule.name
    rule.check(2)
    assert type(rule.plan(5, 8)) is type(rule)


INVALID = [
    (lambda: rules.Average(0), "Average: every is 0; expected an int of at least 1"),
    (lambda: rules.Average(2.5), "every is 2.5; expected an int"),
    (lambda: rules.LocalSGD(True), "every is True; expected an int"),
    (lambda: rules.LocalSGD(2, start=-1), "start is -1; expected an int of at least 0"),
    (lambda: rules.DiLoCo(10, 10), "DiLoCo: delay is 10 and every is 10; expected a delay of less than every"),
    (lambda: rules.Outer(10, 25, merge="delta"), "delay is 25 and every is 10; expected a delay of less than every"),
    (lambda: replace(rules.DiLoCo(), delay=50), "delay is 50 and every is 50"),
    (lambda: rules.DASO(every=1), "DASO: delay is 1 and every is 1"),
    (lambda: rules.Outer(4, lr=0), "lr is 0; expected a number in \\(0, inf\\)"),
    (lambda: rules.Outer(4, momentum=1), "momentum is 1; expected a number in \\[0, 1\\)"),
    (lambda: rules.Outer(4, merge="mean"), "merge is 'mean'; expected 'average', 'delta', 'pull' or 'keep'"),
    (
        lambda: rules.Outer(4, lr=0.7, merge="delta"),
        "merge is 'delta', lr is 0.7 .* leave them out, or use merge='keep'",
    ),
    (lambda: rules.SlowMo(4, "fast"), "learning_rate is 'fast'; expected a number"),
    (lambda: rules.BMUF(4, eta=float("nan")), "eta is nan; expected a number"),
    (lambda: rules.ASGD(scale=2), "scale is 2; expected a number in \\(0, 1\\]"),
    (lambda: rules.EASGD(alpha=1.5), "alpha is 1.5"),
    (lambda: rules.EAMSGD(momentum=-1), "momentum is -1"),
    (lambda: rules.ASGD(nodes_every=0), "ASGD: nodes_every is 0; expected an int of at least 1"),
    (lambda: rules.GoSGD(0), "probability is 0; expected a number in"),
    (lambda: rules.GoSGD(nodes_every=2.5), "GoSGD: nodes_every is 2.5; expected an int of at least 1"),
    (lambda: rules.Hierarchical({4: "node"}), "expected a dict with a period of the group 'all'"),
    (lambda: rules.Hierarchical({0: "all"}), "periods has 0: 'all'; expected an int of at least 1"),
    (lambda: rules.Hierarchical({4: "rack", 8: "all"}), "periods has 4: 'rack'; .* 'node' or 'all'"),
    (lambda: rules.EASGD(beta=4).check(2), "beta is 4.0 with 2 ranks; expected at most the number of ranks"),
    (lambda: rules.BSP().check(0), "n_ranks is 0; expected an int of at least 1"),
    (lambda: rules.DASO().exchanges_at(1), "steps_per_epoch is None; .* call plan"),
    (lambda: rules.DASO().on_epoch(1.0, rules.DASO().begin(np.ones(1), 2)), "epochs is None; .* call plan"),
    (lambda: rules.DASO().plan(10, 0), "epochs is 0; expected an int of at least 1"),
]


@pytest.mark.parametrize(("make", "message"), INVALID, ids=[message for _, message in INVALID])
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_valid_limits_are_accepted():
    rules.EASGD(beta=4).check(4)
    assert rules.DiLoCo(10, 9).delay_at(10) == 9
    assert rules.LocalSGD(4, start=2).delay_at(1) == 0
    assert [rules.Outer(3, 2, start=2).delay_at(step) for step in (2, 5)] == [0, 2]


def test_the_outer_optimizer_begins_after_the_first_averages():
    rule = rules.Outer(4, lr=0.5, momentum=0.6, start=2)
    run = simulate(rule, lambda rank, x, step: x + rank, np.zeros(1), 3, 6)
    assert [float(x[0]) for x in run.x] == [2 + 0.5 * 4] * 3  # the means are 1, 2, and after four steps 6


BLOCKING, PER_EPOCH = 0, 9

#: B = 4, W = 1, nine batches in an epoch: sends by step with their delay, and merges by the steps made with their age.
DASO_SENDS = {
    **dict.fromkeys(range(1, 10), BLOCKING),  # epoch 1: warm-up
    13: 1, 17: 1, 18: BLOCKING,  # epoch 2: batches 4, 8 and the last
    22: 1, 26: 1, 27: BLOCKING,  # epoch 3
    **dict.fromkeys(range(28, 37), BLOCKING),  # epoch 4: cool-down
}  # fmt: skip
DASO_MERGES = [
    *((step, 0) for step in range(1, 10)),
    (14, 1), (18, 1), (18, 0),  # the last batch merges the message of batch 8, and then averages
    (23, 1), (27, 1), (27, 0),
    *((step, 0) for step in range(28, 37)),
]  # fmt: skip


def test_daso_follows_its_schedule():
    rule = rules.DASO(warmup=1, cooldown=1)
    run = simulate(rule, lambda rank, x, step: x + rank, np.zeros(2), 3, 36, steps_per_epoch=PER_EPOCH)
    assert {step: delay for kind, step, delay in run.log if kind == "send"} == DASO_SENDS
    assert [(made, age) for kind, made, age in run.log if kind == "merge"] == DASO_MERGES
    assert np.ptp(run.x) == 0


#: Losses of epochs with B and W after each: the first epoch is warm-up, and thresholds are 0.95 of the best loss.
PLATEAU = [
    (0.1, 4, 1),  # warm-up: not seen
    (1.0, 4, 1),  # good: best 1.0, so that 0.95 is the limit
    (0.96, 4, 1), (0.99, 4, 1),  # bad, bad
    (0.94, 4, 1),  # good: best 0.94, so that 0.893 is the limit
    (0.94, 4, 1), (0.90, 4, 1), (0.95, 2, 1),  # the third bad one: B 2, W stays 1
    (0.90, 2, 1), (0.91, 2, 1), (float("nan"), 1, 1),
    (0.90, 1, 1), (0.90, 1, 1), (0.90, 8, 2),  # starts over
    (0.89, 8, 2),  # good
    (0.89, 8, 2), (0.89, 8, 2), (0.89, 4, 1),
    (0.10, 4, 1),  # cool-down: not seen
]  # fmt: skip


def test_daso_changes_its_periods_on_plateaus():
    rule = rules.DASO(warmup=1, cooldown=1).plan(16, len(PLATEAU))
    states = [rule.begin(np.zeros(1), 2) for _ in range(2)]
    for epoch, (loss, every, delay) in enumerate(PLATEAU):
        for state in states:
            rule.on_epoch(loss, state)
        assert [(state["every"], state["delay"]) for state in states] == [(every, delay)] * 2
        if epoch < len(PLATEAU) - 2:
            steps = range(16 * (epoch + 1) + 1, 16 * (epoch + 2) + 1)
            sends = {step - steps[0] + 1: rule.delay_at(step) for step in steps if rule.exchanges_at(step)}
            expected = {
                batch: min(delay, every - 1) for batch in range(every, 16, every)
            }  # less than B: blocking for 1
            assert sends == {**expected, 16: BLOCKING}
    assert states[0]["best"] == 0.89
    copy = pickle.loads(pickle.dumps(rule))
    early = [step for step in range(1, 16 * len(PLATEAU)) if rule.exchanges_at(step)]
    assert early == [step for step in range(1, 16 * len(PLATEAU)) if copy.exchanges_at(step)]
    assert early != [step for step in range(1, 16 * len(PLATEAU)) if rule.plan(16, len(PLATEAU)).exchanges_at(step)]


@dataclass(frozen=True)
class SignMean(rules.Average):
    """Example of a user's rule: signs of changes vote, and each member moves by the vote."""

    size: float = 0.1

    def begin(self, x, n_members):
        return {"last": x.copy()}

    def before(self, x, state):
        return np.sign(x - state["last"])

    def after(self, x, sent, received, age, state):
        state["last"] = state["last"] + self.size * received
        return state["last"].copy()


def test_a_rule_of_a_user_works():
    run = simulate(SignMean(4), lambda rank, x, step: x + (-1) ** (rank > 1), np.zeros(N), 3, 8)
    assert_close(run.x, np.full((3, N), 2 * 0.1 / 3), "float64")  # two votes up and one down, twice
    with pytest.raises(ValueError, match="SignMean: delay is 4 and every is 4"):
        SignMean(4, 4)
