"""Telling the user's program what happened, without making anything worse."""

from __future__ import annotations

import contextlib
import logging

__all__ = ["log"]


def log(level: int, message: str, *args: object) -> None:
    """Log a message where the work must go on whatever comes of it: the stream of a handler may be closed by now."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        logging.getLogger("synkhronos").log(level, message, *args, stacklevel=2)
