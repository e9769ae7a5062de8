"""Collectives inside a function.

Steps of MLPs with Adam, in float32, are computed in two ways. *Apart*: `make_train_function`, which consists of a
function for the gradient, an all-reduce, and a function for the update, with Synkhronos's flat Adam or with Lasagne's.
*Inside*: one function, in which gradients are `averaged` and passed to Lasagne's Adam. The large network is
784-800-800-10, with 500 rows in each step, drawn at random. The small network is 100-50-10, with increasing numbers of
rows, in order; they show from which number on two ranks are faster than one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import Estimate, ratio

LARGE, SMALL = (784, 800, 800, 10), (100, 50, 10)


def contestants(widths: tuple[int, ...]) -> list[Contestant]:
    """Return contestants for plain Theano, and for both ways on two ranks."""
    module = "benchmarks.contestants.inside"
    arguments: dict[str, Any] = {"widths": list(widths)}
    return [
        Contestant("Theano", module, {**arguments, "kind": "theano"}, threads=1, needs=("lasagne",)),
        *(
            Contestant(f"2 ranks, {kind}", module, {**arguments, "kind": kind, "ranks": CORES}, needs=("lasagne",))
            for kind in ("apart", "apart, Lasagne", "inside")
        ),
    ]


def measure(
    result: Result, rounds: int = 10, steps: int = 10, sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
) -> None:
    """Measure both networks; `sizes` are the numbers of rows for the small one."""
    with Contest(contestants(LARGE)) as contest:
        samples = contest.run(rounds, contest.alike(batch=500, steps=steps))
        result.facts = contest.facts
    result.record("784-800-800-10, 500 rows", "ms", {name: one.scaled(1e3) for name, one in samples.items()})
    found = ratio(samples["2 ranks, inside"], samples["2 ranks, apart"])
    result.add("large", "A step inside, of the time of one apart", found, at_most=1.03)
    found = ratio(samples["2 ranks, inside"], samples["2 ranks, apart, Lasagne"])
    result.add("large-lasagne", "… of one apart with Lasagne's Adam, too", found)
    found = ratio(samples["2 ranks, inside"], samples["Theano"])
    result.add("large-theano", "… of the time of Theano alone", found)

    ratios = {}
    with Contest(contestants(SMALL)) as contest:
        for size in sizes:
            samples = contest.run(rounds, contest.alike(batch=size, steps=20 * steps, shuffle=False))
            microseconds = {name: one.scaled(1e6) for name, one in samples.items()}
            result.record(f"100-50-10, {size} rows", "µs", microseconds)
            ratios[size] = ratio(samples["2 ranks, inside"], samples["Theano"])
            what = f"100-50-10, {size} rows inside, of the time of Theano alone"
            result.add(f"small-{size}", what, ratios[size], at_most=1.3 if size == 64 else None)
            found = ratio(samples["2 ranks, apart"], samples["Theano"])
            result.add(f"small-{size}-apart", "… apart", found)
    result.add("gain", "Rows from which on two ranks gain", _crossing(ratios), "rows")


def _crossing(ratios: dict[int, Estimate]) -> Estimate | str:
    """Return the size at which the ratio falls to 1, interpolated between the logarithms of sizes."""
    sizes, values = list(ratios), [one.value for one in ratios.values()]
    below = next((i for i, value in enumerate(values) if value <= 1), None)
    if below is None:
        return f"not up to {sizes[-1]} rows"
    if below == 0:
        return Estimate(sizes[0], 0, sizes[0])
    low, high = sizes[below - 1], sizes[below]
    part = (values[below - 1] - 1) / (values[below - 1] - values[below])
    return Estimate(float(np.exp(np.log(low) + part * np.log(high / low))), low, high)
