"""A Scan as it is read: its steps, and what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Loop"]


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
