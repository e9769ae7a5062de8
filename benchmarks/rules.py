"""Training rules.

Each rank makes steps by itself in `synk.loop`, and a rule combines the parameters (docs/howto/local_training.md). Ranks
have one core and one thread of BLAS each.

One slow rank: two ranks train the CNN of the MNIST demo. In a step, the first has 16 images, and the second either as
many or, by which it is slow, six times as many. Rules exchange every eighth step, or with a probability of one eighth.
Speeds are those of a rank between its third step and its last one. Without exchanges, a rank becomes slower next to a
slow one, too, because the cores share caches and memory.

A slow link: two hosts with one rank each, which are network namespaces, train an MLP of 784-800-800-10 with 250 images
in a step of a rank. A token bucket limits the link to 100 Mbit/s in each direction. Times are those of the first host
over full periods of the rule, which begin when a delay has passed. For comparison, the same loop makes no exchange
between these steps. Bytes are those of 100 steps on the unlimited link, as `Run.bytes` has them and as the first host's
network interface counts them, less those of a loop without exchanges.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import CORES, Contest
from benchmarks.nodes import on
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import Sample, difference, ratio
from tests.helpers.namespace_hosts import Hosts, reason_to_skip

Rule = tuple[str, dict[str, Any]]  # name and settings

EVERY, PERIOD, DELAY = 8, 50, 40  # steps
COMPUTE, STEPWISE = "no exchange", "every step"
NEVER: Rule = ("LocalSGD", {"every": 10**9})
#: Rules with a slow rank; of the last ones, ranks do not wait for each other.
RULES: dict[str, Rule] = {
    COMPUTE: NEVER,
    STEPWISE: ("LocalSGD", {"every": 1}),
    "LocalSGD": ("LocalSGD", {"every": EVERY}),
    "ASGD": ("ASGD", {"every": EVERY}),
    "EASGD": ("EASGD", {"every": EVERY}),
    "GoSGD": ("GoSGD", {"probability": 1 / EVERY}),
}
EQUAL_STEPS = (COMPUTE, STEPWISE, "LocalSGD")
SMALL, SLOWNESS = 16, 6  # images in a step, and their factor on the slow rank
OTHER, SLOW = "the first rank", "the second rank"
ALONE, SLOW_ONE = "two equal ranks", "the second rank is slow"

RATE, LINK = "100mbit", "100 Mbit/s"
OUTER, DELAYED = f"DiLoCo(every={PERIOD})", f"DiLoCo(every={PERIOD}, delay={DELAY})"
#: Rules on a slow link, each with its period and the number of timed periods.
ON_LINK: dict[str, tuple[Rule, int, int]] = {
    COMPUTE: (NEVER, 1, 40),
    STEPWISE: (("LocalSGD", {"every": 1}), 1, 4),
    f"LocalSGD(every={EVERY})": (("LocalSGD", {"every": EVERY}), EVERY, 2),
    OUTER: (("DiLoCo", {"every": PERIOD}), PERIOD, 1),
    DELAYED: (("DiLoCo", {"every": PERIOD, "delay": DELAY}), PERIOD, 1),
}
ROWS = 250  # of a rank


def measure(result: Result, rounds: int = 20, steps: int = 60) -> None:
    """Measure all parts; without a slow rank, `steps` are made on each rank."""
    measure_slow_rank(result, rounds, steps)
    reason = reason_to_skip()
    if reason is not None:
        result.add("hosts", "Two hosts", reason)
        return
    with Hosts(2) as hosts:
        ours = on(hosts, Contestant("2 hosts × 1 rank", "benchmarks.contestants.rules", {"model": "mlp", "ranks": 1}))
        with Contest([ours]) as contest:
            measure_bytes(result, contest, ours)
            hosts.limit(RATE)
            measure_link(result, contest, ours, rounds)
        result.facts.update(contest.facts)


def measure_slow_rank(result: Result, rounds: int, steps: int) -> None:
    """Measure the speed of each of two ranks, with and without a slow one."""
    ranks = Contestant("2 ranks", "benchmarks.contestants.rules", {"model": "cnn", "ranks": CORES})
    sizes = {ALONE: [SMALL, SMALL], SLOW_ONE: [SMALL, SLOWNESS * SMALL]}
    turns = {}
    for name, (rule, options) in RULES.items():
        for case, rows in sizes.items():
            # Where the slow rank makes as many steps as the other, fewer steps take as long.
            n_steps = max(2 * EVERY, steps // 3) if name in EQUAL_STEPS and case == SLOW_ONE else steps
            turn = {"rule": rule, "options": options, "sizes": rows, "steps": n_steps}
            turns[f"{name}, {case}"] = (ranks, turn)
    with Contest([ranks]) as contest:
        measured = contest.run(rounds, turns)
    result.facts.update(contest.facts)
    speeds = {
        who: {label: _number(sample, rank) for label, sample in measured.items()}
        for rank, who in enumerate((OTHER, SLOW))
    }
    for who, of_turns in speeds.items():
        result.record(f"Speed of {who}", "steps/s", of_turns)
    for name in RULES:
        before, after = (speeds[OTHER][f"{name}, {case}"] for case in (ALONE, SLOW_ONE))
        limit = None if name in EQUAL_STEPS else 0.9
        what = f"Speed of a rank next to a slow one, relative to that next to an equal one: {name}"
        result.add(f"slow-{name.replace(' ', '-')}", what, ratio(after, before), at_least=limit)
    before, after = (speeds[SLOW][f"ASGD, {case}"] for case in (ALONE, SLOW_ONE))
    result.add("slowness", "… of the slow rank itself: ASGD", ratio(after, before))


def measure_bytes(result: Result, contest: Contest, ours: Contestant, steps: int = 2 * PERIOD, rows: int = 8) -> None:
    """Measure the bytes of exchanges of two hosts in a number of steps."""
    turns: dict[str, tuple[Contestant, dict[str, Any]]] = {}
    for name in (COMPUTE, STEPWISE, OUTER):
        (rule, options), *_ = ON_LINK[name]
        turns[name] = (ours, {"rule": rule, "options": options, "sizes": [rows, rows], "steps": steps})
    samples = contest.run(1, turns)
    recorded = {name: _number(samples[name], -2).scaled(1e-6) for name in (STEPWISE, OUTER)}
    on_link = {name: _number(sample, -1).scaled(1e-6) for name, sample in samples.items()}
    base = on_link.pop(COMPUTE).median
    on_link = {name: Sample([[n - base for n in one] for one in sample.rounds]) for name, sample in on_link.items()}
    result.record(f"Bytes of both ranks' exchanges in {steps} steps", "MB", recorded)
    result.record(f"Bytes that a host sends in {steps} steps", "MB", on_link)
    what = f"Bytes of exchanges, {OUTER} against an average in every step"
    result.add("bytes", what, ratio(recorded[OUTER], recorded[STEPWISE]), at_most=1 / PERIOD)
    result.add("bytes-link", "… as the network interface counts them", ratio(on_link[OUTER], on_link[STEPWISE]))


def measure_link(result: Result, contest: Contest, ours: Contestant, rounds: int, rows: int = ROWS) -> None:
    """Measure the time of a step with each rule over the limited link, and without exchanges."""
    turns: dict[str, tuple[Contestant, dict[str, Any]]] = {}
    for name, ((rule, options), period, n_periods) in ON_LINK.items():
        first, n_timed = max(2, options.get("delay", 0)), period * n_periods
        turn = {"rule": rule, "options": options, "sizes": [rows, rows], "first": first, "n_timed": n_timed}
        turns[name] = (ours, {**turn, "steps": first + n_timed + 2})
    speeds = {name: _number(sample, 0) for name, sample in contest.run(rounds, turns).items()}
    seconds = {name: Sample([[1 / n for n in one] for one in sample.rounds]) for name, sample in speeds.items()}
    milliseconds = {name: sample.scaled(1e3) for name, sample in seconds.items()}
    result.record(f"Step of the MLP, {rows} images on each host, {LINK}", "ms", milliseconds)
    exchange = difference(milliseconds[STEPWISE], milliseconds[COMPUTE])
    result.add("exchange", f"An average in every step, {LINK}: time in addition to computing", exchange, "ms")
    for name in ON_LINK:
        if name != COMPUTE:
            what = f"Time of a step over that without exchanges, {LINK}: {name}"
            limit = 1.1 if name == DELAYED else None
            result.add(f"link-{name}", what, ratio(seconds[name], seconds[COMPUTE]), at_most=limit)


def _number(sample: Sample, place: int) -> Sample:
    """Return the sample of one of the numbers that each turn gives."""
    return Sample([[numbers[place]] for numbers in sample.rounds])
