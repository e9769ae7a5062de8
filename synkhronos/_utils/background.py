"""Run a function in a background thread that can be waited for and stopped, safely under signal handlers."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable

from synkhronos._utils.interrupts import deferred_interrupts

_SECONDS = 1.0  # time between two exceptions that are sent to stop a thread


class Background:
    """Function that runs once, in another thread.

    Unlike `threading.Event`, `Thread.start` and `Thread.join`, its methods are safe when a signal handler raises in the
    thread that calls them. With those of `threading`, a lock may stay locked, or a running thread may count as ended.

    Parameters
    ----------
    work : callable
        Function to run.
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
        """Start the thread."""
        with deferred_interrupts():
            self._thread.start()

    def _run(self) -> None:
        try:
            try:
                self._begun = True  # from here on, `stop` may send exceptions: they are caught
                if self._cancelled:
                    raise KeyboardInterrupt
                self._result = self._work()
            except BaseException as error:
                self._error = error
            with self._state_lock:
                self._over = True  # from here on, `stop` sends no exceptions
        except BaseException as error:  # an exception that `stop` sent just before
            self._error = error
        finally:
            self._over = True
            self._ended.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait at most ``seconds`` (-1: no limit) until the function has ended; return whether it has.

        The result is also ``True`` if the thread was not started.
        """
        if self._thread.ident is None:
            return True
        if not self._over and self._ended.acquire(timeout=seconds):
            self._ended.release()  # for another thread that waits
        if self._over:
            with deferred_interrupts():
                self._thread.join()
        return self._over

    def stop(self) -> None:
        """Raise `KeyboardInterrupt` in the thread, and wait until the thread has ended. Signals are deferred meanwhile.

        The exception is sent repeatedly, because Python drops exceptions that occur in finalizers. A thread that has
        not begun to run the function raises the exception itself, because a sent one would not be caught.
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
        """Return the result of the function after it has ended, or raise the exception that it raised."""
        if self._error is None:
            return self._result
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
