"""Random streams of their own for every rank, so that replicated dropout draws different masks.

MRG31k3p (L'Ecuyer and Touzin, "Fast combined multiple recursive generators with multipliers of the form a = ±2^q ±
2^r", 2000) has a period of about 2^185. `MRG_RandomStreams` spaces its variables 2^134 and its substreams 2^72 steps
apart; rank ``k`` jumps ahead by k · 2^160 steps, so that no variable of one rank meets another of any rank.
`RandomStreams` holds Mersenne twisters, which jump by k · 2^128 steps of a period of 2^19937 - 1.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from theano.sandbox import rng_mrg

__all__ = ["claim_stream", "has_common_stream", "other_stream"]

_EXTRA_DOUBLINGS = 160 - 134

#: For containers of states whether all ranks draw the same of them.
_is_common: Any = weakref.WeakKeyDictionary()


def claim_stream(var: Any, common: bool) -> None:
    """A function draws of this random state: of a common stream, or of streams that differ between ranks.

    Raises
    ------
    ValueError
        If another function was built that does otherwise.
    """
    if _is_common.setdefault(var.container, common) != common:
        raise ValueError(
            f"the random state {var} is used by exact functions, which draw the same on all ranks, and by others (or "
            'with random="own"), for which each rank has a stream of its own: make a RandomStreams for each kind'
        )


def has_common_stream(var: Any) -> bool:
    """Whether all ranks are to draw the same of a random state."""
    return bool(_is_common.get(var.container))


def other_stream(state: Any, stream: int) -> Any:
    """The random state ``stream`` (> 0) streams further on.

    Parameters
    ----------
    state : numpy.random.RandomState, or int32 array of shape (n, 6)
    stream : int
    """
    if isinstance(state, np.random.RandomState):
        twister: Any = np.random.MT19937()
        twister.state = state.get_state(legacy=False)
        return np.random.RandomState(twister.jumped(stream))
    moved = np.array(state)
    for columns, jump, modulus in (
        (slice(0, 3), rng_mrg.A1p134, int(rng_mrg.M1)),
        (slice(3, 6), rng_mrg.A2p134, int(rng_mrg.M2)),
    ):
        matrix = _power(np.asarray(jump).astype(object), stream << _EXTRA_DOUBLINGS, modulus)
        moved[:, columns] = (state[:, columns].astype(object) @ matrix.T % modulus).astype(state.dtype)
    return moved


def _power(matrix: np.ndarray, exponent: int, modulus: int) -> np.ndarray:
    """A 3×3 integer matrix to a power modulo ``modulus``, by repeated squaring in Python's exact integers."""
    result = np.eye(3, dtype=object)
    while exponent:
        if exponent & 1:
            result = result @ matrix % modulus
        matrix = matrix @ matrix % modulus
        exponent >>= 1
    return result
