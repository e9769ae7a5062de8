"""Fast calls of compiled functions, large stacks for deep recursion, and the variables of a ``function`` call.

The backend's own ``Function.__call__`` takes 4 to 12 µs in Python, more than a small function itself. Here the compiled
core does its work, and also checks the arguments. It leaves other cases to the backend: arguments to be cast, arguments
that the function may write to, inputs with default values, profiles.

Theano and pickle traverse graphs recursively. Graphs are deep, so `with_deep_stack` runs this with a large stack.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, Callable, TypeVar

import numpy as np

from synkhronos._backends import ancestors, running_parts
from synkhronos._graph.shared_variables import call_on_rank, syncs_of
from synkhronos._native import native
from synkhronos._native.native import are_of_kinds  # noqa: F401 - for other folders
from synkhronos._utils.interrupts import Background, deferred_interrupts, handle_interrupts, new_lock

_Result = TypeVar("_Result")
_STACK_BYTES = 512 * 1024 * 1024  # address space; memory is used only as the recursion needs it
_RECURSION_LIMIT = 1_000_000
_SECONDS = 0.05  # interval of checks for signals

# Both settings are process-wide: the first of concurrent calls raises the limit, the last one restores it.
_settings = new_lock()
_limits: list[int] = []


def with_deep_stack(work: Callable[[], _Result]) -> _Result:
    """Run ``work`` in a thread with a large stack and a high recursion limit; return its result.

    The calling thread waits, and still runs signal handlers. An exception from a handler stops the work. The work has
    always ended when this function returns or raises.
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
    """Return the variables of the graph that a function will compute, in an order that is the same in every run.

    Parameters
    ----------
    arguments : dict
        Keyword arguments of the backend's ``function``, as `synkhronos._backends.divert` passes them.
    """
    asked = (arguments[name] for name in ("outputs", "givens", "updates"))
    outputs, givens, updates = ([] if one is None else one for one in asked)  # no `or`: expressions have no truth value
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    pairs = [pair for pairs in (givens, updates) for pair in (pairs.items() if hasattr(pairs, "items") else pairs)]
    found = [*(getattr(output, "variable", output) for output in outputs), *(new for _, new in pairs)]
    replaced = {*(getattr(item, "variable", item) for item in arguments["inputs"]), *(old for old, _ in pairs)}
    return [*(old for old, _ in pairs), *ancestors([one for one in found if hasattr(one, "owner")], replaced)]


def run_function(function: Any, subset: Sequence[int] | None = None) -> Callable[[list[Any]], list[Any]]:
    """Return a callable that takes a list of arrays, calls a compiled function, and returns its outputs.

    It is for calls that all ranks make. Its updates therefore do not count as values that the program has set: see
    `SentValue`.

    Parameters
    ----------
    function : compiled function
        A function whose inputs are all dense arrays.
    subset : sequence of int, optional
        Positions of the outputs to compute.
    """
    updated = syncs_of(function)
    some = {} if subset is None else {"output_subset": list(subset)}

    def checked(values: list[Any]) -> list[Any]:
        results = call_on_rank(function, *values, **some)
        native.follow_values(updated)
        return results

    parts = running_parts(function) if subset is None else None
    if parts is None:
        return checked
    runner = native.FastCall(
        parts.function,
        tuple([(cell, np.dtype(type_.dtype), tuple(map(bool, type_.broadcastable))) for type_, cell in parts.inputs]),
        parts.n_outputs,
        tuple(parts.emptied),
        updated,
    )
    explain = parts.explain

    def run(values: list[Any]) -> list[Any]:
        try:
            results = runner(values)
        except Exception:
            explain()
            raise
        return checked(values) if results is None else results

    return run
