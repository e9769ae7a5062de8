"""The choice of plans on PyTensor.

A training step of the MLP 784-800-800-10 with stochastic gradient descent, and the log-probability of a hierarchical
regression in PyMC with its gradient, as in the figure on PyMC. They are called with increasing numbers of rows, in
four ways: by PyTensor or PyMC with BLAS on two threads, and on two ranks with the plans *rows*, *controller* and
*auto*. The linker is numba, PyTensor's default.
"""

from benchmarks.plans import compare
from benchmarks.results import Result

SIZES = {"mlp": (4, 32, 128, 256, 500, 2048), "regression": (500, 5_000, 20_000, 50_000, 200_000)}


def measure(result: Result, rounds: int = 20) -> None:
    """Measure both programs on two ranks."""
    compare(result, rounds, SIZES, "benchmarks.contestants.pytensor_plans", "PyTensor")
