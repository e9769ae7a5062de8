"""Several nodes.

Two hosts are network namespaces of one machine. Each has its own name, address and shared memory, and all hosts
together have two cores. The link between them is as fast as these cores allow, or limited to 1 Gbit/s in each direction
by a token bucket. MPICH's Allreduce does not distinguish hosts and runs in four processes. gloo runs in four processes,
and in one process on each host, where it sends the minimum. UCX passes 256 KiB at a time to TCP for Synkhronos, which
sets that size. For MPICH's Allreduce it passes 64 KiB, its default, because larger sizes take longer. DDP has one
process with one thread on each host. One program starts all contestants, and they are timed as in the other figures.

Training steps have 500 images in all. Every host has received their rows before the link is limited. The load of a node
leader is that of all processes on its host while the script sleeps. The bytes of rows are those that `Shipping` sends.

The predictions assume that an exchange over N hosts takes (N−1)·α + 2·(N−1)/N·m·β for m bytes of float32. α is the time
of an all-reduce of few numbers on two hosts with one rank each, on the unlimited link; each further host is assumed to
add as much. β is the remaining time, for each byte, of an all-reduce of many numbers on two hosts with two ranks each.
The time of a step is that of plain Theano for one host's images, plus that of the exchange.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from benchmarks import call, training
from benchmarks.harness import CORES, Contest
from benchmarks.nodes_predicted import Line, predict
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import Sample, absolute, difference, ratio
from tests.helpers.namespace_hosts import Hosts, reason_to_skip

RATE = "1gbit"
LIMITED, UNLIMITED = "1 Gbit/s", "unlimited line"
LINES = {UNLIMITED: None, LIMITED: RATE}
HALVES = "bfloat16"
FEW = 10_000  # elements, so few that latency determines the time
BATCH = 500
EPOCHS = 12  # of shuffled rows, after which each host has received all of them
ROWS = 4000  # of constant data, 3 kB each
ALL_REDUCE = "benchmarks.contestants.all_reduce"


def measure(
    result: Result, rounds: int = 6, elements: int = 25_600_000, calls: int = 500, steps: int = 8, seconds: int = 10
) -> None:
    """Measure all parts; a round has `steps` training steps, and an idle node leader is observed for `seconds`."""
    reason = reason_to_skip()
    if reason is not None:
        result.add("hosts", result.title, reason)
        return
    with Hosts(2) as hosts:
        lines = measure_exchange(result, hosts, rounds, elements)
        measure_calls(result, hosts, rounds, calls, seconds)
        alone = {model: measure_steps(result, hosts, model, rounds, steps) for model in ("mlp", "cnn")}
        measure_rows(result, hosts)
    predict(result, lines, alone["mlp"])


def measure_exchange(result: Result, hosts: Hosts, rounds: int, elements: int) -> dict[str, Line]:
    """Measure all-reduces over two hosts; return the cost model of each link and wire dtype.

    It is computed from an all-reduce of few elements with one rank on each host, and one of many with two.
    """
    ours = on(hosts, Contestant("Synkhronos, 2 × 2 ranks", f"{ALL_REDUCE}_synkhronos", {"ranks": CORES}))
    halves = in_halves(ours)
    lone = replace(ours, name="Synkhronos, 2 × 1 ranks", arguments={"ranks": 1})
    four = {"processes": 4, "peer": True, "hosts": hosts}
    mpich = Contestant("MPICH, 2 × 2 processes", f"{ALL_REDUCE}_mpi", needs=("mpi4py", "mpich"), mpi=True, **four)
    gloo = Contestant("gloo, 2 × 2 processes", f"{ALL_REDUCE}_gloo", needs=("torch",), **four)
    single = replace(gloo, name="gloo, 2 × 1 processes", processes=2)
    samples: dict[str, dict[str, Sample]] = {}
    lines = {}
    with Contest([mpich, gloo, single, lone, ours, halves]) as contest:
        for line, rate in LINES.items():
            hosts.limit(rate)
            few = contest.run(rounds, contest.alike(n=FEW, steps=50))
            samples[line] = contest.run(rounds, contest.alike(n=elements, steps=2))
            for n, measured in ((FEW, few), (elements, samples[line])):
                milliseconds = {label: sample.scaled(1e3) for label, sample in measured.items()}
                result.record(f"All-reduce of {n:,} float32, {line}", "ms", milliseconds, contest.gaps)
            for one in (ours, halves):
                kind = "" if one is ours else f", {HALVES}"
                found = Line.through(few[lone.name].median, FEW, samples[line][one.name].median, elements)
                if rate is not None:  # the token bucket does not delay few numbers, which do not measure the link
                    found = replace(found, alpha=lines[UNLIMITED + kind].alpha)
                lines[line + kind] = found
        hosts.limit(None)
    result.facts.update(contest.facts)

    what = f"All-reduce of {elements / 1e6:g} million, 2 hosts × 2 ranks"
    of = samples[UNLIMITED]
    found = contest.gaps.get(mpich.name) or ratio(of[mpich.name], of[ours.name])
    result.add("mpich", f"{what}, unlimited line, against MPICH's of 4 ranks", found, at_least=3)
    of = samples[LIMITED]
    result.add("gigabit", f"{what}, 1 Gbit/s", absolute(of[ours.name].scaled(1e3)), "ms", at_most=881)
    found = contest.gaps.get(single.name) or ratio(of[ours.name], of[single.name])
    result.add("gloo", "… its time against that of gloo with one process on each host", found, at_most=1.03)
    found = contest.gaps.get(gloo.name) or ratio(of[gloo.name], of[ours.name])
    result.add("gloo-4", "… against gloo of 4 ranks", found)
    found = contest.gaps.get(single.name) or ratio(of[single.name], of[lone.name])
    result.add("gloo-1", "… with one rank on each host, against gloo with one process on each", found)
    result.add(HALVES, f"… {HALVES} against float32", ratio(of[ours.name], of[halves.name]), at_least=1.9)
    return lines


def measure_calls(result: Result, hosts: Hosts, rounds: int, calls: int, seconds: int) -> None:
    """Measure calls of a trivial function, and the load of a node leader between calls."""
    one = Contestant("Synkhronos, 1 host × 2 ranks", "benchmarks.contestants.call", {"ranks": CORES, "kind": "data"})
    two = on(hosts, replace(one, name="Synkhronos, 2 hosts × 1 rank", arguments={"ranks": 1, "kind": "data"}))
    with Contest([one, two]) as contest:
        for case, limit in (("succession", 150), ("apart", 2000)):
            title, pause, _ = call.CASES[case]
            n = calls // 4 if pause else calls
            samples = contest.run(rounds, contest.alike(calls=n, pause=pause))
            microseconds = {label: sample.scaled(1e6) for label, sample in samples.items()}
            result.record(f"Trivial calls: {title}", "µs", microseconds)
            found = difference(microseconds[two.name], microseconds[one.name])
            result.add(case, f"2 hosts × 1 rank over 1 host × 2 ranks, {title}", found, "µs", at_most=limit)
        shares = Sample([[share_of_a_core(hosts, seconds)] for _ in range(3)])
    result.record("An idle leader", "% of a core", {"Synkhronos, 2 hosts × 1 rank": shares})
    result.add("idle", "A leader that waits", absolute(shares), "% of a core", at_most=3)


def share_of_a_core(hosts: Hosts, seconds: float) -> float:
    """Return the load of one core by the processes of the second host, in per cent, while this process sleeps."""

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in hosts.processes(hosts.names[1]))

    time.sleep(1)  # until the last command has ended, and waiting processes sleep for the longest intervals
    start, before = time.perf_counter(), used()
    time.sleep(seconds)
    return 100 * (used() - before) / (time.perf_counter() - start)


def measure_steps(result: Result, hosts: Hosts, model: str, rounds: int, steps: int) -> Sample:
    """Measure training steps on a link of 1 Gbit/s; return the seconds of plain Theano for one host's images."""
    ours = on(hosts, replace(training.synkhronos(model, 1), name="Synkhronos, 2 hosts × 1 rank"))
    halves = in_halves(ours)
    ddp = replace(training.torch(model, 2), name="PyTorch DDP, 2 hosts × 1 process", hosts=hosts)
    alone = training.theano(model)
    share = f"{alone.name}, {BATCH // 2} images"
    with Contest([ddp, ours, halves], aside=[alone]) as contest:
        training.check_networks(contest.facts)
        contest.run(1, contest.alike(batch=BATCH, steps=EPOCHS * training.ROWS[model] // BATCH), warm_up=0)
        hosts.limit(RATE)
        of_one_host = {share: BATCH // 2, f"{alone.name}, {BATCH} images": BATCH}
        turns = {name: (alone, {"batch": batch, "steps": steps}) for name, batch in of_one_host.items()}
        turns.update(contest.alike(batch=BATCH, steps=steps))
        samples = contest.run(rounds, turns)
        hosts.limit(None)
    milliseconds = {label: sample.scaled(1e3) for label, sample in samples.items()}
    result.record(f"Step of the {model.upper()}, {BATCH} images, {LIMITED}", "ms", milliseconds, contest.gaps)
    result.facts.update({f"{name} ({model})": facts for name, facts in contest.facts.items()})

    targets = {"mlp": (0.95, 1.5), "cnn": (1.2, None)}
    for one, limit in zip((ours, halves), targets[model]):
        what = f"{model.upper()} step, 2 hosts × 1 rank, 1 Gbit/s{'' if one is ours else f', {HALVES}'}, against DDP"
        found = contest.gaps.get(ddp.name) or ratio(samples[ddp.name], samples[one.name])
        result.add(model if one is ours else f"{model}-{HALVES}", what, found, at_least=limit)
    return samples[share]


def measure_rows(result: Result, hosts: Hosts) -> None:
    """Count the bytes of rows that are sent in epochs over data that does not change."""
    ship = on(hosts, Contestant("Synkhronos, 2 hosts × 1 rank", "benchmarks.contestants.ship", {"ranks": 1, "n": ROWS}))
    epochs, orders = 8, ("in order", "shuffled")
    with Contest([ship]) as contest:
        n_bytes = contest.facts[ship.name]["bytes"]
        rows, others = {}, {}
        for order in orders:
            turn = {order: (ship, {"epochs": epochs, "batch": BATCH, "shuffle": order == "shuffled"})}
            *rows[order], others[order] = contest.run(1, turn, warm_up=0)[order].rounds[0]
            shown = {f"epoch {i + 1}": Sample([[n / 1e6]]) for i, n in enumerate(rows[order])}
            result.record(f"Rows sent of {n_bytes / 1e6:.3g} MB, {order}", "MB", shown)
    after = Sample([rows["in order"][1:]])
    result.add("again", "Bytes of rows sent in epochs after the first, in order", absolute(after), "bytes", at_most=0)
    everything = Sample([[sum(map(sum, rows.values())) / n_bytes]])
    what = "Rows sent to the other host in all epochs, in order and shuffled, relative to the data"
    result.add("shuffled", what, absolute(everything), at_most=1)
    calls = epochs * (ROWS // BATCH)
    for order in orders:
        other = absolute(Sample([[others[order] / calls]]))
        result.add(f"other-{order}", f"What a call sends of memory in addition to rows, {order}", other, "bytes")


def on(hosts: Hosts, contestant: Contestant) -> Contestant:
    """Return a contestant of Synkhronos that runs on hosts; the harness controls its process on the first one."""
    return replace(contestant, mpi=True, hosts=hosts)


def in_halves(contestant: Contestant) -> Contestant:
    """Return the same contestant with a wire dtype of half precision."""
    arguments: dict[str, Any] = {**contestant.arguments, "wire_dtype": HALVES}
    return replace(contestant, name=f"{contestant.name}, {HALVES}", arguments=arguments)
