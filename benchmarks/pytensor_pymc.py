"""PyMC.

The model is a hierarchical regression with 20 covariates and 8 groups, in float64 and PyTensor's default mode. PyMC
alone computes it with one thread and with two, and two ranks compute it divided by its rows. The first part evaluates
the log-probability and its gradient on a million rows. The second part samples one chain by PyMC's NUTS on 200 thousand
rows, with the same seed. Its figure is the wall time divided by the number of leapfrog steps, including those of
tuning.
"""

from __future__ import annotations

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio

MODULE = "benchmarks.contestants.pymc"


def contestants(rows: int, kind: str) -> list[Contestant]:
    """Return contestants for two ranks, and for PyMC alone with two threads and with one."""
    needs = ("pymc",)
    arguments = {"rows": rows, "kind": kind}
    divided = Contestant(f"{CORES} ranks", MODULE, {**arguments, "ranks": CORES}, needs=needs)
    alone = [
        Contestant(f"PyMC, {threads} thread{'s' * (threads > 1)}", MODULE, arguments, threads=threads, needs=needs)
        for threads in (CORES, 1)
    ]
    return [divided, *alone]


def measure(result: Result, rounds: int = 10, evaluations: int = 20, draws: int = 30, nuts_rounds: int = 3) -> None:
    """Measure both parts; a round has `evaluations`, or `draws` after as many for tuning."""
    for kind, rows, number, targets in (
        ("evaluation", 1_000_000, {"times": evaluations}, (1.7, 2.0)),
        ("nuts", 200_000, {"draws": draws}, (1.7, None)),
    ):
        divided, *alone = contestants(rows, kind)
        with Contest([divided, *alone]) as contest:
            samples = contest.run(rounds if kind == "evaluation" else nuts_rounds, contest.alike(**number))
            result.facts.update({f"{kind}, {name}": facts for name, facts in contest.facts.items()})
        what = "log-probability and gradient" if kind == "evaluation" else "a leapfrog step of NUTS"
        result.record(f"{rows:,} rows: {what}", "ms", {name: one.scaled(1e3) for name, one in samples.items()})
        for one, target in zip(alone, targets):
            found = ratio(samples[one.name], samples[divided.name])
            limits = {} if target is None else {"at_least": target}
            result.add(f"{kind}-{one.threads}", f"{what}: {CORES} ranks against {one.name}", found, **limits)
