"""What follows for a call if its function has collectives in it.

Making one value of the ranks' values, for each output of a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._backends import as_asked, is_random_state
from synkhronos._collectives import OPS, combine, nccl_reduces
from synkhronos._graph.ops import Cut, cut, depends_on, meets, meets_in_a_loop

if TYPE_CHECKING:
    from synkhronos._rank import Call

__all__ = ["Meetings", "Results"]


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


class Results:
    """How the values of a function's outputs become one.

    Parameters
    ----------
    outputs : list of Theano variables or theano.Out
    modes : list of str or None
        The op of each output.
    on_host : list of bool
        The outputs that are to take the CPU path.
    on_gpu : bool
        Whether the ranks compute on GPUs.
    name : str
        Of the function, for messages.

    Attributes
    ----------
    modes : list of str or None
    names : list of str
        What the outputs are called in messages.
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
        """Which of the wanted outputs NCCL can reduce, by their places among these."""
        return tuple(place for place, i in enumerate(wanted) if i in self._reducible)

    def check_not_borrowed(self) -> None:
        """Refuse outputs that what comes after them in a sequence could overwrite."""
        for name, output in zip(self.names, self._outputs):
            if getattr(output, "borrow", False):
                raise TypeError(f"{name} is borrowed (theano.Out), and in a sequence later parts could overwrite it")

    def combine(
        self,
        results: Sequence[Any],
        call: Call,
        wanted: Sequence[int],
        weights: Sequence[float],
        *,
        meetings: Meetings,
        private: Callable[[Any], Any],
    ) -> list[Any]:
        """The value of each output that is wanted, as its Theano type says: a NumPy array, or one on the GPU.

        Parameters
        ----------
        results : list
            For each rank, its values of the wanted outputs; ``None`` for a rank that had no data points.
        call : Call
        wanted : sequence of int
            Positions among all outputs.
        weights : sequence of float
            One for each rank.
        meetings : Meetings
            Tells what a master without data points has all the same.
        private : callable
            Gives what the master has computed as the program gets it.
        """
        present, present_weights = results, weights
        if not all(weights):
            present = [values for values, weight in zip(results, weights) if weight]
            present_weights = [weight for weight in weights if weight]
        own, is_present = results[call.master], weights[call.master] > 0
        combined = []
        for place, i in enumerate(wanted):
            arrays = [values[place] for values in present]
            if self.modes[i] is None or (place in call.nccl and sum(array is not None for array in arrays) == 1):
                value = private(own[place]) if is_present or meetings.is_replicated(i) else None
            else:
                value = combine(arrays, self.modes[i], present_weights, self.names[i])
            combined.append(as_asked(value, self._outputs[i]) if self._on_gpu else value)
        return combined
