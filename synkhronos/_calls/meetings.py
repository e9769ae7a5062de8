"""What follows for a call if its function has collectives in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from synkhronos import _graph
from synkhronos._backends import is_random_state
from synkhronos._graph.ops import Cut, cut, depends_on, meets, meets_in_a_loop

if TYPE_CHECKING:
    from synkhronos._calls.results import Results

__all__ = ["Meetings"]


class Meetings:
    """The collectives in a function, and what comes of them: values that are the same on all ranks.

    Parameters
    ----------
    graph : Graph
    compiled : theano function
        The plain one.
    results : Results

    Attributes
    ----------
    any : bool
        Whether there are collectives, or what a gradient of theirs has of the rank.

    Raises
    ------
    ValueError
        For an output that is the same on all ranks, and that an op would count as often as there are ranks.
    """

    def __init__(self, graph: _graph.Graph, compiled: Any, results: Results) -> None:
        self.any = meets(compiled)
        self._graph, self._names = graph, results.names
        self._known: dict[tuple[int, tuple[Any, ...]], bool] = {}
        self._parts: tuple[Cut, _graph.Graph, _graph.Graph] | None = None
        self._is_cut = False
        self._outputs, self._updates = graph.expressions if self.any else ([], [])
        self._in_a_loop = meets_in_a_loop([*self._outputs, *(new for _, new in self._updates)])
        self._apart = [*graph.apart, *(var for var, _ in self._updates if is_random_state(var))]
        for i, mode in enumerate(results.modes):
            if mode in ("sum", "prod") and self.is_replicated(i):
                raise ValueError(
                    f'{results.names[i]} is the same on all ranks, since it comes of collectives: the op "{mode}" '
                    'would count it once for each rank. Use the op None, or "avg"'
                )

    def is_replicated(self, i: int, scattered: Sequence[Any] = ()) -> bool:
        """Whether an output comes of data, and of scattered variables, by collectives alone: the same on all ranks."""
        return self.any and not self._depends(i, tuple(scattered))

    def _depends(self, i: int, also: tuple[Any, ...] = ()) -> bool:
        """Whether an output, or a new value, depends on what is not the same on all ranks; found out once."""
        if (i, also) not in self._known:
            expressions = [*self._outputs, *(new for _, new in self._updates)]
            self._known[i, also] = depends_on(expressions[i], [*self._apart, *also])
        return self._known[i, also]

    def kept(self, counts: Sequence[int]) -> list[Any]:
        """The variables that a rank without data points must not update: those that come of the data otherwise.

        Raises
        ------
        ValueError
            If there is such a rank, and what comes of collectives cannot be told.
        """
        if not self.any or all(counts) or not any(counts):
            return []
        if self._in_a_loop:
            raise ValueError(
                f"{sum(counts)} data points on {len(counts)} ranks: a function with collectives in a loop, or in an "
                "OpFromGraph, needs one on each rank"
            )
        return [var for var, _ in self._updates if not is_random_state(var) and self.is_averaged(var)]

    def is_averaged(self, var: Any) -> bool:
        """Whether slices average the new values of a variable, if they average any."""
        n = len(self._outputs)
        return not self.any or any(self._depends(n + i) for i, (one, _) in enumerate(self._updates) if one is var)

    def cut(self) -> tuple[Cut, _graph.Graph, _graph.Graph] | None:
        """How a call in slices is computed: what before the collectives, and what with them, as graphs.

        ``None`` if there are none, but numbers that a rank knows of itself in a gradient.

        Raises
        ------
        ValueError
            If that cannot be.
        """
        if not self._is_cut:
            n, updates = len(self._outputs), self._updates
            names = [*self._names, *(f"the update of {var}" for var, _ in updates)]
            found = cut([*self._outputs, *(new for _, new in updates)], names, self._apart, self._graph.common)
            self._is_cut = True
            if found is None:
                return None
            before = [self._outputs[i] for i in found.before if i < n]
            outputs = [after for i, after in found.after.items() if i < n]
            self._parts = (
                found,
                self._graph.part([*before, *found.entering], [updates[i - n] for i in found.before if i >= n]),
                self._graph.part(
                    outputs, [(updates[i - n][0], after) for i, after in found.after.items() if i >= n], found.inputs
                ),
            )
        return self._parts
