"""A training step as one message, and as three.

On two ranks, a function stores a gradient that is as long as the parameters. An all-reduce averages it, and another
function subtracts it from the parameters. These three commands are sent to the workers in one message, by
`synk.sequence`, or in three. Steps follow one another without a pause. The time saved by one message does not depend on
the number of parameters: it is that of two messages, their answers, and the planning of two calls. The memory traffic
of large parameters is the same.
"""

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import difference

SIZES = {
    "1 thousand": (1_000, 500),
    "10 thousand": (10_000, 500),
    "100 thousand": (100_000, 200),
    "1 million": (1_000_000, 50),
    "25 million": (25_000_000, 4),
}
SMALL = ("1 thousand", "10 thousand")  # sizes that have a target
TARGET = -40  # µs


def measure(result: Result, rounds: int = 12) -> None:
    """Measure steps of each size."""
    module = "benchmarks.contestants.step"
    one = Contestant("One message", module, {"ranks": CORES, "at_once": True})
    three = Contestant("Three messages", module, {"ranks": CORES, "at_once": False})
    with Contest([three, one]) as contest:
        for size, (n, steps) in SIZES.items():
            samples = contest.run(rounds, contest.alike(n=n, steps=steps))
            microseconds = {name: sample.scaled(1e6) for name, sample in samples.items()}
            result.record(f"{size} parameters", "µs", microseconds)
            found = difference(microseconds[one.name], microseconds[three.name])
            limit = TARGET if size in SMALL else None
            result.add(size, f"{size} parameters, one message against three", found, "µs", at_most=limit)
