"""All-reduce of float32 over two ranks.

The sum of one array of each rank, in place. MPICH's Allreduce is called through mpi4py, gloo's through PyTorch, each in
two processes after a barrier that is not timed; the slower process's time counts. A call of Synkhronos is timed in the
master and has the command to the workers in it.
"""

from benchmarks.cli import main
from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import absolute, ratio

SIZES = {"10 thousand": (10_000, 500), "1 million": (1_000_000, 50), "25.6 million": (25_600_000, 4)}


def measure(result: Result, rounds: int = 15) -> None:
    """Measure."""
    ranks = Contestant("Synkhronos, 2 ranks", "benchmarks.contestants.all_reduce_synkhronos", {"ranks": CORES})
    two = {"processes": CORES, "peer": True}
    mpich = Contestant("MPICH", "benchmarks.contestants.all_reduce_mpi", needs=("mpi4py", "mpich"), mpi=True, **two)
    gloo = Contestant("gloo", "benchmarks.contestants.all_reduce_gloo", needs=("torch",), **two)
    samples = {}
    with Contest([mpich, gloo, ranks]) as contest:
        for size, (n, steps) in SIZES.items():
            samples[size] = contest.run(rounds, contest.alike(n=n, steps=steps))
            result.record(size, "ms", {k: v.scaled(1e3) for k, v in samples[size].items()}, contest.gaps)
    result.facts = contest.facts

    targets = {"25.6 million": (2.5, 2.5), "1 million": (1.3, None), "10 thousand": (None, None)}
    for size, limits in targets.items():
        for peer, limit in zip((mpich, gloo), limits):
            found = contest.gaps.get(peer.name) or ratio(samples[size][peer.name], samples[size][ranks.name])
            result.add(f"{peer.name}-{size}", f"{size}, two ranks against {peer.name}", found, at_least=limit)
    small = absolute(samples["10 thousand"][ranks.name].scaled(1e6))
    result.add("10 thousand", "10 thousand, two ranks", small, "µs", at_most=120)


if __name__ == "__main__":
    main(__spec__.name)
