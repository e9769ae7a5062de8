"""Work in a thread of its own, whose starter waits for it and may be interrupted at any instant."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable

from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["Background"]

_SECONDS = 1.0  # between two exceptions that stop a thread


class Background:
    """A function that runs in another thread, once.

    `threading.Event`, `Thread.start` and `Thread.join` do not bear that a signal's handler raises in the one who
    waits in them: they may leave a lock taken, or take a thread that runs for one that has ended.

    Parameters
    ----------
    work : callable
    name : str
        Of the thread.
    daemon : bool
        Whether Python, when it exits, does not wait for the thread.
    """

    def __init__(self, work: Callable[[], Any], name: str, daemon: bool = False) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = self._begun = self._cancelled = False
        self._ended, self._telling = threading.Lock(), threading.Lock()
        self._ended.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)

    def start(self) -> None:
        with deferred_interrupts():
            self._thread.start()

    def _run(self) -> None:
        try:
            try:
                self._begun = True  # from here on an exception is caught
                if self._cancelled:
                    raise KeyboardInterrupt
                self._result = self._work()
            except BaseException as error:
                self._error = error
            with self._telling:
                self._over = True  # no exception is sent from here on
        except BaseException as error:  # one that was sent just before
            self._error = error
        finally:
            self._over = True
            self._ended.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait until the work is over, for so long at most; whether it is."""
        if self._thread.ident is None:  # it has not started
            return True
        if not self._over:
            self._ended.acquire(timeout=seconds)
        if self._over:
            with deferred_interrupts():
                self._thread.join()
        return self._over

    def stop(self) -> None:
        """Raise an exception in the thread, and wait until it has ended; further interrupts are deferred until then.

        It is raised again and again: Python drops what comes in a finalizer. A thread that has not come to its work
        raises it itself: one that was sent there would end the thread without a sign.
        """
        with deferred_interrupts():
            self._cancelled = True
            while True:
                with self._telling:
                    thread = self._thread.ident
                    if self._begun and not self._over and thread is not None:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt)
                        )
                if self.wait(_SECONDS):
                    return

    def outcome(self) -> Any:
        """What the work returned, once it is over; what it raised is raised."""
        if self._error is None:
            return self._result
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # it refers to this frame
