"""Holding back Ctrl-C for the few instructions that may not be torn apart."""

from __future__ import annotations

import _signal  # what is behind `signal`, whose conversions to enums take longer than all else here
import gc
import threading
from typing import Any

__all__ = ["collect_garbage", "deferred_interrupts"]


class deferred_interrupts:
    """Handle a SIGINT that comes inside the block when the block ends.

    Python interrupts its main thread alone: in others there is nothing to defer.
    """

    def __enter__(self) -> None:
        self._came = False
        self._deferring = threading.get_ident() == threading.main_thread().ident
        if self._deferring:
            self._handler = _signal.signal(_signal.SIGINT, self._note)

    def __exit__(self, *exception: object) -> None:
        if self._deferring:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL if self._handler is None else self._handler)
            if self._came:
                _signal.raise_signal(_signal.SIGINT)

    def _note(self, *_: Any) -> None:
        self._came = True


def collect_garbage() -> None:
    """Run the garbage collector so that no Ctrl-C is lost: Python drops exceptions that finalizers raise."""
    with deferred_interrupts():
        gc.collect()
