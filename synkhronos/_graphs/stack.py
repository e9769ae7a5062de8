"""Room for recursion: graphs are deep, and Theano and pickle walk them recursively."""

from __future__ import annotations

import sys
import threading
from typing import Callable, TypeVar

from synkhronos._utils.background import Background
from synkhronos._utils.interrupts import deferred_interrupts, handle_interrupts

__all__ = ["with_deep_stack"]

_Result = TypeVar("_Result")
_STACK_BYTES = 512 * 1024 * 1024  # address space only; pages are used as the recursion needs them
_RECURSION_LIMIT = 1_000_000
_SECONDS = 0.05  # between two looks at signals

# Both settings are the process's: who comes first raises the limit, who leaves last lowers it again.
_settings = threading.Lock()
_limits: list[int] = []


def with_deep_stack(work: Callable[[], _Result]) -> _Result:
    """Run ``work`` where deep recursion overflows neither Python's limit nor the C stack.

    Handlers of signals run meanwhile. What they raise stops the work: when this returns or raises, it is over.
    """
    with deferred_interrupts():
        deep = Background(work, "synkhronos-deep-stack")
        with _settings:
            _limits.append(_limits[0] if _limits else sys.getrecursionlimit())
            sys.setrecursionlimit(max(_limits[0], _RECURSION_LIMIT))
        try:
            with _settings:
                stack = threading.stack_size(_STACK_BYTES)
                try:
                    deep.start()
                finally:
                    threading.stack_size(stack)
            while not deep.wait(_SECONDS):
                handle_interrupts()
        except BaseException:
            deep.stop()
            raise
        finally:
            with _settings:
                limit = _limits.pop()
                if not _limits:
                    sys.setrecursionlimit(limit)
    result: _Result = deep.outcome()
    return result
