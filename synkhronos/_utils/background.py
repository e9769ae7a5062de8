"""Run a function in a thread that its starter can wait for and stop, and be interrupted at any instant."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable

from synkhronos._utils.interrupts import deferred_interrupts

_SECONDS = 1.0  # between two exceptions that are sent to stop a thread


class Background:
    """Function that runs once, in another thread.

    `threading.Event`, `Thread.start` and `Thread.join` are not safe when the handler of a signal raises in the thread
    that waits in them: a lock may stay taken, or a running thread may count as ended.

    Parameters
    ----------
    work : callable
    name : str
        Name of the thread.
    daemon : bool
        Whether Python exits without waiting for the thread.
    """

    def __init__(self, work: Callable[[], Any], name: str, daemon: bool = False) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = self._begun = self._cancelled = False
        self._ended, self._state_lock = threading.Lock(), threading.Lock()
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
            with self._state_lock:
                self._over = True  # no exception is sent from here on
        except BaseException as error:  # an exception that was sent just before
            self._error = error
        finally:
            self._over = True
            self._ended.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait at most ``seconds`` (-1: no limit) until the work is over; return whether it is."""
        if self._thread.ident is None:  # it has not started
            return True
        if not self._over:
            self._ended.acquire(timeout=seconds)
        if self._over:
            with deferred_interrupts():
                self._thread.join()
        return self._over

    def stop(self) -> None:
        """Raise `KeyboardInterrupt` in the thread, and wait until it has ended; meanwhile signals are deferred.

        The exception is sent repeatedly, because Python drops exceptions in finalizers. A thread that has not begun its
        work raises the exception itself: a sent one would end the thread without any report.
        """
        with deferred_interrupts():
            self._cancelled = True
            while True:
                with self._state_lock:
                    thread = self._thread.ident
                    if self._begun and not self._over and thread is not None:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt)
                        )
                if self.wait(_SECONDS):
                    return

    def outcome(self) -> Any:
        """Return the result of the work, once it is over; raise the exception that it raised."""
        if self._error is None:
            return self._result
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # it refers to this frame
