"""A training step of an MLP on PyTensor, 784-800-800-10.

Steps have 500 images in all, as float32, and the linker is numba, PyTensor's default. The update rule is Nesterov
momentum. PyTensor alone has one core, and computes a step in one function.
"""

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio


def contestants(module: str, **arguments: object) -> tuple[Contestant, Contestant]:
    """Return contestants for PyTensor alone, and for ranks."""
    names = {0: "PyTensor, 1 thread", CORES: f"Synkhronos, {CORES} ranks"}
    alone, together = [
        Contestant(name, f"benchmarks.contestants.{module}", {"ranks": ranks, **arguments}, needs=("pytensor",))
        for ranks, name in names.items()
    ]
    return alone, together


def measure(result: Result, rounds: int = 10, steps: int = 12) -> None:
    """Measure training steps; a round has `steps` of each contestant."""
    alone, together = contestants("pytensor_mlp")
    with Contest([alone, together]) as contest:
        samples = contest.run(rounds, contest.alike(batch=500, steps=steps))
        result.facts = contest.facts
    result.record("Step of 500 images", "ms", {label: sample.scaled(1e3) for label, sample in samples.items()})
    found = ratio(samples[alone.name], samples[together.name])
    result.add("pytensor", "Two ranks against PyTensor on one thread, default linker", found, at_least=1.6)
