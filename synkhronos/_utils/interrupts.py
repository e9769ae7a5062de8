"""Signals whose Python handlers may raise: held back for the few instructions that may not be torn apart.

Python runs the handlers of signals in its main thread, between any two instructions, and what they raise appears there:
`KeyboardInterrupt` for Ctrl-C, and whatever a program's own handlers of SIGALRM, SIGTERM, … raise. Nearly everything
here is written such that it may be left at any point. Where that cannot be had, a block of `deferred_interrupts` helps.

Noting which objects have ended, in a way that no signal's handler can tear apart.

Objects may end at any moment, and at any moment a handler may raise. A finalizer in Python that this hits is printed
and lost, and with it the memory that it was to give back. So nothing of Python runs when an object ends: C code puts a
weak reference, which bears a key, into a queue, and whoever is to act on it looks there when it has time.
"""

from __future__ import annotations

import _signal  # what is behind `signal`, whose conversions to enums take longer than all else here
import functools
import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from synkhronos._native import native

__all__ = [
    "Endings",
    "collect_garbage",
    "deferred_interrupts",
    "handle_interrupts",
    "interrupt_behind",
    "let_interrupts_pass",
]


_NUMBERS = range(1, _signal.NSIG)

_FRAMES = 50  # deeper than any such block calls

# Of the main thread: how many blocks it is in, the handlers that `_note` stands in for or did, and what signals came.
_depth = 0
_handlers: dict[int, Any] = {}
_came: list[int] = []


def _note(number: int, frame: Any) -> None:
    if not _depth:  # before the block begins, or after it has ended
        if number in _handlers:
            _handlers[number](number, frame)
    elif number not in _came:  # the kernel would not have them queue up, either
        _came.append(number)


def _python_handlers() -> dict[int, Any]:
    """The program's own handlers, by number of the signal."""
    found = {number: handler for number in _NUMBERS if callable(handler := _signal.getsignal(number))}
    own = {number: _handlers.get(number) if handler is _note else handler for number, handler in found.items()}
    return {number: handler for number, handler in own.items() if handler is not None}


class deferred_interrupts:
    """Run the handlers of signals that come inside the block when the block ends.

    In threads other than the main one there is nothing to defer. It takes some 10 µs, too much for every call.
    """

    def __enter__(self) -> None:
        global _depth
        native.require_frames(_FRAMES)  # what is in the block is not torn apart by a `RecursionError` either
        self._deferring = threading.get_ident() == threading.main_thread().ident
        if self._deferring:
            if not _depth:
                self._replaced = _python_handlers()
                _handlers.update(self._replaced)
                notes = dict.fromkeys(self._replaced, _note)
            _depth += 1  # from here on nothing is called that a handler could interrupt, but what sets them
            if _depth == 1:
                try:
                    raised = native.set_handlers(_signal.signal, notes)
                    if raised:  # by handlers that were not replaced yet
                        raise raised[-1]
                except BaseException:
                    self.__exit__()
                    raise

    def __exit__(self, *exception: object) -> None:
        global _depth
        if self._deferring:
            raised: list[BaseException] = []
            try:
                if _depth == 1:  # and stays that until all is put back: what `_note` handles may not tear this apart
                    raised = native.set_handlers(_signal.signal, self._replaced)
            finally:
                _depth -= 1
                if not _depth:
                    _handle(sys._getframe(1))
            if raised:
                raise raised[-1]


def _handle(frame: Any) -> None:
    """Handle all that has come, even if some handlers raise."""
    if _came:
        try:
            number = _came.pop(0)
            _handlers[number](number, frame)
        finally:
            _handle(frame)


def handle_interrupts() -> None:
    """Run the handlers of the signals that have come so far, inside a block; what comes meanwhile is deferred, too."""
    if threading.get_ident() == threading.main_thread().ident:
        _handle(sys._getframe(1))


def interrupt_behind(error: BaseException) -> BaseException | None:
    """What a handler of a signal has raised, if an exception is that, or was raised because of it; else ``None``.

    The traceback tells. Code that an interrupt tears apart may raise something else on its way out, or the same anew.
    What a caller of the frame that has caught the exception is handling was there before, and has not caused it.
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
        if isinstance(found, KeyboardInterrupt):  # its handler is written in C
            return found
        found = found.__context__
    return None


def _callers_of(error: BaseException) -> list[Any]:
    """The frames that called the one that has caught an exception."""
    callers: list[Any] = []
    frame = error.__traceback__.tb_frame.f_back if error.__traceback__ is not None else None
    while frame is not None:
        callers.append(frame)
        frame = frame.f_back
    return callers


def let_interrupts_pass(error: BaseException) -> None:
    """Raise what a handler of a signal has raised, where an exception was caught that may be that.

    For whoever catches all that a piece of code may raise, and makes something else of it.
    """
    interrupt = interrupt_behind(error)
    try:
        if interrupt is not None:
            raise interrupt
    finally:
        del interrupt, error  # which refer to this frame


def _code_of(handler: Any) -> Any:
    """The code of a handler that is written in Python: a function, a method, a callable object, or part of one."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def collect_garbage() -> None:
    """Run the garbage collector so that no interrupt is lost: Python drops exceptions that finalizers raise."""
    with deferred_interrupts():
        gc.collect()


_Key = TypeVar("_Key")


class _Ending(weakref.ref):
    __slots__ = ("key",)
    key: Any


class Endings(Generic[_Key]):
    """The keys of objects that have ended.

    Attributes
    ----------
    waiting : deque
        Empty, unless some have ended whose keys are to be taken.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Ending] = {}
        self.waiting: deque[_Ending] = deque()

    def watch(self, thing: Any, key: _Key) -> None:
        """Note the key when the thing ends."""
        ending = _Ending(thing, self.waiting.append)
        ending.key = key
        self._watched[id(ending)] = ending

    def take(self) -> Iterator[_Key]:
        """What has ended since the last time; a key comes again if whoever acts on it is interrupted."""
        while self.waiting:
            ending = self.waiting[0]
            yield ending.key
            self._watched.pop(id(ending), None)
            self.waiting.popleft()
