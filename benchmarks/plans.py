"""The choice of plans.

Ten programs are called with increasing numbers of rows (NumPy arrays), in four ways: by plain Theano with BLAS on two
threads, and on two ranks with the plans *rows*, *controller* and *auto*. Theano has the same BLAS and the same loops. A
choice counts as right if the chosen plan takes at most 1.05 of the time of the other one; its loss is that ratio. The
MLP is then called on 1, 2, 3 and 5 ranks, and compared with the better one of Theano and PyTorch, both on two threads.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import Estimate, Sample, confidence, ratio

MODULE = "benchmarks.contestants.plans"
SIZES = {
    "mlp": (4, 32, 128, 256, 500, 2048),
    "mlp-adam": (4, 32, 128, 512, 2048),
    "logistic": (4, 32, 128, 512, 2048, 4096),
    "autoencoder": (4, 32, 128, 512, 2048),
    "cnn": (4, 32, 128, 512),
    "lstm": (4, 32, 128, 512),
    "transformer": (4, 32, 128, 512),
    "k-means": (4, 128, 1024, 4096),
    "tiny": (4, 128, 4096),
    "regression": (4, 128, 1024, 4096),
}
RIGHT = 1.05
RANKS = (1, 2, 3, 5)


def contestant(plan: str, ranks: int, module: str = MODULE, plain: str = "Theano") -> Contestant:
    """Return a contestant for a plan, or for the plain engine if ``ranks`` is 0."""
    needs = ("lasagne",) if plain == "Theano" else ("pymc",)
    if not ranks:
        return Contestant(plain, module, threads=CORES, needs=needs)
    name = plan if ranks == CORES else f"{plan}, {ranks} ranks"
    return Contestant(name, module, {"plan": plan, "ranks": ranks}, threads=CORES, needs=needs)


def measure(result: Result, rounds: int = 20, programs: tuple[str, ...] = tuple(SIZES)) -> None:
    """Measure all programs on two ranks, and the MLP on 1, 2, 3 and 5 ranks."""
    compare(result, rounds, {program: SIZES[program] for program in programs})
    _measure_ranks(result, rounds)


def compare(
    result: Result, rounds: int, sizes: dict[str, tuple[int, ...]], module: str = MODULE, engine: str = "Theano"
) -> None:
    """Compare the plans on two ranks with the plain engine, and count right choices.

    Parameters
    ----------
    result : Result
    rounds : int
    sizes : dict of tuple of int
        The numbers of rows for each program.
    module : str
        Module of the contestants.
    engine : str
        Name of the plain engine.
    """
    plain = contestant("", 0, module, engine)
    rows, controller, auto = (contestant(plan, CORES, module, engine) for plan in ("rows", "controller", "auto"))
    losses, against = [], {}
    with Contest([plain, rows, controller, auto]) as contest:
        for program, numbers in sizes.items():
            table = []
            for n in numbers:
                samples = contest.run(rounds, contest.alike(program=program, rows=n))
                question = {"program": program, "rows": n, "which_plan": True}
                is_alone = contest.run(1, {"answer": (auto, question)}, warm_up=0)["answer"].median
                chosen, other = (controller, rows) if is_alone else (rows, controller)
                losses.append(samples[chosen.name].median / samples[other.name].median)
                one, base = samples[auto.name], samples[plain.name]
                found, (low, high) = ratio(one, base), confidence(one, base)
                against[f"{program}, {n} rows"] = _ratios(one, base)
                what = f"{program}, {n} rows: auto, of the time of {engine}"
                result.add(f"{program}-{n}", what, found, at_most=1.03)
                times = [1e6 * one.median for one in samples.values()]
                table.append([n, *times, found.value, low, high, chosen.name])
                print(f"{program:12} {n:6} ", *(f"{time:9.1f}" for time in times), end="  ")
                print(f"{found.value:.3f} ({low:.3f}-{high:.3f})", chosen.name, f"{losses[-1]:.2f}", flush=True)
            columns = [*(f"{name} (µs)" for name in samples), f"auto / {engine}", "from", "to", "chosen"]
            result.tables[f"{program}, with 95 % intervals"] = {"columns": ["rows", *columns], "rows": table}
        result.facts = {**result.facts, **contest.facts}
    result.record(f"Calls with the plan auto, of the time of {engine}", "×", against)
    right = 100 * float(np.mean(np.less_equal(losses, RIGHT)))
    result.add("right", "right choices", Estimate(right, right, right), "%", at_least=95)
    result.add("loss", "loss of the worst choice", Estimate(max(losses), min(losses), max(losses)), at_most=1.2)
    mean = math.exp(float(np.mean([math.log(one.median) for one in against.values()])))
    print(f"right {right:.0f} %, worst loss {max(losses):.2f}, geometric mean against {engine} {mean:.3f}")


def _ratios(numerator: Sample, denominator: Sample) -> Sample:
    return Sample([[float(one)] for one in np.divide(numerator.medians, denominator.medians)])


def _measure_ranks(result: Result, rounds: int) -> None:
    plain, autos = contestant("", 0), [contestant("auto", n) for n in RANKS]
    torch = Contestant("PyTorch", MODULE + "_torch", threads=CORES, needs=("torch",), peer=True)
    against, table = {}, []
    with Contest([plain, torch, *autos]) as contest:
        for n in SIZES["mlp"][:-1]:
            samples = contest.run(rounds, contest.alike(program="mlp", rows=n))
            best = min({plain.name, torch.name} & {*samples}, key=lambda name: samples[name].median)
            table.append([n, *(1e6 * one.median for one in samples.values()), best])
            print(f"mlp {n:5} ", *(f"{name} {1e3 * one.median:.3f}" for name, one in samples.items()))
            for auto, n_ranks in zip(autos, RANKS):
                one, other = samples[auto.name], samples[best]
                found, (low, high) = ratio(one, other), confidence(one, other)
                against[f"{n} rows, {n_ranks} ranks"] = _ratios(one, other)
                what = f"mlp, {n} rows: auto on {n_ranks} ranks, of the time of the better of Theano and PyTorch"
                result.add(f"mlp-{n}-{n_ranks}", what, found, at_most=1.03 if n_ranks == CORES else 1.05)
                print(f"  {n_ranks} ranks / {best} {found.value:.3f} ({low:.3f}-{high:.3f})", flush=True)
        columns = ["rows", *(f"{name} (µs)" for name in samples), "better"]
        result.tables["The MLP on several numbers of ranks"] = {"columns": columns, "rows": table}
        result.record("The MLP, of the time of the better of Theano and PyTorch", "×", against, contest.gaps)
        result.facts = {**result.facts, **contest.facts}
