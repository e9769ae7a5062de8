"""How arrays of the ranks of several machines are reduced: within each machine, and between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from synkhronos._collectives.arithmetic import reduction_of
from synkhronos._collectives.ops import OPS
from synkhronos._native import native

__all__ = ["Way", "reduced", "way_of"]


class Way(NamedTuple):
    """How arrays of all ranks are reduced.

    Attributes
    ----------
    within : Reduction or None
        Of the ranks of this machine; ``None``: their leader brings what each of them has.
    between : Reduction
        Of what the leaders bring.
    dtype : dtype
        Of what they bring.
    rows : tuple of int
        How many arrays each leader brings.
    returned : dtype
    name : str
        The same for what is reduced the same way, on all machines.
    """

    within: native.Reduction | None
    between: native.Reduction
    dtype: np.dtype
    rows: tuple[int, ...]
    returned: np.dtype
    name: str


@functools.lru_cache(maxsize=256)
def way_of(
    op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...], sizes: tuple[int, ...]
) -> list[Way]:
    """On each machine, the way of a reduction of all ranks; ``sizes`` are the numbers of ranks.

    Averages of integers are exact, and half precision is rounded once, so leaders bring all operands of those.
    """
    name = repr((op, dtype, returned, weights))
    if not any(weights):
        weights = (1,) * len(weights)
    whole = (OPS[op].weighted and dtype.kind in "iub") or dtype == np.float16
    if whole or max(sizes) == 1:
        return [Way(None, reduction_of(op, dtype, returned, weights), dtype, sizes, returned, name)] * len(sizes)
    if not math.isfinite(sum(weights)):
        weights = tuple(native.normalized(weights))
    starts = [sum(sizes[:machine]) for machine in range(len(sizes))]
    own = [weights[start : start + size] for start, size in zip(starts, sizes)]
    between = reduction_of(op, returned, returned, tuple(map(sum, own)))
    return [
        Way(reduction_of(op, dtype, returned, one), between, returned, (1,) * len(sizes), returned, name) for one in own
    ]


def reduced(way: Way, brought: Sequence[np.ndarray], result: np.ndarray) -> None:
    """Reduce what all leaders bring, in the order of the machines: of each, its arrays one after the other."""
    rows = [row for arrays, n in zip(brought, way.rows) for row in arrays.reshape(n, -1)]
    way.between(rows, [result])
