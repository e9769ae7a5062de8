"""Defer signal handlers around code that must not be interrupted, and detect the exceptions that handlers raise.

Python runs signal handlers in its main thread, between any two bytecode instructions. Their exceptions are raised
there: `KeyboardInterrupt` for Ctrl-C, and those of a program's own handlers of SIGALRM, SIGTERM, … Nearly all code of
this package may be interrupted at any point. The rest runs in a block of `deferred_interrupts`.

`FinalizerQueue` records which objects have been finalized, and signal handlers cannot interrupt that. An ordinary
finalizer is not safe: Python prints and drops an exception that a signal handler raises in it, and the memory that it
should free leaks. Therefore no Python code runs when an object is finalized. C code appends a weak reference, which has
a key as an attribute, to a queue. Other code reads the queue later, and frees the memory.

`Background` runs a function in a thread that can be waited for and stopped, safely under signal handlers.

`new_lock` makes locks that a process forked by another thread can acquire.
"""

from __future__ import annotations

import _signal  # `signal` converts numbers to enums, which would take longer than all else here
import contextlib
import ctypes
import functools
import gc
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Callable, Generic, TypeVar

from synkhronos._native import native

_NUMBERS = tuple(range(1, _signal.NSIG))

_FRAMES = 50  # more than the depth of nested calls in any block

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """Return a `threading.RLock`; after a fork, the new process can acquire it even if another thread held it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _release_locks() -> None:
    """Release the locks of threads that do not exist in this process, which another thread has forked."""
    for lock in _locks:
        if not lock._is_owned():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_release_locks)

#: A signal that arrives again within this many seconds counts as the same one, because launchers pass signals on.
_SAME_SECONDS = 0.3

# State of the main thread: depth of nested blocks, whether a second signal may end the outermost one, the signal that
# came a second time, if any, and whether its handler has raised an exception; the program's handlers that `_note`
# replaces, and pending signals with the times of their arrival.
_depth = 0
_may_end = _has_ended = False
_second: int | None = None
_handlers: dict[int, Any] = {}
_came: dict[int, float] = {}


def _note(number: int, frame: Any) -> None:
    """Record a pending signal; the handler of all signals inside a block."""
    global _second
    if not _depth:  # the block has not begun yet, or has ended: run the program's handler now
        if number in _handlers:
            _handlers[number](number, frame)
    elif number not in _came:  # pending signals of one number merge, as in the kernel
        _came[number] = time.monotonic()
    elif time.monotonic() - _came[number] > _SAME_SECONDS:
        _second = number


def _python_handlers() -> dict[int, Any]:
    """Return the program's own handlers, by signal number."""
    return native.get_handlers(_signal.getsignal, _NUMBERS, _note, _handlers)


class deferred_interrupts:
    """Context manager that defers signal handlers until the end of its block.

    It has no effect in threads other than the main one, where no handlers run. It takes about 6 µs, too much for each
    call of a function.

    Parameters
    ----------
    may_end : bool
        Whether `handle_second_signal` runs handlers, except in nested blocks.
    """

    def __init__(self, may_end: bool = False) -> None:
        self._may_end = may_end

    def __enter__(self) -> None:
        global _depth, _may_end, _second
        native.require_frames(_FRAMES)  # raises RecursionError before the block instead of inside it
        self._deferring = threading.get_ident() == threading.main_thread().ident
        if self._deferring:
            if not _depth:
                self._replaced = _python_handlers()
                _handlers.update(self._replaced)
                notes = dict.fromkeys(self._replaced, _note)
                _may_end, _second = self._may_end, None
            _depth += 1  # from here on, handlers can only interrupt the call of `set_handlers`
            if _depth == 1:
                try:
                    raised = native.set_handlers(_signal.signal, notes)
                    if raised:  # exceptions of handlers that ran before they were replaced
                        raise raised[-1]
                except BaseException:
                    self.__exit__()
                    raise

    def __exit__(self, *exception: object) -> None:
        global _depth
        if self._deferring:
            raised: list[BaseException] = []
            try:
                if _depth == 1:  # stays 1 while handlers are restored, so that `_note` still defers
                    raised = native.set_handlers(_signal.signal, self._replaced)
            finally:
                _depth -= 1
                if not _depth:
                    _handle(sys._getframe(1))
            if raised:
                raise raised[-1]


