"""Room for recursion: graphs are deep, and Theano and pickle walk them recursively.

What a program asks of the engine's ``function``, where that is diverted.

Calling a compiled function again and again: what the engine's own ``Function.__call__`` does, in the compiled core.

That takes 4 to 12 µs in Python, more than a small function itself. What an argument must be is looked at here, too; all
that is not plain (arguments to be cast, or that the function may write to; inputs with default values; a profile) is
left to the engine.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, Callable, TypeVar

import numpy as np

from synkhronos._backends import ancestors, running_parts
from synkhronos._core import native
from synkhronos._graph.shared_variables import call_on_rank, syncs_of
from synkhronos._utils.background import Background
from synkhronos._utils.interrupts import deferred_interrupts, handle_interrupts

__all__ = ["run_function", "variables_used", "with_deep_stack"]


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


def variables_used(arguments: dict[str, Any]) -> list[Any]:
    """The variables that a function will use, in some order that depends on the program alone.

    Parameters
    ----------
    arguments : dict
        As `synkhronos._backends.divert` hands them on.
    """
    asked = (arguments[name] for name in ("outputs", "givens", "updates"))
    outputs, givens, updates = ([] if one is None else one for one in asked)  # an expression has no truth
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    pairs = [pair for pairs in (givens, updates) for pair in (pairs.items() if hasattr(pairs, "items") else pairs)]
    found = [*(getattr(output, "variable", output) for output in outputs), *(new for _, new in pairs)]
    replaced = {*(getattr(item, "variable", item) for item in arguments["inputs"]), *(old for old, _ in pairs)}
    return [*(old for old, _ in pairs), *ancestors([one for one in found if hasattr(one, "owner")], replaced)]


def run_function(function: Any, subset: Sequence[int] | None = None) -> Callable[[list[Any]], list[Any]]:
    """What calls a compiled function, whose inputs are tensors, with a list of arrays; it returns (some) outputs.

    All ranks make such a call: the updates are values that all of them have.
    """
    execute, updated = _executing(function, subset), syncs_of(function)
    if not updated:
        return execute

    def run(values: list[Any]) -> list[Any]:
        results = execute(values)
        for sync in updated:
            if sync.sent is not None:
                sync.sent = sync.storage[0]
        return results

    return run


def _executing(function: Any, subset: Sequence[int] | None) -> Callable[[list[Any]], list[Any]]:
    if subset is not None:
        some = list(subset)
        return lambda values: call_on_rank(function, *values, output_subset=some)
    parts = running_parts(function)
    if parts is None:
        return lambda values: call_on_rank(function, *values)
    runner = native.Runner(
        parts.function,
        tuple([(cell, np.dtype(type_.dtype), tuple(map(bool, type_.broadcastable))) for type_, cell in parts.inputs]),
        parts.n_outputs,
        tuple(parts.emptied),
    )
    explain = parts.explain

    def run(values: list[Any]) -> list[Any]:
        try:
            results = runner(values)
        except Exception:
            explain()
            raise
        return call_on_rank(function, *values) if results is None else results

    return run
