"""Each rank's fair part of the cores."""

from __future__ import annotations

import logging
from typing import Any, Callable

from threadpoolctl import ThreadpoolController

from synkhronos._backends import limit_threads
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.resources import count_cores

__all__ = ["ThreadLimits"]

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
