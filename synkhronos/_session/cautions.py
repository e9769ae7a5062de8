"""Warnings about what the user's program does, at the line of that program which does it."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator

from synkhronos._utils.resources import count_cores

__all__ = ["check_cores", "check_threads", "warn"]

#: Whose threads are there in every notebook and every debugger, and hold no lock that a worker needs.
_HARMLESS = ("IPython", "ipykernel", "debugpy", "_pydevd_bundle", "pydevd")

#: Modules between the user's program and a warning.
_OWN = ("synkhronos", "contextlib")


def check_cores(n_ranks: int) -> None:
    """Warn if there are more ranks than CPU cores."""
    n_cores = count_cores()
    if n_ranks > n_cores:
        warn(
            f"synkhronos.fork: {n_ranks} ranks share {n_cores} CPU core{'s' * (n_cores > 1)} and take turns, which is "
            "slower than one rank on each core; `python -m synkhronos info` tells what this machine has"
        )


def check_threads() -> None:
    """Warn if threads run beside the one that forks."""
    names = sorted(_names_of_other_threads())
    if names:
        warn(
            f"synkhronos.fork: other threads are running ({', '.join(names)}). Locks that they hold now, in NumPy or "
            "Theano for example, stay locked in the workers, which may then hang: fork before starting threads"
        )


def _names_of_other_threads() -> Iterator[str]:
    for thread in threading.enumerate():
        work = getattr(thread, "_target", None)
        owners = [type(thread).__module__, getattr(work, "__module__", None) or ""]
        if thread is not threading.current_thread() and not any(one.split(".")[0] in _HARMLESS for one in owners):
            yield thread.name


def warn(message: str) -> None:
    """Warn, at the line of the program that called this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OWN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)
