"""A shuffled excerpt: picking rows of 12 kB in random order from 1 GB.

One process indexes a NumPy array with a permutation. Synkhronos calls a function of negligible cost with the same
permutation as `batch`, and each of two ranks copies its half of the rows. The permutation has all rows, or 512 random
ones.
"""

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio

WIDTH = 3072  # float32


def measure(result: Result, rounds: int = 6, n_bytes: int = 10**9) -> None:
    """Measure permutations of all rows and of 512 rows of an array of `n_bytes`."""
    shape = {"rows": n_bytes // (4 * WIDTH), "width": WIDTH}
    numpy = Contestant("NumPy, one process", "benchmarks.contestants.excerpt", {"ranks": 0, **shape})
    ranks = Contestant("Synkhronos, 2 ranks", "benchmarks.contestants.excerpt", {"ranks": CORES, **shape})
    with Contest([numpy, ranks]) as contest:
        full = contest.run(rounds, contest.alike(batch=shape["rows"], steps=1))
        some = contest.run(2 * rounds, contest.alike(batch=512, steps=50))
    for title, samples in (("All rows", full), ("512 rows", some)):
        result.record(title, "ms", {label: sample.scaled(1e3) for label, sample in samples.items()})
    found = ratio(full[numpy.name], full[ranks.name])
    result.add("all", "A permutation of all rows, two ranks against NumPy in one process", found, at_least=1.6)
    result.add("minibatch", "… 512 random rows", ratio(some[numpy.name], some[ranks.name]))
