"""Contestants that train networks: plain Theano, Synkhronos, and PyTorch with DistributedDataParallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness import CORES
from benchmarks.processes import Contestant, ContestantFailed

ROWS = {"cnn": 4000, "mlp": 4000, "resnet": 256}  # images in memory, from which minibatches are drawn
#: Multiplications that compute each layer's output for one image.
PRODUCTS = {
    "cnn": (24 * 24 * 32 * 25, 8 * 8 * 32 * 25 * 32, 512 * 256, 256 * 10),
    "mlp": (784 * 800, 800 * 800, 800 * 10),
}


def theano(model: str, threads: int = 1, openmp: bool = False, rows: int = 0) -> Contestant:
    """Return a contestant for plain Theano; `threads` are those of BLAS and, if `openmp`, of Theano's loops."""
    name = f"Theano, {threads} thread{'s' if threads > 1 else ''}{' (OpenMP)' if openmp else ''}"
    flags = {"THEANO_FLAGS": f"openmp={openmp}"}
    arguments = {"model": model, "n": rows or ROWS[model]}
    return Contestant(
        name, "benchmarks.contestants.train_theano", arguments, threads=threads, needs=needs(model), environment=flags
    )


def theano_on_all_cores(model: str) -> list[Contestant]:
    """Return contestants for plain Theano with one thread for each core, without OpenMP and with it."""
    return [theano(model, CORES), theano(model, CORES, openmp=True)]


def operations(model: str) -> float:
    """Return the floating-point operations of a training step's matrix products, for each image.

    Each layer has three products of equal cost: for its output, for the gradient of its weights, and for the gradient
    of its input. The first layer does not compute the last one.
    """
    first, *others = PRODUCTS[model]
    return 2 * (2 * first + 3 * sum(others))


def exact(model: str) -> Contestant:
    """Return a contestant for Synkhronos with an exact function, whose plan is chosen by cost."""
    arguments = {"model": model, "n": ROWS[model], "ranks": CORES, "exact": True}
    module = "benchmarks.contestants.train_synkhronos"
    return Contestant(f"Synkhronos, {CORES} ranks, exact", module, arguments, threads=CORES, needs=needs(model))


def synkhronos(model: str, ranks: int = CORES, rows: int = 0, heap: bool = True) -> Contestant:
    """Return a contestant for Synkhronos on a number of ranks, with a shared heap or without."""
    arguments = {"model": model, "n": rows or ROWS[model], "ranks": ranks, "heap": heap}
    return Contestant(
        f"Synkhronos, {ranks} rank{'s' if ranks > 1 else ''}{'' if heap else ', without regions'}",
        "benchmarks.contestants.train_synkhronos",
        arguments,
        needs=needs(model),
    )


def torch(model: str, processes: int, threads: int = 1) -> Contestant:
    """Return a contestant for PyTorch with threads in each process; several use DistributedDataParallel over gloo."""
    arguments = {"model": model, "n": ROWS[model]}
    alone = f"PyTorch, {threads} thread{'s' if threads > 1 else ''}"
    name = f"PyTorch DDP, {processes} processes" if processes > 1 else alone
    module = "benchmarks.contestants.train_torch"
    return Contestant(name, module, arguments, processes, threads, needs=("torch",), peer=True)


def theano_with_old_blas(model: str) -> Contestant:
    """Return a contestant for plain Theano with the BLAS of SciPy's wheel, as it runs on unknown processors.

    On a processor that is newer than it, this OpenBLAS falls back to kernels of 128 bits. The contestant requests these
    kernels on each processor.
    """
    environment = {"SYNKHRONOS_BLAS": "scipy", "OPENBLAS_CORETYPE": "Prescott"}
    plain = theano(model)
    return replace(plain, name="Theano, 1 thread, old BLAS", environment={**plain.environment, **environment})


def needs(model: str) -> tuple[str, ...]:
    """Return the packages that a network requires."""
    return ("lasagne", "demos.resnet.models") if model == "resnet" else ("lasagne",)


def check_networks(facts: dict[str, dict[str, Any]]) -> None:
    """Check that the contestants train networks of the same size.

    Raises
    ------
    ContestantFailed
        If the numbers of parameters differ.
    """
    sizes = {name: fact["parameters"] for name, fact in facts.items() if "parameters" in fact}
    if len(set(sizes.values())) > 1:
        raise ContestantFailed(f"got networks of different sizes, expected equal numbers of parameters: {sizes}")
