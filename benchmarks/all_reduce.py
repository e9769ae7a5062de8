"""All-reduce of float32 over two ranks.

One array of each rank is summed in place; Synkhronos also computes the average. MPICH's Allreduce is called through
mpi4py, gloo's through PyTorch, and DeepSpeed's, which uses shared memory, through its function for inference. Each of
them runs in two processes. A barrier, which is not timed, precedes each call, and the time of the slower process
counts. A call of Synkhronos is timed on the controller, and includes the command to the workers. There are two bounds:
a flag that is passed back and forth, and, for arrays larger than the caches, the memory bandwidth. For the latter, each
array is read once and written once, at the speed at which two processes add arrays of 100 MB.
"""

import os

from benchmarks import limits
from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import absolute, ratio

AVERAGE = "Synkhronos, 2 ranks, average"
MEMORY = "memory, 2 cores"
SIZES = {"10 thousand": (10_000, 500), "1 million": (1_000_000, 50), "25.6 million": (25_600_000, 4)}


def measure(result: Result, rounds: int = 15) -> None:
    """Measure all-reduces of each size."""
    ranks = Contestant("Synkhronos, 2 ranks", "benchmarks.contestants.all_reduce_synkhronos", {"ranks": CORES})
    two = {"processes": CORES, "peer": True}
    mpich = Contestant("MPICH", "benchmarks.contestants.all_reduce_mpi", needs=("mpi4py", "mpich"), mpi=True, **two)
    gloo = Contestant("gloo", "benchmarks.contestants.all_reduce_gloo", needs=("torch",), **two)
    module = "benchmarks.contestants.all_reduce_deepspeed"
    # DeepSpeed uses shared memory if LOCAL_SIZE is the number of ranks; the memory's name contains the port.
    local = {"LOCAL_SIZE": str(CORES), "MASTER_PORT": str(os.getpid()), "DS_ACCELERATOR": "cpu"}
    deepspeed = Contestant("DeepSpeed", module, needs=("torch", "deepspeed"), environment=local, **two)
    samples = {}
    with Contest([mpich, gloo, deepspeed, ranks], aside=[limits.LIMITS]) as contest:
        for size, (n, steps) in SIZES.items():
            average = {AVERAGE: (ranks, {"n": n, "steps": steps, "op": "avg"})}
            turns = {**contest.alike(n=n, steps=steps), **average, **limits.turns("add", "flag")}
            measured = contest.run(rounds, turns)
            bounds = {
                "a flag there and back": limits.round_trip(measured.pop("flag")),
                MEMORY: limits.memory(measured.pop("add"), 2 * CORES * 4 * n),
            }
            samples[size] = {**measured, MEMORY: bounds[MEMORY]}
            milliseconds, bounds = ({k: v.scaled(1e3) for k, v in of.items()} for of in (measured, bounds))
            result.record(size, "ms", milliseconds, contest.gaps, bounds)
    result.facts = contest.facts

    targets = {"25.6 million": (4, None, 3), "1 million": (3, None, None), "10 thousand": (None, None, None)}
    for size, least in targets.items():
        for peer, limit in zip((mpich, gloo, deepspeed), least):
            found = contest.gaps.get(peer.name) or ratio(samples[size][peer.name], samples[size][ranks.name])
            result.add(f"{peer.name}-{size}", f"{size}, two ranks against {peer.name}", found, at_least=limit)
        if limit := least[0]:
            found = contest.gaps.get(mpich.name) or ratio(samples[size][mpich.name], samples[size][AVERAGE])
            result.add(f"avg-{size}", f"… its average against {mpich.name}'s sum", found, at_least=limit)
    large = samples["25.6 million"]
    result.add("memory", "25.6 million against the bound", ratio(large[MEMORY], large[ranks.name]), at_least=0.6)
    small = absolute(samples["10 thousand"][ranks.name].scaled(1e6))
    result.add("10 thousand", "10 thousand, two ranks", small, "µs", at_most=25)
