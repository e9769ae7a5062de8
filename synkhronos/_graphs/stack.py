"""Room for recursion: graphs are deep, and Theano and pickle walk them recursively."""

from __future__ import annotations

import sys
import threading
from typing import Any, Callable, TypeVar

__all__ = ["with_deep_stack"]

_Result = TypeVar("_Result")
_STACK_BYTES = 512 * 1024 * 1024  # address space only; pages are used as the recursion needs them
_RECURSION_LIMIT = 1_000_000


def with_deep_stack(work: Callable[[], _Result]) -> _Result:
    """Run ``work`` where deep recursion overflows neither Python's limit nor the C stack."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = work()
        except BaseException as error:
            outcome["error"] = error

    limit, stack = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    sys.setrecursionlimit(max(limit, _RECURSION_LIMIT))
    try:
        thread = threading.Thread(target=run, name="synkhronos-pickle")
        thread.start()
        thread.join()
    finally:
        threading.stack_size(stack)
        sys.setrecursionlimit(limit)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]
