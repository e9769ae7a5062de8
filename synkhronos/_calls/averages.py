"""Averages that would mix rows: of a value with rows for its data points, over parts of the data; they are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

from synkhronos import _graph
from synkhronos._backends import to_host
from synkhronos._calls.growth import Growth, Sample
from synkhronos._calls.meetings import Meetings
from synkhronos._calls.results import Results
from synkhronos._calls.selecting import Selector
from synkhronos._calls.serial import Serial, rows_of
from synkhronos._rank import Call
from synkhronos._session import Session, warn
from synkhronos._utils.rows import pieces

__all__ = ["Averages"]


class _Suspect(NamedTuple):
    """A value that nobody asked to be averaged, and is."""

    i: int  # among the outputs of the serial function: the outputs, then the new values of updated variables
    shape: tuple[int, ...]  # in all parts
    name: str
    remedy: str


class Averages:
    """Which values of a function are averaged, over ranks or over the pieces of a rank, though no op says so.

    Parameters
    ----------
    graph : Graph
    serial : Serial
    results : Results
    meetings : Meetings
    named : list of bool
        Of which outputs the user named the op.
    named_updates : list of shared variables
        Those whose updates have an op that the user named.
    """

    def __init__(
        self,
        graph: _graph.Graph,
        serial: Serial,
        results: Results,
        meetings: Meetings,
        named: Sequence[bool],
        *,
        named_updates: Sequence[Any],
    ) -> None:
        self._graph, self._serial, self._results = graph, serial, results
        self._meetings = meetings
        self._named_updates = named_updates
        self._undeclared: list[Any] = []
        self._growth = Growth(serial, [])
        self._warned: set[int] = set()
        self._warned_of: set[Any] = set()  # shared variables
        averaged = [i for i, mode in enumerate(results.modes) if mode == "avg" and not named[i]]
        self._averaged = [results.names[i] for i in averaged]
        self._outputs = {i for i in averaged if self._may_have_rows(i)}
        self._own = {i for i, mode in enumerate(results.modes) if mode is None and self._may_have_rows(i)}

    def _may_have_rows(self, i: int) -> bool:
        variable = getattr(self._graph.outputs[i], "variable", self._graph.outputs[i])
        return _graph.is_tensor_variable(variable) and not all(variable.broadcastable)

    def see_parts(self, session: Session, scattered: Sequence[Any]) -> None:
        """Take notice of variables that were scattered, and that the function reads as a whole on each rank.

        There is a warning where the ranks have different numbers of rows, and count as equal in averages. Where an
        input picks the rows, the ranks' parts are as even as the user makes them.
        """
        declared = {id(var) for var in self._graph.sliceable_shareds}
        undeclared = [var for var in scattered if id(var) not in declared]
        if not (undeclared or self._undeclared) or self._graph.picks_rows_of_shared():
            return
        if list(map(id, undeclared)) != list(map(id, self._undeclared)):
            self._undeclared = undeclared
            self._growth = Growth(self._serial, undeclared)
        if not undeclared or not self._averaged or self._graph.n_scattered or declared:
            return
        for var, shapes in zip(undeclared, zip(*session.shapes(undeclared))):
            if len({shape[0] for shape in shapes}) > 1 and var not in self._warned_of:
                self._warned_of.add(var)
                warn(
                    f"{self._averaged[0]} is averaged, and all ranks count as equal, but they have "
                    f"{', '.join(str(shape[0]) for shape in shapes)} rows of {var}, which was scattered: name {var} in "
                    'sliceable_shareds, so that ranks count by their rows, or name the op "avg" if this is meant'
                )

    def judge(
        self,
        results: Sequence[Any],
        call: Call,
        wanted: Sequence[int],
        select: Callable[[], Selector],
        rows: Any = None,
    ) -> None:
        """Refuse to average what has rows for the data points, if the user did not name the op.

        Whether a value has, its shape tells: it is another one where there are more rows. Where a graph fixes sizes,
        the values for the same rows in reverse tell; if they cannot, there is a warning. What one call has shown is
        not looked into again.

        Parameters
        ----------
        results : list
            Of each rank, its values; ``None`` for a rank without data points.
        call : Call
        wanted : list of int
            The outputs that the values are of.
        select : callable
            Gives the inputs with the rows that are chosen.
        rows : list of selections, or None
            Those of the sliceable shared variables on each rank.

        Raises
        ------
        ValueError
            For a value with rows for the data points.
        """
        if not (self._outputs or self._own or call.updated):
            return
        suspects = list(self._suspects(results, call, wanted))
        if not suspects:
            return

        def sample() -> Sample:
            n, n_rows = self._graph.n_scattered, self._part(call)
            variables = [to_host(_graph.get_array(var)) for var in self._graph.sliceable_shareds]
            if rows is not None:
                variables = [rows_of(value, rows[call.master]) for value in variables]
            if call.num_slices > 1:
                variables = [value[:n_rows] for value in variables]
            variables += [to_host(_graph.get_array(var)) for var in self._undeclared]
            inputs = select().chosen()
            return Sample([*(value[:n_rows] for value in inputs[:n]), *inputs[n:]], n, variables)

        unknown = self._growth.unknown([suspect.i for suspect in suspects])
        if unknown:
            self._growth.learn(unknown, sample())
        for suspect in suspects:
            self._judge(suspect, sample)

    def _judge(self, suspect: _Suspect, sample: Callable[[], Sample]) -> None:
        has_rows = self._growth.grows(suspect.i) or self._growth.follows(suspect.i, suspect.shape, sample)
        if has_rows:
            raise ValueError(
                f"{suspect.name} has a row for each data point, or several, or some (its shape, {suspect.shape} in "
                f"each part of the data, goes with their number): an average would mix unrelated rows. {suspect.remedy}"
            )
        if has_rows is None and suspect.i not in self._warned:
            self._warned.add(suspect.i)
            warn(
                f"{suspect.name} is averaged, and its shape {suspect.shape} has the length of the parts of the data: "
                f"if it has a row for each data point, the result is wrong. {suspect.remedy}"
            )

    def _part(self, call: Call) -> int:
        """The number of data points in a part of the data, of the master where it has any."""
        count = call.counts[call.master] or max(call.counts)
        return len(next(iter(pieces(count, call.num_slices))))

    def _suspects(self, results: Sequence[Any], call: Call, wanted: Sequence[int]) -> Iterator[_Suspect]:
        """Values that are averaged over two and more parts, and of one shape in all."""
        if not (self._graph.n_scattered or self._graph.sliceable_shareds or self._undeclared):
            return
        n_parts = sum(min(count, call.num_slices) for count in call.counts)
        remedy = 'No op was named. Name it: "gather" for all rows, or "avg" if their average is meant'
        for place, i in enumerate(wanted if n_parts > 1 else ()):
            if i in self._outputs and not self._meetings.is_replicated(i, self._undeclared):
                arrays = [values[place] for values in results if values is not None and values[place] is not None]
                shapes = {array.shape for array in arrays}
                if len(shapes) == 1:
                    yield _Suspect(i, shapes.pop(), self._results.names[i], remedy)
        if min(call.counts[call.master], call.num_slices) < 2:
            return
        remedy = 'With the op None, it is averaged over num_slices. Name the op "gather", or do not slice'
        for place, i in enumerate(wanted):
            if i in self._own and not self._meetings.is_replicated(i, self._undeclared):
                yield _Suspect(i, results[call.master][place].shape, self._results.names[i], remedy)
        remedy = 'No op was named. Do not slice, or name the op "avg" if the average over slices is meant'
        for position, var in enumerate(self._graph.accumulated if call.updated else ()):
            named = any(var is one for one in self._named_updates)
            if _graph.is_tensor_variable(var) and var.ndim and not named and self._meetings.is_averaged(var):
                i = len(self._graph.outputs) + position
                yield _Suspect(i, _graph.get_array(var).shape, f"the update of {var}", remedy)
