"""Making one value of the ranks' values, for each output of a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from synkhronos._backends import as_asked
from synkhronos._collectives import OPS, combine, nccl_reduces

if TYPE_CHECKING:
    from synkhronos._calls.meetings import Meetings
    from synkhronos._rank import Call

__all__ = ["Results"]


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
