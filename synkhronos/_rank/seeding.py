"""Seeds of the global generators of NumPy and of the module ``random``, different on each rank.

Forked processes inherit the controller's states, and would draw the same numbers. Each rank but the controller is seeded
by a hash of the controller's states at `fork` and of its own number: a program that seeds its generators before `fork`
gets the same numbers in each run. The controller's own states stay as they are.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy as np

__all__ = ["digest_of_states", "set_apart"]


def digest_of_states() -> bytes:
    """Return a hash of the states of this process's global generators, from which nothing is drawn."""
    states = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    return hashlib.sha256(pickle.dumps(states, protocol=4)).digest()


def set_apart(digest: bytes, rank: int, start: int) -> None:
    """Seed the global generators of this process.

    Parameters
    ----------
    digest : bytes
        That of the controller, at `fork`.
    rank : int
        Of this process, among all ranks.
    start : int
        Different for a worker that takes the place of one that died, so that it does not draw the same numbers again.
    """
    seed = hashlib.sha256(digest + f"{rank} {start}".encode()).digest()
    random.seed(seed)
    numbers = np.frombuffer(seed, np.uint32)
    try:
        np.random.seed(numbers)  # noqa: NPY002
    except TypeError:  # the program has set another bit generator, which takes seeds only when it is made
        numpy_random: Any = np.random
        kind = type(numpy_random.get_bit_generator())
        numpy_random.set_bit_generator(kind(np.random.SeedSequence(numbers)))
