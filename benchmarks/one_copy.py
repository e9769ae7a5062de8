"""A network of 25 million parameters, with Adam.

Four dense layers of 2,500 units with ReLU, and the mean squared error. Theano, one rank, and PyTorch have two threads;
DistributedDataParallel has two processes of one thread. Memory is the sum of the proportional set sizes of all
processes after the steps of 64 rows, in which pages that processes share count once. Bytes are what all ranks together
write to gradients of weights and to updated variables in a step.
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
    by_rows = [ranks(2, "rows"), ranks(4, "rows")]
    main = [plain, one, alone, two, four]
    table = []
    with Contest([*main, *by_rows, *peers]) as contest:
        for n, target in TARGETS.items():
            asked = [*main, *peers] if n == 64 else main
            samples = contest.run(rounds, {who.name: (who, {"rows": n}) for who in asked})
            best = min({plain.name, one.name, alone.name} & {*samples}, key=lambda name: samples[name].median)
            table.append([n, *(1e3 * samples[who.name].median for who in main if who.name in samples), best])
            print(n, "rows:", *(f"{name} {1e3 * sample.median:.1f}" for name, sample in samples.items()), flush=True)
            what = f"{n} rows: two ranks, of the time of the best of one process"
            _add(result, f"{n}", what, samples, two, best, target)
            _add(result, f"{n}-four", f"{n} rows: four ranks, of the time of two", samples, four, two.name, 1.10)
            for peer in peers:
                if peer.name in samples:
                    what = f"{n} rows: two ranks, of the time of {peer.name}"
                    _add(result, peer.name.replace(", ", "-"), what, samples, two, peer.name, 0.35)
            if n == 64:
                memory = {who.name: (who, {"rows": 0}) for who in (one, two, four)}
                memory = contest.run(2, memory)
                samples |= contest.run(max(1, rounds // 4), {who.name: (who, {"rows": n}) for who in by_rows})
                memory |= contest.run(2, {who.name: (who, {"rows": 0}) for who in by_rows})
                result.record("Step of 64 rows", "ms", {k: one.scaled(1e3) for k, one in samples.items()}, contest.gaps)
        present = [who.name for who in main if who.name not in contest.gaps]
        columns = ["rows", *(f"{name} (ms)" for name in present), "best of one process"]
        result.tables["Step"] = {"columns": columns, "rows": table}
        result.tables["Memory of all processes"] = {
            "columns": [f"{name} (MB)" for name in memory],
            "rows": [[sample.median / 1e6 for sample in memory.values()]],
        }
        _add(result, "memory", "memory of four ranks, of that of one rank", memory, four, one.name, 1.25)
        result.facts = contest.facts
    n_bytes = 4e-6 * LAYERS * WIDTH**2
    result.tables["Bytes written to gradients and to updated variables in a step (MB)"] = {
        "columns": ["ranks", "controller", "rows, products in slices", "rows, more than 416 rows a call"],
        "rows": [[n, n_bytes * (1 + 3), n_bytes * (1 + 3), n_bytes * (n + 3)] for n in (1, 2, 4, 8)],
    }


def _add(
    result: Result, key: str, what: str, samples: dict[str, Sample], ours: Contestant, other: str, target: float
) -> None:
    one, base = samples[ours.name], samples[other]
    found, (low, high) = ratio(one, base), confidence(one, base)
    result.add(key, what, found, at_most=target)
    print(f"  {what}: {found.value:.3f} ({low:.3f}-{high:.3f})", flush=True)
