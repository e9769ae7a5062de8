"""Memory.

The memory is the sum of the proportional set sizes of all ranks, in which pages that processes share count once. A data
set of 2 GB is filled, and each of two ranks reads all of it. During collectives on a variable of 250 MB, the memory is
sampled continuously. The figure is the highest sample minus the memory before the collective and that of its results.
Its unit is one copy of the variable, with a tolerance of 0.05 copies. (The results of `all_gather` are the new values;
the old values exist until the new ones are complete.)
"""

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import absolute

TOLERANCE = 0.05  # copies, for other memory that changes while a collective runs
COLLECTIVES = ("broadcast", "all_reduce", "reduce", "gather", "all_gather")


def measure(result: Result, rounds: int = 2, n_bytes: int = 2 * 10**9) -> None:
    """Measure a data set of `n_bytes`, and collectives on variables of an eighth of that size."""
    ranks = Contestant("Synkhronos, 2 ranks", "benchmarks.contestants.memory", {"ranks": CORES})
    with Contest([ranks]) as contest:
        turns = {"data": (ranks, {"what": "data", "n_bytes": n_bytes})}
        turns.update((name, (ranks, {"what": name, "n_bytes": n_bytes // 8})) for name in COLLECTIVES)
        samples = contest.run(rounds, turns, warm_up=0)
    data = samples.pop("data")
    result.record("Of a data set, relative to its size", "×", {ranks.name: data})
    result.record("Of a collective, beyond variables and result", "copies", samples)
    result.add("data", "A data set of 2 GB, all ranks together, relative to its size", absolute(data), at_most=1.05)
    for name, sample in samples.items():
        result.add(name, f"`{name}`, beyond variables and result", absolute(sample), "copies", at_most=1 + TOLERANCE)
