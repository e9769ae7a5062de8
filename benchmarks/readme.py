"""README's autoencoder on Theano.

The program in README.md for Theano and PyTensor, taken from the page: as it is there, with a rank on each core, and
without Synkhronos, with one and with two threads of BLAS. The numbers are the time of its loop, divided by its ten
steps.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio
from tests.helpers.page_programs import ON_BOTH

MODULE = "benchmarks.contestants.readme"
STEPS = 10


def contestants(name: str, mark: str, needs: tuple[str, ...], **arguments: Any) -> list[Contestant]:
    """Return the program without Synkhronos, with one and with two threads, and with a rank on each core."""
    forms = [(f"{name}, 1 thread", True, 1), (f"{name}, {CORES} threads", True, CORES)]
    forms.append((f"Synkhronos, {CORES} ranks", False, CORES))
    return [
        Contestant(label, MODULE, {"mark": mark, "serial": serial, **arguments}, threads=threads, needs=needs)
        for label, serial, threads in forms
    ]


def compare(result: Result, rounds: int, programs: list[Contestant], title: str, unit: str, factor: float) -> None:
    """Measure the same program in its three forms, the last of which is that on ranks."""
    with Contest(programs) as contest:
        samples = {label: one.scaled(factor) for label, one in contest.run(rounds, contest.alike()).items()}
    result.record(title, unit, samples)
    *serial, ours = programs
    for one in serial:
        key, what = f"{title.split()[0].lower()}-{one.threads}", f"{title}: {one.name} against {CORES} ranks"
        result.add(key, what, ratio(samples[one.name], samples[ours.name]))


def measure_steps(result: Result, rounds: int, engine: str) -> None:
    """Measure the steps of the program for both backends."""
    programs = contestants(engine, ON_BOTH, (engine.lower(),))
    compare(result, rounds, programs, "Step of 500 images", "ms", 1e3 / STEPS)


def measure(result: Result, rounds: int = 20) -> None:
    """Measure; a round has ten steps of each contestant."""
    measure_steps(result, rounds, "Theano")
