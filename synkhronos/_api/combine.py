"""Combine the ranks' values of each output, and analyse functions with collectives in their graphs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._backends import as_asked, is_random_state
from synkhronos._collectives import OPS, combine, nccl_reduces
from synkhronos._graph.ops import Cut, cut, depends_on, has_collectives_in_loop

if TYPE_CHECKING:
    from synkhronos._rank import Call


class GraphCollectives:
    """Analysis of the collectives in a function's graph, and of the values that they make equal on all ranks.

    Parameters
    ----------
    graph : Graph
    has_any : bool
        Whether the compiled function has any.
    results : Results

    Attributes
    ----------
    any : bool
        Whether the function has collectives, or rank constants (`RankConstant`) from gradients of collectives.

    Raises
    ------
    ValueError
        For an output that is equal on all ranks and has the op ``"sum"`` or ``"prod"``, which would count it once for
        each rank.
    """

    def __init__(self, graph: _graph.Graph, has_any: bool, results: Results) -> None:
        self.any = has_any
        self._graph, self._names = graph, results.names
        self._known: dict[int, bool] = {}
        self._outputs, self._updates = graph.expressions if self.any else ([], [])
        self._in_a_loop = has_collectives_in_loop([*self._outputs, *(new for _, new in self._updates)])
        self._varying = [*graph.varying, *(var for var, _ in self._updates if is_random_state(var))]
        for i, mode in enumerate(results.modes):
            if mode in ("sum", "prod") and self.is_replicated(i):
                raise ValueError(
                    f"{results.names[i]} is equal on all ranks, because it is computed from results of collectives; "
                    f'the op "{mode}" would count it once for each rank. Use the op None or "avg"'
                )

    def is_replicated(self, i: int) -> bool:
        """Return whether an output is equal on all ranks, because it depends on data only through collectives."""
        return self.any and not self._depends(i)

    def _depends(self, i: int) -> bool:
        """Return whether an output or new value depends on values that differ between ranks; cached by position."""
        if i not in self._known:
            expressions = [*self._outputs, *(new for _, new in self._updates)]
            self._known[i] = depends_on(expressions[i], self._varying)
        return self._known[i]

    def kept(self, counts: Sequence[int]) -> list[Any]:
        """Return the variables that a rank without data points must not update, because they depend on its own data.

        Raises
        ------
        ValueError
            If a rank has no data points, and the variables cannot be determined, because a collective is in a loop.
        """
        if not self.any or all(counts) or not any(counts):
            return []
        if self._in_a_loop:
            raise ValueError(
                f"got {sum(counts)} data points for {len(counts)} ranks; a function with collectives in a loop, or in "
                "an OpFromGraph, needs at least one on each rank"
            )
        n = len(self._outputs)
        return [var for i, (var, _) in enumerate(self._updates, n) if not is_random_state(var) and self._depends(i)]

    @functools.cached_property
    def parts(self) -> tuple[Cut, _graph.Graph, _graph.Graph] | None:
        """Cut the graph for a call in slices: into the graph before the collectives, and the graph from them on.

        Return ``None`` if there are no collectives, but only rank constants from gradients.

        Raises
        ------
        ValueError
            If the graph cannot be cut.
        """
        n, updates = len(self._outputs), self._updates
        names = [*self._names, *(f"the update of {var}" for var, _ in updates)]
        found = cut([*self._outputs, *(new for _, new in updates)], names, self._varying, self._graph.common)
        if found is None:
            return None
        outputs = [self._outputs[i] for i in found.before if i < n]
        before = self._graph.part([*outputs, *found.entering], [updates[i - n] for i in found.before if i >= n])
        outputs = [new for i, new in found.after.items() if i < n]
        updated = [(updates[i - n][0], new) for i, new in found.after.items() if i >= n]
        return found, before, self._graph.part(outputs, updated, found.inputs)


class ExactGraphCollectives(GraphCollectives):
    """`GraphCollectives` of exact functions."""

    def kept(self, counts: Sequence[int]) -> list[Any]:
        """Return no variables: every rank computes on data points, so every rank updates all variables."""
        return []


class Results:
    """Combination of the ranks' values of a function's outputs.

    Parameters
    ----------
    outputs : list of the backend's variables or ``Out``
    modes : list of str or None
        The op of each output.
    on_host : list of bool
        For each output, whether its values must be combined on the CPU.
    on_gpu : bool
        Whether the ranks compute on GPUs.
    name : str
        The function's name in messages.

    Attributes
    ----------
    modes : list of str or None
    names : list of str
        The names of the outputs in messages.
    """

    def __init__(
        self, outputs: Sequence[Any], modes: list[Any], on_host: Sequence[bool], on_gpu: bool, name: str
    ) -> None:
        self._outputs = outputs
        self._on_gpu = on_gpu
        self.modes = modes
        self.names = [f"output {i} of {name}" for i in range(len(outputs))]
        self._reducible = [
            i
            for i, (output, mode) in enumerate(zip(outputs, modes))
            if on_gpu
            and mode in OPS
            and not on_host[i]
            and nccl_reduces(np.dtype(getattr(output, "variable", output).dtype), mode, True)
        ]

    def __str__(self) -> str:
        outputs = [getattr(output, "variable", output) for output in self._outputs]
        return ", ".join(f"{output} ({mode})" for output, mode in zip(outputs, self.modes)) or "nothing"

    def over_nccl(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Return which of the wanted outputs NCCL can reduce, as positions in ``wanted``."""
        return tuple(place for place, i in enumerate(wanted) if i in self._reducible)

    def check_not_borrowed(self) -> None:
        """Refuse borrowed outputs, which later parts of a sequence could overwrite."""
        for name, output in zip(self.names, self._outputs):
            if getattr(output, "borrow", False):
                raise TypeError(
                    f"{name} has borrow=True, so later calls of the sequence could overwrite it; leave borrow out"
                )

    def combine(
        self,
        results: Sequence[Any],
        call: Call,
        wanted: Sequence[int],
        weights: Sequence[float],
        *,
        collectives: GraphCollectives,
        private: Callable[[Sequence[Any]], list[Any]],
    ) -> list[Any]:
        """Combine the ranks' values of each wanted output; return NumPy arrays, or GPU arrays for outputs of GPU type.

        Parameters
        ----------
        results : list
            For each rank, its values of the wanted outputs; ``None`` for a rank without data points.
        call : Call
        wanted : sequence of int
            Positions of the wanted outputs among all outputs.
        weights : sequence of float
            The weight of each rank.
        collectives : GraphCollectives
            Determines which outputs are valid on a controller without data points, because they are equal on all ranks.
        private : callable
            Returns values, with copies of those that are in the shared heap, so that the program can keep them.
        """
        present, present_weights = results, weights
        if not all(weights):
            present = [values for values, weight in zip(results, weights) if weight]
            present_weights = [weight for weight in weights if weight]
        own, is_present = results[call.controller], weights[call.controller] > 0
        combined: list[Any] = []
        for place, i in enumerate(wanted):
            arrays = [values[place] for values in present]
            if self.modes[i] is None or (place in call.nccl and sum(array is not None for array in arrays) == 1):
                combined.append(own[place] if is_present or collectives.is_replicated(i) else None)
            else:
                combined.append(combine(arrays, self.modes[i], present_weights, self.names[i]))
        combined = private(combined)
        if self._on_gpu:
            return [as_asked(value, self._outputs[i]) for value, i in zip(combined, wanted)]
        return combined
