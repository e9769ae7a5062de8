"""Evaluations of PyMC models.

The log-probability and its gradient of five models, in float64, in the function that PyMC's own samplers evaluate, and
in that which nutpie evaluates, for one point: in `parallel(model)` on two ranks and on one, and in PyMC alone, in
PyTensor's default mode, with one thread of BLAS in each process. The plan is the default one: models that one process
evaluates faster are not divided. JAX, whose functions numpyro and blackjax evaluate, has two threads.
"""

from __future__ import annotations

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio

MODULE = "benchmarks.contestants.pymc"
MODELS = {
    "hierarchical": "linear regression with groups, 20 covariates",
    "crossed": "logistic regression with crossed groups, 5 covariates",
    "negative_binomial": "negative binomial regression, 20 covariates",
    "ordered": "ordered logistic regression, 5 covariates",
    "mixture": "mixture of three normal distributions",
}
GRAPHS = {"pymc": "PyMC's function", "nutpie": "nutpie's function"}


def contestants() -> list[Contestant]:
    """Return contestants for both functions on two ranks, on one, and of PyMC alone, and JAX."""
    needs = ("pymc",)
    found = [
        Contestant(f"{GRAPHS[graph]}, {name}", MODULE, {"ranks": ranks, "graph": graph}, needs=needs)
        for graph in GRAPHS
        for name, ranks in ((f"{CORES} ranks", CORES), ("1 rank", 1), ("PyMC alone", 0))
    ]
    return [*found, Contestant("JAX", MODULE, {"graph": "jax"}, threads=CORES, needs=("jax",), peer=True)]


def measure(result: Result, rounds: int = 20, rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)) -> None:
    """Measure each model with each number of rows."""
    with Contest(contestants()) as contest:
        result.facts.update(contest.facts)
        for n_rows in rows:
            for name, title in MODELS.items():
                samples = contest.run(rounds, contest.alike(name=name, rows=n_rows))
                group = f"{n_rows:,} rows: {title}"
                result.record(group, "ms", {who: one.scaled(1e3) for who, one in samples.items()}, contest.gaps)
                for graph, function in GRAPHS.items():
                    two, one, alone = (
                        samples[f"{function}, {who}"] for who in (f"{CORES} ranks", "1 rank", "PyMC alone")
                    )
                    key = f"{name}-{n_rows}-{graph}"
                    result.add(f"{key}-one", f"{group}: {function}, PyMC alone against 1 rank", ratio(alone, one),
                               at_least=0.97 if n_rows >= 100_000 else None)  # fmt: skip
                    result.add(f"{key}-two", f"… 1 rank against {CORES}", ratio(one, two),
                               at_least=1.8 if n_rows >= 100_000 else None)  # fmt: skip
                if "JAX" in samples:
                    ours = samples[f"{GRAPHS['nutpie']}, {CORES} ranks"]
                    result.add(f"{name}-{n_rows}-jax", f"… JAX against {CORES} ranks", ratio(samples["JAX"], ours))
