"""States of Theano's random streams.

MRG31k3p (L'Ecuyer and Touzin, "Fast combined multiple recursive generators with multipliers of the form a = ±2^q ±
2^r", 2000) has a period of about 2^185. `MRG_RandomStreams` spaces its variables 2^134 and its substreams 2^72 steps
apart; rank ``k`` jumps ahead by k · 2^160 steps, so that no variable of one rank meets another of any rank.
`RandomStreams` holds Mersenne twisters, which jump by k · 2^128 steps of a period of 2^19937 - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from theano.sandbox import rng_mrg
from theano.tensor.raw_random import RandomStateType

__all__ = ["is_random_state", "other_stream"]

_EXTRA_DOUBLINGS = 160 - 134


def is_random_state(var: Any) -> bool:
    """Whether a shared variable is the state of a random stream (`RandomStreams` or `MRG_RandomStreams`)."""
    return isinstance(var.type, RandomStateType) or _is_mrg_state(var)


def _is_mrg_state(var: Any) -> bool:
    """Whether a shared variable holds states of the MRG31k3p generator: int32, shape ``(n_streams, 6)``."""
    update = getattr(var, "default_update", None)
    return update is not None and update.owner is not None and isinstance(update.owner.op, rng_mrg.mrg_uniform_base)


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
