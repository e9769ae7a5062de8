"""A training step of an MLP on PyTensor, 784-800-800-10.

With PyTensor's default linker, numba: 500 images for each step in all, as float32. Both make steps with Nesterov's
momentum; PyTensor alone has one core, and makes a step in one function.
"""

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio


def contestants(module: str, **arguments: object) -> tuple[Contestant, Contestant]:
    """Give PyTensor alone, and on ranks."""
    names = {0: "PyTensor, 1 thread", CORES: f"Synkhronos, {CORES} ranks"}
    alone, together = [
        Contestant(name, f"benchmarks.contestants.{module}", {"ranks": ranks, **arguments}, needs=("pytensor",))
        for ranks, name in names.items()
    ]
    return alone, together


def measure(result: Result, rounds: int = 10, steps: int = 12) -> None:
    """Measure; `steps` are those of one round."""
    alone, together = contestants("pytensor_mlp")
    with Contest([alone, together]) as contest:
        samples = contest.run(rounds, contest.alike(batch=500, steps=steps))
        result.facts = contest.facts
    result.record("Step of 500 images", "ms", {label: sample.scaled(1e3) for label, sample in samples.items()})
    found = ratio(samples[alone.name], samples[together.name])
    result.add("pytensor", "Two ranks against PyTensor on one thread, default linker", found, at_least=1.6)
