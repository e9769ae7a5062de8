"""A network of 25 million parameters, with Adam.

Four dense layers of 2,500 units with ReLU, and the mean squared error. Theano, one rank, and PyTorch have two threads;
DistributedDataParallel has two processes of one thread. Memory is the sum of the proportional set sizes of all
processes after these steps, in which pages that processes share count once. Bytes are what all ranks together write to
gradients of weights and to updated variables in a step.
"""

from __future__ import annotations

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import Sample, confidence, ratio

MODULE = "benchmarks.contestants.one_copy"
TARGETS = {8: 0.90, 64: 0.88, 256: 1.00}  # rows, and two ranks of the time of the best of one process
WIDTH, LAYERS = 2500, 4


def ranks(n: int, plan: str = "auto") -> Contestant:
    """Return a contestant for a number of ranks and a plan."""
    name = f"{n} ranks" if n > 1 else "1 rank"
    name += "" if plan == "auto" else f", {plan}"
    return Contestant(name, MODULE, {"ranks": n, "plan": plan, "width": WIDTH}, threads=CORES, needs=("lasagne",))


def torch(processes: int, kind: str) -> Contestant:
    """Return a contestant for PyTorch with a kind of Adam: ``"fused"`` or ``"foreach"``."""
    name = f"{'PyTorch' if processes == 1 else 'DDP'}, {kind}"
    arguments = {"kind": kind, "width": WIDTH}
    return Contestant(name, MODULE + "_torch", arguments, processes, CORES // processes, needs=("torch",), peer=True)


def measure(result: Result, rounds: int = 20) -> None:
    """Measure steps of 8, 64 and 256 rows, the memory, and the bytes that are written."""
    plain = Contestant("Theano", MODULE, {"width": WIDTH}, threads=CORES, needs=("lasagne",))
    one, two, four = ranks(1), ranks(2), ranks(4)
    alone, peers = torch(1, "fused"), [torch(2, "fused"), torch(2, "foreach")]
    contestants = [plain, one, alone, two, ranks(2, "rows"), four, ranks(4, "rows"), *peers]
    table = []
    with Contest(contestants) as contest:
        for n, target in TARGETS.items():
            samples = contest.run(rounds, contest.alike(rows=n))
            best = min({plain.name, one.name, alone.name} & {*samples}, key=lambda name: samples[name].median)
            table.append([n, *(1e3 * sample.median for sample in samples.values()), best])
            print(n, "rows:", *(f"{name} {1e3 * sample.median:.1f}" for name, sample in samples.items()), flush=True)
            _add(
                result,
                f"{n}",
                f"{n} rows: two ranks, of the time of the best of one process",
                samples,
                two,
                best,
                target,
            )
            _add(result, f"{n}-four", f"{n} rows: four ranks, of the time of two", samples, four, two.name, 1.10)
            if n == 64:
                result.record("Step of 64 rows", "ms", {k: one.scaled(1e3) for k, one in samples.items()}, contest.gaps)
                for peer in peers:
                    if peer.name in samples:
                        what = f"64 rows: two ranks, of the time of {peer.name}"
                        _add(result, peer.name.replace(", ", "-"), what, samples, two, peer.name, 0.35)
        columns = ["rows", *(f"{name} (ms)" for name in samples), "best of one process"]
        result.tables["Step"] = {"columns": columns, "rows": table}
        memory = contest.run(2, {who.name: (who, {"rows": 0}) for who in contestants if who.module == MODULE})
        result.tables["Memory of all processes"] = {
            "columns": [f"{name} (MB)" for name in memory],
            "rows": [[sample.median / 1e6 for sample in memory.values()]],
        }
        _add(result, "memory", "memory of four ranks, of that of one rank", memory, four, one.name, 1.25)
        result.facts = contest.facts
    n_bytes = 4e-6 * LAYERS * WIDTH**2
    result.tables["Bytes written to gradients and to updated variables in a step (MB)"] = {
        "columns": ["ranks", "controller", "rows"],
        "rows": [[n, n_bytes * (1 + 3), n_bytes * (n + 3)] for n in (1, 2, 4, 8)],
    }


def _add(
    result: Result, key: str, what: str, samples: dict[str, Sample], ours: Contestant, other: str, target: float
) -> None:
    one, base = samples[ours.name], samples[other]
    found, (low, high) = ratio(one, base), confidence(one, base)
    result.add(key, what, found, at_most=target)
    print(f"  {what}: {found.value:.3f} ({low:.3f}-{high:.3f})", flush=True)
