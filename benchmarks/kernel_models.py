"""Models of kernels that were not measured: errors of neural networks and of interpolation.

Matrix products, convolutions and an elementwise function of Theano, in float32 on one thread, are measured on a grid of
sizes and at sizes between its points. Both models of `synkhronos._costs.kernels` are made from the grid and predict the
others. Errors are relative to the measured seconds.
"""

import itertools
import time

from benchmarks.harness import Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import Estimate
from synkhronos._costs.kernels import held_out_errors

_LENGTHS, _BETWEEN = (16, 64, 256, 1024), (32, 128, 512)

#: For each kind of kernel, the sizes along each axis of the grid, and those between.
KINDS = {
    "product": ((_LENGTHS,) * 3, (_BETWEEN,) * 3),  # m, n, k
    "convolution": (((4, 16, 64), (4, 16, 64), (8, 16, 32), (1, 3, 7)), ((8, 32), (8, 32), (12, 24), (5,))),
    "elementwise": (([1 << i for i in range(10, 27, 2)],), ([1 << i for i in range(11, 26, 2)],)),  # bytes
}


def measure(result: Result, rounds: int = 3) -> None:
    """Measure the kernels in `rounds` sweeps, and compare the models."""
    theano = Contestant("Theano, 1 thread", "benchmarks.contestants.kernel_models", {"sweeps": rounds}, threads=1)
    with Contest([theano]) as contest:
        result.facts = contest.facts
    (facts,) = result.facts.values()
    rows = []
    for kind, (axes, between) in KINDS.items():
        held_out = list(itertools.product(*between))
        start = time.perf_counter()
        errors = held_out_errors(axes, facts[f"{kind}/seconds"], held_out, facts[f"{kind}/expected"])
        n_measured = len(facts[f"{kind}/seconds"])
        found = [100 * one for pair in (errors.regressor, errors.interpolation) for one in pair]
        rows.append([kind, n_measured, len(held_out), *found, time.perf_counter() - start])
        for model, (median, _) in (("networks", errors.regressor), ("interpolation", errors.interpolation)):
            found_one = Estimate(100 * median, 100 * median, 100 * median)
            result.add(f"{kind}-{model}", f"Median error of {model}, {kind}", found_one, "%")
    columns = ["kernel", "measured", "predicted", "networks: median error (%)", "largest (%)"]
    columns += ["interpolation: median error (%)", "largest (%)", "seconds to fit"]
    result.tables["Errors at sizes that were not measured"] = {"columns": columns, "rows": rows}
