"""What bounds a figure: what two processes of nothing else reach on this machine, in the same minutes.

Memory that is copied and added as in McCalpin's STREAM, products of matrices by Theano's BLAS, and a flag in shared
memory that two processes pass to and fro.
"""

from __future__ import annotations

from benchmarks.harness import CORES
from benchmarks.processes import Contestant
from benchmarks.samples import Sample

N = 25_600_000  # float32 of each array that is copied or added: more than caches hold
SIDE = 1024  # of the matrices that are multiplied
TURNS = 10_000  # of the flag, there and back
STEPS = {"copy": 5, "add": 5, "product": 10, "flag": 3}  # of one round

LIMITS = Contestant("limits", "benchmarks.contestants.limits", processes=CORES)


def turns(*what: str) -> dict[str, tuple[Contestant, dict[str, object]]]:
    """Give the turns that measure some of ``"copy"``, ``"add"``, ``"product"`` and ``"flag"``."""
    return {one: (LIMITS, {"what": one, "steps": STEPS[one]}) for one in what}


def products(measured: Sample, operations: float) -> Sample:
    """Give the seconds that so many floating-point operations of matrix products take on all cores."""
    return measured.scaled(operations / (CORES * 2 * SIDE**3))


def memory(measured: Sample, n_bytes: float) -> Sample:
    """Give the seconds that so many bytes, read and written by additions, take on all cores."""
    return measured.scaled(n_bytes / (CORES * 3 * 4 * N))


def round_trip(measured: Sample) -> Sample:
    """Give the seconds of a flag's way there and back."""
    return measured.scaled(1 / TURNS)
