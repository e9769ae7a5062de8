"""Parts that both backends share: the description of a Scan, of a compiled function's parts, and pickling helpers."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["GUARDS", "Loop", "Running", "absent", "errors_of", "new", "once"]


class Loop(NamedTuple):
    """Description of a Scan of a graph.

    Its inputs are the number of steps, sequences, states, shared variables, lengths of results, and all others; its
    outputs are states, results and shared variables. Pairs are (variable of a step, variable of the graph).
    """

    inputs: list[Any]  # of a step
    outputs: list[Any]  # of a step: new entries of states, results, new values of shared variables, maybe a condition
    n_steps: Any
    sequences: list[tuple[Any, Any]]
    states: list[tuple[list[Any], Any]]  # each with the entries that a step reads
    n_new: list[int]  # number of entries of each state that a step makes
    shared: list[tuple[Any, Any]]
    lengths: list[Any]  # lengths of the results
    others: list[tuple[Any, Any]]
    is_while: bool
    like: Callable[[Sequence[Any], Sequence[Any]], Any]  # makes an Op with the same structure and another step graph

    def new_states(self, outputs: Sequence[Any]) -> list[list[Any]]:
        """Return the new entries of each state, of the outputs of a step."""
        rest = list(outputs)
        return [[rest.pop(0) for _ in range(n)] for n in self.n_new]

    def results(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the results, of the outputs of a step."""
        return list(outputs)[sum(self.n_new) :][: len(self.lengths)]


class Running(NamedTuple):
    """The parts of a compiled function that are needed to call it without its own `__call__`."""

    function: Callable[[], Any]  # computes from the storage cells of the inputs; the outputs come first in its result
    inputs: list[tuple[Any, list[Any]]]  # type and storage cell of each input
    n_outputs: int
    emptied: list[list[Any]]  # storage cells to clear afterwards
    explain: Callable[[], None]  # raises the current exception again, with the backend's explanation


def absent(name: str) -> type:
    """Make a class without instances for an operation that a backend lacks, so that all backends share rules."""
    return type(name, (), {"__doc__": "Not in this engine."})


#: NanGuardMode's functions, which are closures and do not pickle: attribute of its linker, by qualified name.
GUARDS = {
    "NanGuardMode.__init__.<locals>.nan_check": "callback",
    "NanGuardMode.__init__.<locals>.nan_check_input": "callback_input",
}


def new(cls: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """Return the pickle reduction of an object with these attributes."""
    return copyreg.__newobj__, (cls,), state or None  # type: ignore[attr-defined]


def once(trace: Any, frames: dict[Any, Any]) -> Any:
    """Return an equal trace whose frames are the same objects wherever they occur again."""
    if isinstance(trace, list):
        return [once(part, frames) for part in trace]
    return frames.setdefault(trace, trace)


def errors_of(guard: Any) -> tuple[bool, ...]:
    """Return what a function of NanGuardMode reports as an error: NaN, infinity, large values."""
    check = inspect.getclosurevars(guard).nonlocals["do_check_on"]
    found = inspect.getclosurevars(check).nonlocals
    return tuple(bool(found[f"{kind}_is_error"]) for kind in ("nan", "inf", "big"))
