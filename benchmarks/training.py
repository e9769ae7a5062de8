"""The contestants that train: Theano alone, Synkhronos, and PyTorch with DistributedDataParallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness import CORES
from benchmarks.processes import Contestant, ContestantFailed

ROWS = {"cnn": 4000, "mlp": 4000, "resnet": 256}  # images in memory, from which minibatches are drawn
#: Multiplications of each layer's output, for each image.
PRODUCTS = {
    "cnn": (24 * 24 * 32 * 25, 8 * 8 * 32 * 25 * 32, 512 * 256, 256 * 10),
    "mlp": (784 * 800, 800 * 800, 800 * 10),
}


def theano(model: str, threads: int = 1, openmp: bool = False, rows: int = 0) -> Contestant:
    """Plain Theano with a number of threads for BLAS, and for Theano's own loops too if OpenMP is on."""
    name = f"Theano, {threads} thread{'s' if threads > 1 else ''}{' (OpenMP)' if openmp else ''}"
    flags = {"THEANO_FLAGS": f"openmp={openmp}"}
    arguments = {"model": model, "n": rows or ROWS[model]}
    return Contestant(
        name, "benchmarks.contestants.train_theano", arguments, threads=threads, needs=needs(model), environment=flags
    )


def theano_on_all_cores(model: str) -> list[Contestant]:
    """Plain Theano with as many threads as cores, with OpenMP and without."""
    return [theano(model, CORES), theano(model, CORES, openmp=True)]


def operations(model: str) -> float:
    """Give the floating-point operations of a training step's matrix products, for each image.

    Each layer has three products in all: the output's, the weights' gradient's, and the input's gradient's, which the
    first layer leaves out.
    """
    first, *others = PRODUCTS[model]
    return 2 * (2 * first + 3 * sum(others))


def synkhronos(model: str, ranks: int = CORES, rows: int = 0, regions: bool = True) -> Contestant:
    """Synkhronos on a number of ranks, with regions or as where there are none."""
    arguments = {"model": model, "n": rows or ROWS[model], "ranks": ranks, "regions": regions}
    return Contestant(
        f"Synkhronos, {ranks} rank{'s' if ranks > 1 else ''}{'' if regions else ', without regions'}",
        "benchmarks.contestants.train_synkhronos",
        arguments,
        needs=needs(model),
    )


def torch(model: str, processes: int) -> Contestant:
    """PyTorch with one thread in each process; several use DistributedDataParallel over gloo."""
    arguments = {"model": model, "n": ROWS[model]}
    name = f"PyTorch DDP, {processes} processes" if processes > 1 else "PyTorch, 1 thread"
    return Contestant(name, "benchmarks.contestants.train_torch", arguments, processes, needs=("torch",), peer=True)


def theano_with_old_blas(model: str) -> Contestant:
    """Plain Theano with the BLAS in SciPy's wheel, as it works on a processor that is newer than this OpenBLAS.

    It falls back to kernels of 128 bits there, which are asked for here, so that each processor shows it.
    """
    environment = {"SYNKHRONOS_BLAS": "scipy", "OPENBLAS_CORETYPE": "Prescott"}
    plain = theano(model)
    return replace(plain, name="Theano, 1 thread, old BLAS", environment={**plain.environment, **environment})


def needs(model: str) -> tuple[str, ...]:
    """Give what the demos' networks need."""
    return ("lasagne", "demos.resnet.models") if model == "resnet" else ("lasagne",)


def check_networks(facts: dict[str, dict[str, Any]]) -> None:
    """Check that the contestants train networks of one size.

    Raises
    ------
    ContestantFailed
    """
    sizes = {name: fact["parameters"] for name, fact in facts.items() if "parameters" in fact}
    if len(set(sizes.values())) > 1:
        raise ContestantFailed(f"not the same network: {sizes} parameters")
