"""Exchange between nodes while computing.

Two hosts are network namespaces of one machine with two cores; each has one rank, or one process of DDP, with one
thread. The link has 1 or 10 Gbit/s in each direction. Steps of plain gradient descent have the same rows in every step,
so that only gradients are exchanged: an exact function in Synkhronos, DDP over gloo with its default buckets in
PyTorch, also with its hook `bf16_compress`. Networks: 784-800-800-10 with 500 rows in all; a CNN with two convolutions
and 25 MB of gradients, 400 rows; four dense layers of 2,500, 400 rows.

The bound is max(t, t_first + m / rate): t is a step of plain Theano with one host's rows, t_first its time up to the
first gradient of at least 1 MiB, m the bytes of all gradients. Nothing reaches it on one machine: headers of TCP and
IP take a part of the rate, and two hosts that compute at once slow each other down. What the machine allows is the same
expression with t and t_first of plain Theano on both hosts at once, and with the time in which plain TCP exchanges m
bytes in both directions. For the sequence, 160 variables of 100 float32 are all-reduced one by one in a `sequence()`,
and in one call with a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.contestants._wide import count_parameters
from benchmarks.harness import Contest
from benchmarks.nodes import HALVES, in_halves, on
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import Sample, ratio
from tests.helpers.namespace_hosts import Hosts, reason_to_skip

#: Rows of both hosts, and steps in a round.
NETWORKS = {"mlp": (500, 5), "cnn": (400, 2), "dense": (400, 1)}
RATES = {"1 Gbit/s": ("1gbit", 1e9 / 8), "10 Gbit/s": ("10gbit", 1e10 / 8)}
LIMITED = "1 Gbit/s"  # with targets; the other rate is measured in half as many rounds
#: Targets of the step relative to the bound at 1 Gbit/s.
TARGETS = {"mlp": 1.10, "cnn": 1.15, "dense": 1.15}
MODULE = "benchmarks.contestants.overlap"
OURS, DDP, ALONE, FIRST = "Synkhronos", "PyTorch DDP", "Theano, one host's rows", "… up to the first large gradient"
BOTH, BOTH_FIRST = "Theano on both hosts", "… on both hosts, up to the first large gradient"
TCP = "m bytes by plain TCP"
PORT = 5555


def measure(result: Result, rounds: int = 20) -> None:
    """Measure steps of all networks at both rates, and sequences of small all-reduces."""
    reason = reason_to_skip()
    if reason is not None:
        result.add("hosts", result.title, reason)
        return
    with Hosts(2) as hosts:
        for model, (rows, steps) in NETWORKS.items():
            measure_steps(result, hosts, model, rounds, rows, steps)
        measure_sequences(result, hosts, rounds)


def measure_steps(result: Result, hosts: Hosts, model: str, rounds: int, rows: int, steps: int) -> None:
    """Measure the steps of one network, and compare them with the bound and with DDP."""
    ours = on(hosts, Contestant(OURS, MODULE, {"model": model, "rows": rows, "ranks": 1}, threads=1))
    halves = in_halves(ours)
    shared = {"processes": 2, "threads": 1, "needs": ("torch",), "peer": True, "hosts": hosts}
    ddp = Contestant(DDP, f"{MODULE}_torch", {"model": model, "rows": rows}, **shared)
    compressed = replace(ddp, name=f"{DDP}, {HALVES}", arguments={**ddp.arguments, "bfloat16": True})
    alone = Contestant(ALONE, MODULE, {"model": model, "rows": rows // 2}, threads=1)
    first = replace(alone, name=FIRST, arguments={**alone.arguments, "until_first": True})
    on_both = {"processes": 2, "hosts": hosts}
    both, both_first = replace(alone, name=BOTH, **on_both), replace(first, name=BOTH_FIRST, **on_both)
    address = {"address": hosts.names[0], "port": PORT}
    tcp = Contestant(TCP, f"{MODULE}_tcp", {"model": model, **address}, **on_both)
    with Contest([ddp, compressed, ours, halves, alone, first, both, both_first, tcp]) as contest:
        contest.run(1, contest.alike(steps=1), warm_up=0)  # every host receives its rows
        for line, (rate, bytes_per_second) in RATES.items():
            hosts.limit(rate)
            found = contest.run(rounds if line == LIMITED else -(-rounds // 2), contest.alike(steps=steps))
            hosts.limit(None)
            exchange = 4 * count_parameters(model) / bytes_per_second
            bound = bound_of(found[ALONE], found[FIRST], [exchange] * len(found[ALONE].medians))
            allowed = bound_of(found[BOTH], found[BOTH_FIRST], found[TCP].medians)
            what = f"Step of {model}, {rows} rows, {line}"
            milliseconds = {label: sample.scaled(1e3) for label, sample in found.items()}
            bounds = {"the bound": bound.scaled(1e3), "what the machine allows": allowed.scaled(1e3)}
            result.record(what, "ms", milliseconds, contest.gaps, bounds)
            limit = TARGETS[model] if line == LIMITED else None
            result.add(f"{model}-{rate}", f"{what}, against the bound", ratio(found[OURS], bound), at_most=limit)
            result.add(f"{model}-{rate}-allowed", "… against what the machine allows", ratio(found[OURS], allowed))
            for one, peer in ((ours, ddp), (halves, compressed)):
                kind = "" if one is ours else f", {HALVES}"
                answer = contest.gaps.get(peer.name) or ratio(found[one.name], found[peer.name])
                at_most = 0.85 if model == "mlp" and line == LIMITED else None
                result.add(
                    f"{model}-{rate}-ddp{kind and '-' + HALVES}", f"… against DDP{kind}", answer, at_most=at_most
                )
    result.facts.update({f"{name} ({model})": facts for name, facts in contest.facts.items()})


def bound_of(step: Sample, first: Sample, exchanges: Sequence[float]) -> Sample:
    """Return max(t, t_first + exchange) for the medians of each round."""
    rounds = zip(step.medians, first.medians, exchanges)
    return Sample([[max(t, until + exchange)] for t, until, exchange in rounds])


def measure_sequences(result: Result, hosts: Hosts, rounds: int) -> None:
    """Measure 160 small all-reduces in a sequence, and in one call."""
    ours = on(hosts, Contestant("Synkhronos, 2 hosts × 1 rank", f"{MODULE}_sequence", {"n": 160, "length": 100}))
    with Contest([ours]) as contest:
        turns = {kind: (ours, {"kind": kind, "steps": 20}) for kind in ("a sequence", "one list")}
        found = contest.run(rounds, turns)
    result.record("160 small all-reduces", "ms", {label: sample.scaled(1e3) for label, sample in found.items()})
    result.add("sequence", "160 small all-reduces in a sequence, against one list", ratio(*found.values()), at_most=1.5)
