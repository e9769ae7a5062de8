"""Environment of a rank's process: seeds of the global random generators, and limits on threads.

A forked process inherits the controller's global generators (of NumPy and of the module ``random``), and would draw the
same numbers. Each worker is therefore seeded with a hash of the controller's states at `fork` and of its own rank. A
program that seeds its generators before `fork` gets the same numbers in each run. The controller's own states do not
change.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import pickle
import random
from typing import Any, Callable

import numpy as np
from threadpoolctl import ThreadpoolController

from synkhronos._backends import limit_threads
from synkhronos._native import native
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.resources import count_cores


def digest_of_states() -> bytes:
    """Return a hash of the states of this process's global generators, without drawing from them."""
    states = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    return hashlib.sha256(pickle.dumps(states, protocol=4)).digest()


def seed_rank(digest: bytes, rank: int, start: int) -> None:
    """Seed the global generators of this process.

    Parameters
    ----------
    digest : bytes
        `digest_of_states` of the controller at `fork`.
    rank : int
        Global rank of this process.
    start : int
        A number that differs for a worker that replaces a dead one, so that it does not draw the same numbers again.
    """
    seed = hashlib.sha256(digest + f"{rank} {start}".encode()).digest()
    random.seed(seed)
    numbers = np.frombuffer(seed, np.uint32)
    try:
        np.random.seed(numbers)  # noqa: NPY002
    except TypeError:  # the program set another bit generator, which only its constructor can seed
        numpy_random: Any = np.random
        kind = type(numpy_random.get_bit_generator())
        numpy_random.set_bit_generator(kind(np.random.SeedSequence(numbers)))


_logger = logging.getLogger("synkhronos")


def _callback_setter_of(library: Any) -> int | None:
    """Return the address of the function by which an OpenBLAS takes threads from the program; ``None`` without it."""
    names = [
        f"{prefix}openblas_set_threads_callback_function{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")
    ]
    found = next((name for name in names if hasattr(library.dynlib, name)), None)
    return None if found is None else ctypes.cast(getattr(library.dynlib, found), ctypes.c_void_p).value


class ThreadLimits:
    """Limit the threads of BLAS, OpenMP and the backend in this process to its fair share of the cores.

    Parameters
    ----------
    n_ranks : int
        Number of processes that share the node's cores.
    quiet : bool
        Do not warn, because another process does.

    Attributes
    ----------
    is_wide : bool
        Whether the libraries use the cores of all ranks for now.
    """

    def __init__(self, n_ranks: int, quiet: bool) -> None:
        self._quiet = quiet
        self.is_wide = False
        self._n_threads = max(1, count_cores() // n_ranks)
        self._limited: set[str] = set()
        self._switches: list[tuple[Callable[[int], Any], int, int]] = []  # set threads; threads of all, and of one rank
        self._unserved: list[tuple[int, int]] = []  # arguments of `native.serve_blas`
        self._undo: list[Callable[[], Any]] = []
        self._backend_limited = False

    def apply(self) -> None:
        """Limit the libraries that this process has loaded since the last call."""
        if not self._backend_limited:
            end = limit_threads(self._n_threads)
            if end is not None:
                self._backend_limited = True
                self._undo.append(end)
        controller = self._find()
        if controller is None:
            return
        libraries = controller.info()
        loaded = {library["filepath"] for library in libraries}
        if loaded - self._limited:
            limits: dict[str, int] = {}  # never more than the user's own setting
            for library in libraries:
                most = min(library["num_threads"], self._n_threads)
                limits[library["prefix"]] = min(most, limits.get(library["prefix"], most))
            for library, found in zip(controller.lib_controllers, libraries):
                self._note_switch(library, found["num_threads"], limits[library.prefix])
            self._undo.append(controller.limit(limits=limits).restore_original_limits)
            self.is_wide = False
            self._limited |= loaded

    def _find(self) -> ThreadpoolController | None:
        with deferred_interrupts():  # signal handlers may raise an OSError, too
            try:
                return ThreadpoolController()
            except OSError as error:  # ThreadpoolController reads /proc
                if not self._quiet:
                    text = "cannot limit the threads of BLAS and OpenMP to each rank's cores (%s); set "
                    _logger.warning(text + "OMP_NUM_THREADS", error)
                self._quiet = True
                return None

    def _note_switch(self, library: Any, all_threads: int, own: int) -> None:
        """Prepare `widen` for a library that this process has just loaded."""
        if library.filepath in self._limited or all_threads <= own:
            return
        self._switches.append((library.set_num_threads, all_threads, own))
        setter = _callback_setter_of(library)
        if setter is not None:
            self._unserved.append((setter, all_threads))

    @property
    def most_threads(self) -> int:
        """Number of threads that the libraries use after `widen`."""
        return max([all_threads for _, all_threads, _ in self._switches], default=self._n_threads)

    def widen(self) -> None:
        """Let the libraries use as many threads as before `apply`, until `narrow`."""
        if self.is_wide:
            return
        self.is_wide = True
        while self._unserved:  # not earlier: a session that never comes here needs no threads
            native.serve_blas(*self._unserved.pop())
        native.use_threads(self.most_threads, True)
        for set_threads, all_threads, _ in self._switches:
            set_threads(all_threads)

    def narrow(self) -> None:
        """Undo `widen`."""
        self.is_wide = False
        native.use_threads(self._n_threads, False)
        for set_threads, _, own in self._switches:
            set_threads(own)

    def restore(self) -> None:
        """Undo `apply`."""
        native.end_blas()
        self._switches.clear()
        self._unserved.clear()
        self.is_wide = False
        while self._undo:
            self._undo.pop()()
        self._limited.clear()
        self._backend_limited = False
