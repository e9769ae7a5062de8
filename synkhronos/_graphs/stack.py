"""Room for recursion: graphs are deep, and Theano and pickle walk them recursively."""

from __future__ import annotations

import sys
import threading
from typing import Callable, TypeVar

from synkhronos._background import Background

__all__ = ["with_deep_stack"]

_Result = TypeVar("_Result")
_STACK_BYTES = 512 * 1024 * 1024  # address space only; pages are used as the recursion needs them
_RECURSION_LIMIT = 1_000_000


def with_deep_stack(work: Callable[[], _Result]) -> _Result:
    """Run ``work`` where deep recursion overflows neither Python's limit nor the C stack.

    An interrupt stops it: when this returns or raises, it is over.
    """
    limit, stack = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    sys.setrecursionlimit(max(limit, _RECURSION_LIMIT))
    deep = Background(work, "synkhronos-deep-stack")
    try:
        try:
            deep.start()
            deep.wait()
        except BaseException:
            deep.stop()
            raise
    finally:
        threading.stack_size(stack)
        sys.setrecursionlimit(limit)
    result: _Result = deep.outcome()
    return result
