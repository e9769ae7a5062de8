"""A Scan as it is read: its steps, and what goes in and comes out.

What it takes to call a compiled function without its own `__call__`.

What stands for a kind of operation that an engine has not.

How what both engines have travels: objects with attributes, traces, and the parts of NanGuardMode.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["GUARDS", "Loop", "Running", "absent", "errors_of", "new", "once"]


class Loop(NamedTuple):
    """A Scan of a graph.

    Its inputs are the number of steps, sequences, states, shared variables, the lengths of results, and all others; its
    outputs are states, results and shared variables. Pairs are (variable of a step, variable of the graph).
    """

    inputs: list[Any]  # of a step
    outputs: list[Any]  # of a step: new entries of states, results, new shared variables, perhaps a condition
    n_steps: Any
    sequences: list[tuple[Any, Any]]
    states: list[tuple[list[Any], Any]]  # with the entries that a step reads
    n_new: list[int]  # how many entries of each state a step makes
    shared: list[tuple[Any, Any]]
    lengths: list[Any]  # of the results
    others: list[tuple[Any, Any]]
    is_while: bool
    like: Callable[[Sequence[Any], Sequence[Any]], Any]  # an Op of as many sequences, states …, and of other steps

    def new_states(self, outputs: Sequence[Any]) -> list[list[Any]]:
        """Of the outputs of a step, the new entries of each state."""
        rest = list(outputs)
        return [[rest.pop(0) for _ in range(n)] for n in self.n_new]

    def results(self, outputs: Sequence[Any]) -> list[Any]:
        """Of the outputs of a step, the results."""
        return list(outputs)[sum(self.n_new) :][: len(self.lengths)]


class Running(NamedTuple):
    """What calls a compiled function without its own `__call__`."""

    function: Callable[[], Any]  # computes from the cells of the inputs; returns the outputs, then maybe others
    inputs: list[tuple[Any, list[Any]]]  # type and cell of each
    n_outputs: int
    emptied: list[list[Any]]  # the cells that are to be emptied afterwards
    explain: Callable[[], None]  # raises what is being raised, with the engine's own words


def absent(name: str) -> type:
    """A class that no operation is of, so that tables of rules are the same for all engines."""
    return type(name, (), {"__doc__": "Not in this engine."})


#: The functions that are the parts of NanGuardMode, closures that do not pickle, by the attributes of its linker.
GUARDS = {
    "NanGuardMode.__init__.<locals>.nan_check": "callback",
    "NanGuardMode.__init__.<locals>.nan_check_input": "callback_input",
}


def new(cls: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """How to make an object with these attributes, for pickle."""
    return copyreg.__newobj__, (cls,), state or None  # type: ignore[attr-defined]


def once(trace: Any, frames: dict[Any, Any]) -> Any:
    """The same trace, of frames that are the same objects wherever they come again."""
    if isinstance(trace, list):
        return [once(part, frames) for part in trace]
    return frames.setdefault(trace, trace)


def errors_of(guard: Any) -> tuple[bool, ...]:
    """What a function of NanGuardMode takes for an error: NaN, infinity, large values."""
    check = inspect.getclosurevars(guard).nonlocals["do_check_on"]
    found = inspect.getclosurevars(check).nonlocals
    return tuple(bool(found[f"{kind}_is_error"]) for kind in ("nan", "inf", "big"))
