"""More ranks than cores.

The training step of the CNN, with 500 images in all, is computed by four ranks on two cores, and by two ranks.
"""

from benchmarks import training
from benchmarks.harness import Contest
from benchmarks.results import Result
from benchmarks.samples import ratio


def measure(result: Result, rounds: int = 8, steps: int = 3) -> None:
    """Measure training steps; a round has `steps` on each number of ranks."""
    two, four = training.synkhronos("cnn", 2), training.synkhronos("cnn", 4)
    with Contest([two, four]) as contest:
        training.check_networks(contest.facts)
        samples = contest.run(rounds, contest.alike(batch=500, steps=steps))
    result.record("Step of 500 images", "ms", {label: sample.scaled(1e3) for label, sample in samples.items()})
    found = ratio(samples[four.name], samples[two.name])
    result.add("four", "The time of four ranks on two cores against that of two", found, at_most=1.3)