def _handle(frame: Any) -> None:
    """Run the handlers of all pending signals, even if some of them raise."""
    if _came:
        try:
            number = list(_came)[0]  # noqa: RUF015  (a signal may come within `next`)
            del _came[number]
            _handlers[number](number, frame)
        finally:
            _handle(frame)


def handle_interrupts() -> None:
    """Run the handlers of pending signals inside a block; signals that arrive meanwhile are still deferred."""
    if threading.get_ident() == threading.main_thread().ident:
        _handle(sys._getframe(1))


def handle_second_signal() -> None:
    """Run the handler of a signal that came a second time in a block with ``may_end``; to be called by its waits."""
    global _second, _has_ended
    is_main = threading.get_ident() == threading.main_thread().ident
    if _second is None or not _may_end or _depth != 1 or not is_main:
        return
    number, _second = _second, None
    _came[number] = time.monotonic()
    try:
        _handlers[number](number, sys._getframe(1))
    except BaseException:
        _has_ended = True
        raise


def take_end() -> bool:
    """Return whether `handle_second_signal` has raised an exception since this was last called."""
    global _has_ended
    has_ended, _has_ended = _has_ended, False
    return has_ended


def interrupt_behind(error: BaseException) -> BaseException | None:
    """Return the exception of a signal handler that is, or has caused, ``error``; ``None`` if there is none.

    Code that is interrupted may raise another exception while it cleans up, or raise the same one again. The function
    therefore follows ``__context__``, and looks for the frames of handlers in the tracebacks. It stops at an exception
    that a caller of the catching frame is handling, because that one is older and has not caused ``error``.
    """
    codes = {_code_of(handler) for handler in _python_handlers().values()} - {None}
    callers = _callers_of(error)
    found: BaseException | None = error
    while found is not None:
        trace = found.__traceback__
        if trace is not None and trace.tb_frame in callers:
            return None
        if any(frame.f_code in codes for frame, _ in traceback.walk_tb(trace)):
            return found
        if isinstance(found, KeyboardInterrupt):  # Python's own handler is in C, so it has no frame in the traceback
            return found
        found = found.__context__
    return None


def _callers_of(error: BaseException) -> list[Any]:
    """Return the callers of the frame that has caught an exception."""
    trace = error.__traceback__
    return [] if trace is None else [frame for frame, _ in traceback.walk_stack(trace.tb_frame)][1:]


def let_interrupts_pass(error: BaseException) -> None:
    """Raise the exception of a signal handler again if it is, or has caused, ``error``; otherwise do nothing.

    Call this where code catches all exceptions and converts them to something else.
    """
    interrupt = interrupt_behind(error)
    try:
        if interrupt is not None:
            raise interrupt
    finally:
        del interrupt, error  # their tracebacks refer to this frame


def _code_of(handler: Any) -> Any:
    """Return the code object of a Python handler (function, method, callable object or partial); else ``None``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def collect_garbage() -> None:
    """Run the garbage collector with signals deferred, because Python drops exceptions that occur in finalizers."""
    with deferred_interrupts():
        gc.collect()


_Key = TypeVar("_Key")


class _Ending(weakref.ref):
    __slots__ = ("key",)
    key: Any


class FinalizerQueue(Generic[_Key]):
    """Queue of the keys of objects that have been finalized.

    Attributes
    ----------
    waiting : deque
        Weak references to finalized objects whose keys were not taken yet.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Ending] = {}
        self.waiting: deque[_Ending] = deque()

    def watch(self, thing: Any, key: _Key) -> None:
        """Append ``key`` to the queue when an object is finalized."""
        ending = _Ending(thing, self.waiting.append)
        ending.key = key
        self._watched[id(ending)] = ending

    def take(self) -> Iterator[_Key]:
        """Yield the keys of finalized objects, and remove each from the queue when the next one is requested.

        If an exception interrupts the processing of a key, the next call yields that key again.
        """
        while True:
            try:
                ending = self.waiting[0]
            except IndexError:
                return
            yield ending.key
            self._watched.pop(id(ending), None)
            with contextlib.suppress(ValueError):  # another thread that takes keys has removed it
                self.waiting.remove(ending)


# -- threads

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
