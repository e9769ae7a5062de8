"""Telling the user's program what happened, without making anything worse."""

from __future__ import annotations

import contextlib
import logging

from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["log"]


def log(level: int, message: str, *args: object) -> None:
    """Log a message where the work must go on whatever comes of it.

    The stream of a logging handler may be closed by now; and logging swallows what a signal's handler raises meanwhile.
    """
    with deferred_interrupts(), contextlib.suppress(AttributeError, OSError, ValueError):
        logging.getLogger("synkhronos").log(level, message, *args, stacklevel=2)
