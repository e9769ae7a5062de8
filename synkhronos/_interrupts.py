"""Holding back Ctrl-C for the few instructions that may not be torn apart."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["collect_garbage", "deferred_interrupts"]


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Handle a SIGINT that comes inside the block when the block ends.

    Python interrupts its main thread alone: in others there is nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler if handler is not None else signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGINT)


def collect_garbage() -> None:
    """Run the garbage collector so that no Ctrl-C is lost: Python drops exceptions that finalizers raise."""
    with deferred_interrupts():
        gc.collect()
