"""States of PyTensor's random streams: NumPy's generators.

A generator jumps as many of its period's parts ahead as NumPy says: PCG64, the default, 2^127 steps of 2^128 times the
golden ratio's fraction, so that no two ranks meet; MT19937 2^128 of 2^19937 - 1; Philox 2^128 of 2^256.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pytensor.tensor.random.type import RandomType

__all__ = ["is_random_state", "other_stream"]


def is_random_state(var: Any) -> bool:
    """Whether a shared variable is the state of a random stream."""
    return isinstance(var.type, RandomType)


def other_stream(state: Any, stream: int) -> Any:
    """The random state ``stream`` (> 0) streams further on.

    Parameters
    ----------
    state : numpy.random.Generator
    stream : int

    Raises
    ------
    TypeError
        If its bit generator can neither jump nor be seeded anew.
    """
    bits = state.bit_generator
    if hasattr(bits, "jumped"):
        return np.random.Generator(bits.jumped(stream))
    seeds = getattr(bits, "seed_seq", None)
    if not isinstance(seeds, np.random.SeedSequence):
        raise TypeError(
            f"{type(bits).__name__} cannot give each rank a stream of its own: use PCG64, the default, or fork with "
            "replicate_rng=True"
        )
    return np.random.Generator(type(bits)(np.random.SeedSequence(seeds.entropy, spawn_key=(*seeds.spawn_key, stream))))
