"""Four chains of a PyMC model.

The hierarchical regression with 20 covariates and 8 groups, in float64. The figures are the wall time divided by the
number of gradients of all chains together, without compilation. nutpie and PyMC's NUTS are measured with tuning;
numpyro and blackjax after it, with all chains in one vectorized program on two threads. Trees have at most 63 nodes.
nutpie alone has a thread for each of two chains at a time. PyMC's NUTS alone has two processes, whose start counts; it
is measured with 200 thousand rows only.
"""

from __future__ import annotations

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio

MODULE = "benchmarks.contestants.pymc_chains"
TARGETS = {  # of two ranks against others
    ("nutpie", 200_000): 1.8,
    ("nutpie", 1_000_000): 2.1,
    ("numpyro", 200_000): 5.0,
    ("numpyro", 1_000_000): 5.0,
}


#: Draws of each chain in a round, after as many for tuning, by the number of rows.
DRAWS = {200_000: 5, 1_000_000: 2}

_MOST_FOR_PYMC = 200_000  # rows with which PyMC's NUTS is measured


def contestants(rows: int) -> list[Contestant]:
    """Return nutpie and PyMC's NUTS on two ranks and alone, and the samplers of JAX."""
    found = []
    for sampler, name in [("nutpie", "nutpie"), ("pymc", "PyMC's NUTS")][: 2 if rows <= _MOST_FOR_PYMC else 1]:
        for who, ranks in ((f"{CORES} ranks", CORES), ("alone", 0)):
            arguments = {"rows": rows, "sampler": sampler, "ranks": ranks, "cores": CORES}
            found.append(Contestant(f"{name}, {who}", MODULE, arguments, needs=(sampler,)))
    for sampler in ("numpyro", "blackjax"):
        arguments = {"rows": rows, "sampler": sampler}
        found.append(Contestant(sampler, MODULE, arguments, threads=CORES, needs=("jax", sampler), peer=True))
    return found


def measure(result: Result, rounds: int = 20, draws: dict[int, int] = DRAWS) -> None:
    """Measure; for each number of rows, a round has so many draws of each chain, after as many for tuning."""
    for n_rows, n_draws in draws.items():
        with Contest(contestants(n_rows)) as contest:
            turns = contest.alike(draws=n_draws)
            for one in ("numpyro", "blackjax"):
                turns[one] = (turns[one][0], {"draws": max(1, n_draws // 5)})
            samples = contest.run(rounds, turns)
            result.facts.update({f"{n_rows}, {name}": facts for name, facts in contest.facts.items()})
        result.record(f"{n_rows:,} rows: a gradient", "ms", {name: one.scaled(1e3) for name, one in samples.items()},
                      contest.gaps)  # fmt: skip
        ours = samples[f"nutpie, {CORES} ranks"]
        for name, sample in samples.items():
            if name != f"nutpie, {CORES} ranks":
                limit = TARGETS.get((name.partition(",")[0], n_rows)) if "PyMC" not in name else None
                result.add(f"{n_rows}-{name}", f"{n_rows:,} rows: {name} against nutpie, {CORES} ranks",
                           ratio(sample, ours), at_least=limit)  # fmt: skip
        pymc = [samples[name] for name in ("PyMC's NUTS, alone", f"PyMC's NUTS, {CORES} ranks") if name in samples]
        if pymc:
            result.add(f"{n_rows}-pymc", f"{n_rows:,} rows: PyMC's NUTS alone against {CORES} ranks", ratio(*pymc))
