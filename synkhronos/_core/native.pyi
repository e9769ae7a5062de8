from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

class Reduction:
    """A reduction of as many arrays as there are weights, element by element, in their order.

    Parameters
    ----------
    op : str
        ``"sum"``, ``"prod"``, ``"max"``, ``"min"`` or ``"avg"``.
    dtype, returned : dtype
        Of the operands, and of the outs: the same, but for sums and products of integers and booleans, which may be
        int64 (uint64 of unsigned ones), and their averages, which may be float64.
    weights : sequence of float
        Finite and not negative; they count for averages alone. An operand of weight 0 is left out altogether, NaNs in
        it too. If all are 0 they count as equal.

    Raises
    ------
    TypeError
        If there is no such reduction.
    """

    def __init__(self, op: str, dtype: DTypeLike, returned: DTypeLike, weights: Sequence[float]) -> None: ...
    def __call__(self, operands: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        """Write the result to each of the outs.

        All are C-contiguous, in native byte order, and of the same size. Outs may be operands, if the dtypes are the
        same, but must not overlap them otherwise. Large ones are reduced while other threads run.
        """

def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that sum to one; equal ones if all are 0. None but those of 0 become 0."""

def add_to_sums(sums: np.ndarray, values: np.ndarray, weight: float) -> None:
    """Add values by their weight to the sums of a mean.

    Sums of integers and booleans are pairs of int64, of zeros in the beginning; the weights are whole, and less than
    2**62 together. Other sums have the dtype of the values, or float32 for float16, and are -0.0 in the beginning; the
    weights are shares of one. What overflows though sum and term are finite, only did by rounding, and becomes the
    largest number.
    """

def mean_of_sums(sums: np.ndarray, total: int, out: np.ndarray) -> None:
    """Write the mean of integers to ``out``: the nearest integers (of two the even one), or float64."""
