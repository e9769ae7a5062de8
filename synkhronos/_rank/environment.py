"""Seeds of the global generators of NumPy and of the module ``random``, different on each rank.

Forked processes inherit the controller's states, and would draw the same numbers. Each rank but the controller is seeded
by a hash of the controller's states at `fork` and of its own number: a program that seeds its generators before `fork`
gets the same numbers in each run. The controller's own states stay as they are.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import logging
import pickle
import random
from typing import Any, Callable

import numpy as np
from threadpoolctl import ThreadpoolController

from synkhronos._backends import limit_threads
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.resources import count_cores

__all__ = ["ThreadLimits", "digest_of_states", "set_apart"]


def digest_of_states() -> bytes:
    """Return a hash of the states of this process's global generators, from which nothing is drawn.

    Each rank's fair part of the cores.
    """
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


_logger = logging.getLogger("synkhronos")


class ThreadLimits:
    """Keeps the threads of this process, those of BLAS, OpenMP and the engine, to its fair part of the cores.

    Parameters
    ----------
    n_ranks : int
    quiet : bool
        Whether others will tell what goes wrong.
    """

    def __init__(self, n_ranks: int, quiet: bool) -> None:
        self._quiet = quiet
        self._n_threads = max(1, count_cores() // n_ranks)
        self._limited: set[str] = set()
        self._undo: list[Callable[[], Any]] = []
        self._engine_limited = False

    def apply(self) -> None:
        """Limit the libraries that this process has loaded by now, and that are not limited yet."""
        if not self._engine_limited:
            end = limit_threads(self._n_threads)
            if end is not None:
                self._engine_limited = True
                self._undo.append(end)
        controller = self._find()
        if controller is None:
            return
        libraries = controller.info()
        loaded = {library["filepath"] for library in libraries}
        if loaded - self._limited:
            limits: dict[str, int] = {}  # no more than the user has set, either
            for library in libraries:
                most = min(library["num_threads"], self._n_threads)
                limits[library["prefix"]] = min(most, limits.get(library["prefix"], most))
            self._undo.append(controller.limit(limits=limits).restore_original_limits)
            self._limited |= loaded

    def _find(self) -> ThreadpoolController | None:
        with deferred_interrupts():  # handlers may raise errors like that one
            try:
                return ThreadpoolController()
            except OSError as error:  # it reads /proc
                if not self._quiet:
                    text = "the threads of BLAS and OpenMP cannot be limited to each rank's cores (%s): set "
                    _logger.warning(text + "OMP_NUM_THREADS", error)
                self._quiet = True
                return None

    def restore(self) -> None:
        """Undo `apply`."""
        while self._undo:
            self._undo.pop()()
        self._limited.clear()
        self._engine_limited = False
