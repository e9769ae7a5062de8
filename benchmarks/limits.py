"""Bounds of figures: the speed that two processes without other work reach on this machine in the same minutes.

They copy and add arrays as in McCalpin's STREAM, multiply matrices with Theano's BLAS, and pass a flag in shared memory
back and forth.
"""

from __future__ import annotations

from benchmarks.harness import CORES
from benchmarks.processes import Contestant
from benchmarks.samples import Sample

N = 25_600_000  # float32 elements of each array that is copied or added, which is larger than the caches
SIDE = 1024  # rows and columns of the matrices that are multiplied
TURNS = 10_000  # round trips of the flag
STEPS = {"copy": 5, "add": 5, "product": 10, "flag": 3}  # in one round

LIMITS = Contestant("limits", "benchmarks.contestants.limits", processes=CORES)


def turns(*what: str) -> dict[str, tuple[Contestant, dict[str, object]]]:
    """Return the turns that measure some of ``"copy"``, ``"add"``, ``"product"`` and ``"flag"``."""
    return {one: (LIMITS, {"what": one, "steps": STEPS[one]}) for one in what}


def products(measured: Sample, operations: float) -> Sample:
    """Return the seconds that all cores need for matrix products of that many floating-point operations."""
    return measured.scaled(operations / (CORES * 2 * SIDE**3))


def memory(measured: Sample, n_bytes: float) -> Sample:
    """Return the seconds in which additions on all cores read and write `n_bytes` in total."""
    return measured.scaled(n_bytes / (CORES * 3 * 4 * N))


def round_trip(measured: Sample) -> Sample:
    """Return the seconds of one round trip of the flag."""
    return measured.scaled(1 / TURNS)
