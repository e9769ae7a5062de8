"""Averages that would mix rows: of a value with a row for each data point, over parts of the data; they are refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos import _graphs
from synkhronos._calls.results import Results
from synkhronos._calls.serial import Serial, rows_of
from synkhronos._data import Data
from synkhronos._interrupts import let_interrupts_pass
from synkhronos._partition import pieces
from synkhronos._rank import Call

__all__ = ["Averages"]


class _Suspect(NamedTuple):
    """A value that nobody asked to be averaged, and is."""

    i: int  # among the outputs of the serial function: the outputs, then the new values of updated variables
    length: int  # of axis 0, in all parts
    parts: list[int]  # the lengths of the parts of the data
    name: str
    remedy: str


class Averages:
    """Which values of a function are averaged, over ranks or over the pieces of a rank, though no op says so.

    Parameters
    ----------
    graph : Graph
    serial : Serial
    results : Results
    named : list of bool
        Of which outputs the user named the op.
    named_updates : list of shared variables
        Those whose updates have an op that the user named.
    """

    def __init__(
        self,
        graph: _graphs.Graph,
        serial: Serial,
        results: Results,
        named: Sequence[bool],
        named_updates: Sequence[Any],
    ) -> None:
        self._graph, self._serial, self._results = graph, serial, results
        self._named_updates = named_updates
        self._judged: set[tuple[Any, ...]] = set()
        self._has_data = bool(graph.n_scattered or graph.sliceable_shareds)
        modes = results.modes if self._has_data else []
        self._outputs = {i for i, mode in enumerate(modes) if mode == "avg" and not named[i] and self._may_have_rows(i)}
        self._own = {i for i, mode in enumerate(modes) if mode is None and self._may_have_rows(i)}

    def _may_have_rows(self, i: int) -> bool:
        variable = getattr(self._graph.outputs[i], "variable", self._graph.outputs[i])
        return _graphs.is_tensor_variable(variable) and variable.ndim > 0 and not variable.broadcastable[0]

    def judge(
        self, results: Sequence[Any], call: Call, inputs: Sequence[Any], wanted: Sequence[int], rows: Any = None
    ) -> None:
        """Refuse to average what has a row for each data point, if the user did not name the op.

        Suspicious is a value that is as long as each part of the data. Whether it follows the data, computations on one
        row more and on the same rows in reverse tell; if they cannot, there is a warning. What is no such value is not
        judged again.

        Parameters
        ----------
        results : list
            Of each rank, its values; ``None`` for a rank without data points.
        call : Call
        inputs : list of array or Data
            As the user gave them.
        wanted : list of int
            The outputs that the values are of.
        rows : list of selections, or None
            Those of the sliceable shared variables on each rank.

        Raises
        ------
        ValueError
            For a value with a row for each data point.
        """
        for suspect in self._suspects(results, call, wanted):
            growing = self._growing(suspect, call, rows)
            if not growing or (suspect.i, *growing) in self._judged:
                continue
            follows = self._follows_the_rows(suspect, growing, inputs, call, rows)
            if follows:
                raise ValueError(
                    f"{suspect.name} has a row for each data point (axis 0 has length {suspect.length}, and so have "
                    f"the parts of the data): an average would mix unrelated rows. {suspect.remedy}"
                )
            self._judged.add((suspect.i, *growing))
            if follows is None:
                warnings.warn(
                    f"{suspect.name} is averaged, and axis 0 is as long as the parts of the data ({suspect.length}): "
                    f"if it has a row for each data point, the result is wrong. {suspect.remedy}",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def _suspects(self, results: Sequence[Any], call: Call, wanted: Sequence[int]) -> Iterator[_Suspect]:
        """Values that are averaged over two and more parts, and as long in each."""
        if self._outputs:
            every = [len(part) for count in call.counts if count for part in pieces(count, call.num_slices)]
            remedy = 'No op was named. Name it: "gather" for all rows, or "avg" if their average is meant'
            for place, i in enumerate(wanted if len(every) > 1 else ()):
                arrays = [values[place] for values in results if values is not None and values[place] is not None]
                lengths = {array.shape[0] for array in arrays} if i in self._outputs else set()
                if len(lengths) == 1:
                    yield _Suspect(i, lengths.pop(), every, self._results.names[i], remedy)
        if call.num_slices == 1 or not self._has_data:
            return
        own = [len(part) for part in pieces(call.counts[call.master], call.num_slices)]
        if len(own) < 2:
            return
        remedy = 'With the op None, it is averaged over num_slices. Name the op "gather", or do not slice'
        for place, i in enumerate(wanted):
            if i in self._own:
                yield _Suspect(i, results[call.master][place].shape[0], own, self._results.names[i], remedy)
        remedy = 'No op was named. Do not slice, or name the op "avg" if the average over slices is meant'
        for position, var in enumerate(self._graph.accumulated if call.updated else ()):
            if _graphs.is_tensor_variable(var) and var.ndim and not any(var is one for one in self._named_updates):
                i = len(self._graph.outputs) + position
                yield _Suspect(i, _graphs.get_array(var).shape[0], own, f"the update of {var}", remedy)

    def _growing(self, suspect: _Suspect, call: Call, rows: Any) -> list[str]:
        """What has as many data points, in each part, as the suspect has rows: inputs, sliceable shared variables."""
        parts, shareds = set(suspect.parts), self._graph.sliceable_shareds
        lengths = {"inputs": suspect.parts[0] if len(parts) == 1 else None, "sliceable": None}
        if not self._graph.n_scattered or (shareds and call.num_slices > 1):
            lengths["sliceable"] = lengths["inputs"]
        elif shareds:
            lengths["sliceable"] = _graphs.get_array(shareds[0]).shape[0] if rows is None else len(rows[call.master])
        return [kind for kind, length in lengths.items() if suspect.length == length]

    def _follows_the_rows(
        self, suspect: _Suspect, growing: Sequence[str], inputs: Sequence[Any], call: Call, rows: Any
    ) -> bool | None:
        """Whether a value has a row for each data point of what is `growing`; ``None`` where that cannot be told."""
        n, length = self._graph.n_scattered, suspect.length
        arrays = [
            value.data if isinstance(value, Data) else self._graph.filter_input(position, value)
            for position, value in enumerate(inputs)
        ]
        sliceable = [_graphs.to_host(_graphs.get_array(var)) for var in self._graph.sliceable_shareds]
        if rows is not None:
            sliceable = [rows_of(value, rows[call.master]) for value in sliceable]

        def compute(picked: np.ndarray) -> np.ndarray:
            of_inputs = picked if "inputs" in growing else np.arange(suspect.parts[0])
            some = [array[of_inputs % len(array)] for array in arrays[:n]]
            others = [value[picked % len(value)] if "sliceable" in growing else value for value in sliceable]
            return self._serial.compute([*some, *arrays[n:]], others, [suspect.i])[0]

        in_order = np.arange(length)
        one_more: int | None = None
        try:
            one_more = len(compute(np.arange(length + 1)))
        except Exception as error:  # sizes may be fixed in the graph
            let_interrupts_pass(error)
        if one_more == length + 1:
            return True
        try:
            there, back = compute(in_order), compute(in_order[::-1])
            if np.allclose(back, there[::-1]) and not np.allclose(there, there[::-1]):
                return True
        except Exception as error:
            let_interrupts_pass(error)
        return None if one_more is None else False
