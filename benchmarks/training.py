"""The contestants that train: Theano alone, Synkhronos, and PyTorch with DistributedDataParallel."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.harness import CORES
from benchmarks.processes import Contestant, ContestantFailed

ROWS = {"cnn": 4000, "mlp": 4000, "resnet": 256}  # images in memory, from which minibatches are drawn


def theano(model: str, threads: int = 1, openmp: bool = False, rows: int = 0) -> Contestant:
    """Plain Theano with a number of threads for BLAS, and for Theano's own loops too if OpenMP is on."""
    name = f"Theano, {threads} thread{'s' if threads > 1 else ''}{' (OpenMP)' if openmp else ''}"
    flags = {"THEANO_FLAGS": ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), f"openmp={openmp}"]))}
    arguments = {"model": model, "n": rows or ROWS[model]}
    return Contestant(
        name, "benchmarks.contestants.train_theano", arguments, threads=threads, needs=needs(model), environment=flags
    )


def theano_on_all_cores(model: str) -> list[Contestant]:
    """Plain Theano with as many threads as cores, with OpenMP and without."""
    return [theano(model, CORES), theano(model, CORES, openmp=True)]


def synkhronos(model: str, ranks: int = CORES, rows: int = 0) -> Contestant:
    """Synkhronos on a number of ranks."""
    arguments = {"model": model, "n": rows or ROWS[model], "ranks": ranks}
    return Contestant(
        f"Synkhronos, {ranks} rank{'s' if ranks > 1 else ''}",
        "benchmarks.contestants.train_synkhronos",
        arguments,
        needs=needs(model),
    )


def ddp(model: str, processes: int = CORES) -> Contestant:
    """PyTorch with DistributedDataParallel over gloo, one thread in each process."""
    arguments = {"model": model, "n": ROWS[model]}
    name = f"PyTorch DDP, {processes} processes"
    return Contestant(name, "benchmarks.contestants.train_ddp", arguments, processes, needs=("torch",), peer=True)


def needs(model: str) -> tuple[str, ...]:
    """Give what the demos' networks need."""
    return ("lasagne", "demos.resnet.models") if model == "resnet" else ("lasagne",)


def check_networks(facts: dict[str, dict[str, Any]]) -> None:
    """Check that the contestants train networks of one size.

    Raises
    ------
    ContestantFailed
    """
    sizes = {name: fact["parameters"] for name, fact in facts.items()}
    if len(set(sizes.values())) > 1:
        raise ContestantFailed(f"not the same network: {sizes} parameters")
