"""Defer signals whose Python handlers may raise, around the few instructions that must not be interrupted.

Python runs the handlers of signals in its main thread, between any two instructions, and their exceptions appear
there: `KeyboardInterrupt` for Ctrl-C, and those of a program's own handlers of SIGALRM, SIGTERM, … Nearly all code of
this package may be left at any point. The rest runs in a block of `deferred_interrupts`.

`FinalizerQueue` reports which objects have ended, and cannot be interrupted either. An object may end at any moment,
and a handler may raise at any moment: Python prints and drops the exception of a finalizer, so the memory that the
finalizer was to free would leak. Therefore no Python code runs when an object ends: C code appends a weak reference,
which carries a key, to a queue, and the code that acts on it reads the queue when it has time.
"""

from __future__ import annotations

import _signal  # without the conversions to enums of `signal`, which take longer than everything else here
import functools
import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from synkhronos._native import native

_NUMBERS = range(1, _signal.NSIG)

_FRAMES = 50  # more than the calls in any such block nest

# State of the main thread: depth of nested blocks, the handlers that `_note` replaces or has replaced, pending signals.
_depth = 0
_handlers: dict[int, Any] = {}
_came: list[int] = []


def _note(number: int, frame: Any) -> None:
    if not _depth:  # the block has not begun yet, or has ended
        if number in _handlers:
            _handlers[number](number, frame)
    elif number not in _came:  # pending signals of one number merge, as in the kernel
        _came.append(number)


def _python_handlers() -> dict[int, Any]:
    """Return the program's own handlers, by number of the signal."""
    found = {number: handler for number in _NUMBERS if callable(handler := _signal.getsignal(number))}
    own = {number: _handlers.get(number) if handler is _note else handler for number, handler in found.items()}
    return {number: handler for number, handler in own.items() if handler is not None}


class deferred_interrupts:
    """Defer the handlers of signals that arrive inside the block until the block ends.

    In threads other than the main one there is nothing to defer. A block takes about 10 µs, too much for every call.
    """

    def __enter__(self) -> None:
        global _depth
        native.require_frames(_FRAMES)  # raises RecursionError before the block instead of inside it
        self._deferring = threading.get_ident() == threading.main_thread().ident
        if self._deferring:
            if not _depth:
                self._replaced = _python_handlers()
                _handlers.update(self._replaced)
                notes = dict.fromkeys(self._replaced, _note)
            _depth += 1  # from here on, handlers can only interrupt the call that replaces them
            if _depth == 1:
                try:
                    raised = native.set_handlers(_signal.signal, notes)
                    if raised:  # exceptions of handlers that were not replaced yet
                        raise raised[-1]
                except BaseException:
                    self.__exit__()
                    raise

    def __exit__(self, *exception: object) -> None:
        global _depth
        if self._deferring:
            raised: list[BaseException] = []
            try:
                if _depth == 1:  # keep it at 1 while handlers are restored, so that `_note` still defers
                    raised = native.set_handlers(_signal.signal, self._replaced)
            finally:
                _depth -= 1
                if not _depth:
                    _handle(sys._getframe(1))
            if raised:
                raise raised[-1]


def _handle(frame: Any) -> None:
    """Handle all pending signals, even if some handlers raise."""
    if _came:
        try:
            number = _came.pop(0)
            _handlers[number](number, frame)
        finally:
            _handle(frame)


def handle_interrupts() -> None:
    """Run the handlers of the signals that are pending inside a block; signals that arrive meanwhile stay deferred."""
    if threading.get_ident() == threading.main_thread().ident:
        _handle(sys._getframe(1))


def interrupt_behind(error: BaseException) -> BaseException | None:
    """Return the exception of a signal's handler that ``error`` is, or that caused it; ``None`` if there is none.

    The traceback shows it: code that an interrupt leaves may raise another exception on its way out, or the same one
    again. An exception that a caller of the catching frame is handling is older, and did not cause ``error``.
    """
    codes = {_code_of(handler) for handler in _python_handlers().values()} - {None}
    callers = _callers_of(error)
    found: BaseException | None = error
    while found is not None:
        trace = found.__traceback__
        if trace is not None and trace.tb_frame in callers:
            return None
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                return found
            trace = trace.tb_next
        if isinstance(found, KeyboardInterrupt):  # Python's own handler is in C, without a frame in the traceback
            return found
        found = found.__context__
    return None


def _callers_of(error: BaseException) -> list[Any]:
    """Return the callers of the frame that has caught an exception."""
    callers: list[Any] = []
    frame = error.__traceback__.tb_frame.f_back if error.__traceback__ is not None else None
    while frame is not None:
        callers.append(frame)
        frame = frame.f_back
    return callers


def let_interrupts_pass(error: BaseException) -> None:
    """Raise the exception of a signal's handler again if ``error`` is that, or was caused by it.

    Call it where code catches every exception and turns it into another one.
    """
    interrupt = interrupt_behind(error)
    try:
        if interrupt is not None:
            raise interrupt
    finally:
        del interrupt, error  # their tracebacks refer to this frame


def _code_of(handler: Any) -> Any:
    """Return the code of a handler written in Python (function, method, callable object, partial), else ``None``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def collect_garbage() -> None:
    """Run the garbage collector with signals deferred: Python drops exceptions that occur in finalizers."""
    with deferred_interrupts():
        gc.collect()


_Key = TypeVar("_Key")


class _Ending(weakref.ref):
    __slots__ = ("key",)
    key: Any


class FinalizerQueue(Generic[_Key]):
    """Queue of the keys of objects that have ended.

    Attributes
    ----------
    waiting : deque
        Not empty if objects have ended whose keys were not taken yet.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Ending] = {}
        self.waiting: deque[_Ending] = deque()

    def watch(self, thing: Any, key: _Key) -> None:
        """Record the key when the object ends."""
        ending = _Ending(thing, self.waiting.append)
        ending.key = key
        self._watched[id(ending)] = ending

    def take(self) -> Iterator[_Key]:
        """Yield the keys of objects that have ended; if acting on a key is interrupted, it is yielded again."""
        while self.waiting:
            ending = self.waiting[0]
            yield ending.key
            self._watched.pop(id(ending), None)
            self.waiting.popleft()
