"""The instruments.

Time that `profile` and `trace` add to a training step of the MLP 784-800-800-10 on two ranks. Steps with and without
them alternate in one session, and the median with each of them is compared with the median without.
"""

from benchmarks import training
from benchmarks.harness import Contest
from benchmarks.results import Result
from benchmarks.samples import ratio

PLAIN = "neither"


def measure(result: Result, rounds: int = 40, steps: int = 10) -> None:
    """Measure training steps; a round has `steps` with each instrument, and as many without."""
    ranks = training.synkhronos("mlp")
    with Contest([ranks]) as contest:
        parameters = {"batch": 500, "steps": steps}
        turns = {name: (ranks, {**parameters, "instrument": name}) for name in (PLAIN, "profile", "trace")}
        samples = contest.run(rounds, turns)
    result.record("Step of 500 images", "ms", {name: sample.scaled(1e3) for name, sample in samples.items()})
    for name, limit in (("profile", 1.01), ("trace", None)):
        what = f"A step in `{name}`, relative to one without"
        result.add(name, what, ratio(samples[name], samples[PLAIN]), at_most=limit)
