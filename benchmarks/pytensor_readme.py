"""README's programs on PyTensor.

The programs in README.md for PyMC, and for Theano and PyTensor, taken from the page: as they are there, with a rank on
each core, and without Synkhronos, with one and with two threads of BLAS. The numbers are the time of `pm.sample()` with
its block, which opens and closes the session on ranks, and that of the other program's loop divided by its ten steps.
What only a first call compiles does not count.
"""

from benchmarks.contestants.readme import FOR_PYMC
from benchmarks.readme import compare, contestants, measure_steps
from benchmarks.results import Result


def measure(result: Result, rounds: int = 20, samplings: int = 5, changes: tuple[tuple[str, str], ...] = ()) -> None:
    """Measure both programs; the one for PyMC, with changes of its text, in fewer rounds."""
    programs = contestants("PyMC", FOR_PYMC, ("pymc",), changes=changes)
    compare(result, min(rounds, samplings), programs, "Sampling 200 thousand rows, 20 covariates", "s", 1.0)
    measure_steps(result, rounds, "PyTensor")
