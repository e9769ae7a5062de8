"""The choice of plans.

Ten programs are called with increasing numbers of rows (NumPy arrays), in four ways: by plain Theano with BLAS on two
threads, and on two ranks with the plans *rows*, *controller* and *auto*. Theano has the same BLAS and the same loops. A
choice counts as right if the chosen plan takes at most 1.05 of the time of the other one. The MLP is then called on 1,
2, 3 and 5 ranks, and compared with the better one of Theano and PyTorch, both on two threads.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio

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


def contestant(plan: str, ranks: int) -> Contestant:
    """Return a contestant for a plan, or for plain Theano if ``ranks`` is 0."""
    if not ranks:
        return Contestant("Theano", MODULE, threads=CORES, needs=("lasagne",))
    name = plan if ranks == CORES else f"{plan}, {ranks} ranks"
    return Contestant(name, MODULE, {"plan": plan, "ranks": ranks}, threads=CORES, needs=("lasagne",))


def measure(result: Result, rounds: int = 20, programs: tuple[str, ...] = tuple(SIZES)) -> None:
    """Measure all programs on two ranks, and the MLP on 1, 2, 3 and 5 ranks."""
    _measure_plans(result, rounds, programs)
    _measure_ranks(result, rounds)


def _measure_ranks(result: Result, rounds: int) -> None:
    plain, autos = contestant("", 0), [contestant("auto", n) for n in RANKS]
    torch = Contestant("PyTorch", MODULE + "_torch", threads=CORES, needs=("torch",), peer=True)
    with Contest([plain, torch, *autos]) as contest:
        for n in SIZES["mlp"][:-1]:
            samples = contest.run(rounds, contest.alike(program="mlp", rows=n))
            times = {name: sample.scaled(1e3) for name, sample in samples.items()}
            result.record(f"mlp, {n} rows, by ranks", "ms", times)
            best = min({plain.name, torch.name} & {*samples}, key=lambda name: samples[name].median)
            line = [f"{name} {one.median:.3f}" for name, one in times.items()]
            for auto, n_ranks in zip(autos, RANKS):
                found = ratio(samples[auto.name], samples[best])
                what = f"mlp, {n} rows: auto on {n_ranks} ranks, of the time of the better of Theano and PyTorch"
                result.add(f"mlp-{n}-{n_ranks}", what, found, at_most=1.03 if n_ranks == CORES else 1.05)
                line.append(f"{n_ranks} ranks / {best} {found.value:.3f} ({found.low:.3f}-{found.high:.3f})")
            print(f"mlp {n:5} ", "  ".join(line), flush=True)
        result.facts = {**result.facts, **contest.facts}


def _measure_plans(result: Result, rounds: int, programs: tuple[str, ...]) -> None:
    plain, rows, controller, auto = (
        contestant(plan, CORES if plan else 0) for plan in ("", "rows", "controller", "auto")
    )
    losses, against = [], []
    with Contest([plain, rows, controller, auto]) as contest:
        for program in programs:
            for n in SIZES[program]:
                samples = contest.run(rounds, contest.alike(program=program, rows=n))
                times = {name: sample.scaled(1e3) for name, sample in samples.items()}
                result.record(f"{program}, {n} rows", "ms", times)
                found = ratio(samples[auto.name], samples[plain.name])
                result.add(f"{program}-{n}", f"{program}, {n} rows: auto, of the time of Theano", found, at_most=1.03)
                best = min(samples[one.name].median for one in (rows, controller))
                losses.append(samples[auto.name].median / best)
                against.append(found.value)
                print(
                    f"{program:12} {n:5} ",
                    "  ".join(f"{name} {one.median:8.3f}" for name, one in times.items()),
                    f" auto/Theano {found.value:.3f} ({found.low:.3f}-{found.high:.3f})  loss {losses[-1]:.2f}",
                    flush=True,
                )
        result.facts = contest.facts
    right = float(np.mean(np.less_equal(losses, RIGHT)))
    mean = np.exp(np.mean(np.log(against)))
    print(f"right {right:.3f}, worst loss {max(losses):.2f}, geometric mean against Theano {mean:.3f}")
