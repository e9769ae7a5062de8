"""Exact functions.

Training steps of the demos' MLP and CNN run on two ranks, with 500 images in each step, drawn at random. They are
computed by an exact function with Lasagne's Nesterov momentum, and by `make_train_function`, with one flat gradient.
Another exact function has batch normalisation over the full minibatch, in each layer but the last. It is compared with
PyTorch's DDP without batch normalisation, because PyTorch's `SyncBatchNorm` requires GPUs. Compile times of the CNN
with batch normalisation are measured in new processes, with a compile cache that is empty ("cold") or complete
("warm").
"""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarks import training
from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import Sample, ratio

MODULE = "benchmarks.contestants.exact"


def contestant(kind: str, model: str, normalised: bool = False, ranks: int = CORES, cache: str = "") -> Contestant:
    """Return a contestant that trains a network, with its own compile cache if `cache` is a folder."""
    name = f"{ranks} ranks, {kind}" if ranks else "Theano"
    arguments: dict[str, Any] = {"kind": kind, "model": model, "n": training.ROWS[model], "ranks": ranks}
    return Contestant(
        f"{name}{', batch normalisation' if normalised else ''}",
        MODULE,
        {**arguments, "normalised": normalised},
        needs=("lasagne",),
        environment={"THEANO_FLAGS": f"base_compiledir={cache}"} if cache else {},
    )


def measure(result: Result, rounds: int = 10, steps: int = 12, compilations: int = 2) -> None:
    """Measure training steps, and `compilations` times how long compiling them takes."""
    for model in ("mlp", "cnn"):
        exact, flat, normal = (
            contestant("exact", model),
            contestant("flat", model),
            contestant("exact", model, normalised=True),
        )
        ddp = training.torch(model, CORES)
        with Contest([exact, flat, normal, ddp]) as contest:
            samples = contest.run(rounds, contest.alike(batch=500, steps=steps))
            result.facts.update(contest.facts)
        milliseconds = {name: one.scaled(1e3) for name, one in samples.items()}
        result.record(f"{model.upper()}, step of 500 images", "ms", milliseconds, contest.gaps)
        what = f"{model.upper()}: an exact step, of the time of one with a flat gradient"
        result.add(model, what, ratio(samples[exact.name], samples[flat.name]), at_most=1.03)
        found = contest.gaps.get(ddp.name) or ratio(samples[ddp.name], samples[normal.name])
        what = f"{model.upper()}: with batch normalisation, against PyTorch DDP without it"
        result.add(f"{model}-normalised", what, found, at_least=1.1)
    compile_times(result, compilations)


def compile_times(result: Result, rounds: int) -> None:
    """Measure how long new processes take to compile a step."""
    numbers: dict[str, list[list[float]]] = {}
    for _ in range(rounds):
        for kind, ranks in (("theano", 0), ("exact", CORES)):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    one = contestant(kind, "cnn", True, ranks, cache)
                    with Contest([one]) as contest:
                        sample = contest.run(1, {kind: (one, {})}, warm_up=0)[kind]
                    numbers.setdefault(f"{kind}, {state}", []).extend(sample.rounds)
    samples = {label: Sample(found) for label, found in numbers.items()}
    result.record("Compiling a step of the CNN with batch normalisation", "s", samples)
    for state in ("cold", "warm"):
        found = ratio(samples[f"exact, {state}"], samples[f"theano, {state}"])
        what = f"Compiling an exact step, of the time of plain Theano, {state} cache"
        result.add(f"compile-{state}", what, found, at_most=1.3)
