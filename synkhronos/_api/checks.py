"""Checks of a function's results: averages that mix rows, ops that do not fit, and work that nothing divides.

`Averages` refuses to average values that have a row for each data point. `Growth` finds these values: their shapes
change with the number of rows, or, where the graph fixes sizes, their rows follow the order of the data.

`Serial` computes the function in one process for ``check_against_theano``, which compares it with the ranks' results.

`Doubt` warns when every rank computes everything. A tutorial's
``theano.function([index], cost, givens={x: data[index * n : (index + 1) * n]})``, with ``index`` among the
`bcast_inputs`, is right on all ranks, but no faster than on one. The same call is correct usage where ``data`` was
scattered before, so the graph alone cannot distinguish the two; equal results on all ranks do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, TypeVar

import numpy as np

from synkhronos import _graph
from synkhronos._api.combine import GraphCollectives, Results
from synkhronos._api.rows import Selector
from synkhronos._backends import TITLE, to_host
from synkhronos._collectives import OPS
from synkhronos._graph import Graph
from synkhronos._rank import Call, Get
from synkhronos._session import Session, distances, warn
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.rows import Selection, pieces

__all__ = ["Averages", "Doubt", "Growth", "Sample", "Serial", "environment_asks", "is_asked", "rows_of"]


_T = TypeVar("_T")

_MOST_BYTES = 64 * 1024 * 1024  # of the rows from which shapes are computed
_LEAST_ROWS = 16


class Sample:
    """The data of one part of a call.

    Parameters
    ----------
    inputs : list of array
        The rows of the part for scattered inputs, the others in full.
    n_scattered : int
        The number of scattered inputs.
    variables : list of array
        The rows of the shared variables that hold data.
    """

    def __init__(self, inputs: Sequence[Any], n_scattered: int, variables: Sequence[Any]) -> None:
        self._rows = [*inputs[:n_scattered], *variables]
        self._n_scattered = n_scattered
        self._whole = inputs[n_scattered:]

    def compute(self, function: Callable[[list[Any], list[Any]], _T], change: Callable[[np.ndarray], Any]) -> _T:
        """Return the result of a function of inputs and of values of variables, for changed rows."""
        changed = [change(array) for array in self._rows]
        n = self._n_scattered
        return function([*changed[:n], *self._whole], changed[n:])

    def lengths(self) -> set[int]:
        """Return the numbers of rows."""
        return {len(array) for array in self._rows}


class Growth:
    """Detects values that have rows for the data points; the result for each value is cached.

    Parameters
    ----------
    serial : Serial
    others : list of shared variables
        Variables that hold data, in addition to the sliceable ones.
    """

    def __init__(self, serial: Serial, others: Sequence[Any]) -> None:
        self._serial = serial
        self._others = others
        self._grows: dict[int, bool] = {}
        self._follows: dict[tuple[int, tuple[int, ...]], bool | None] = {}

    def unknown(self, values: Sequence[int]) -> list[int]:
        """Return the values that were not examined yet."""
        return [i for i in values if i not in self._grows]

    def learn(self, values: Sequence[int], sample: Sample) -> None:
        """Detect the values whose shapes change with the number of rows."""

        def shapes(inputs: list[Any], variables: list[Any]) -> list[tuple[int, ...]]:
            return self._serial.shapes(inputs, variables, values, self._others)

        if 0 in sample.lengths():
            return  # shapes of no rows prove nothing
        try:
            some = sample.compute(shapes, lambda array: _some(array, 1))
            more = sample.compute(shapes, lambda array: _some(array, 3))
            grows = [one != other for one, other in zip(some, more)]
        except MemoryError:
            return
        except Exception as error:  # the graph may fix sizes
            let_interrupts_pass(error)
            grows = [False] * len(values)
        self._grows.update(zip(values, grows))

    def grows(self, i: int) -> bool:
        """Return whether the shape of a value changes with the number of data points."""
        return self._grows.get(i, False)

    def follows(self, i: int, shape: tuple[int, ...], sample: Callable[[], Sample]) -> bool | None:
        """Return whether a value of constant shape has rows for the data points.

        The graph may fix the number of rows. Then the value for the rows in reverse order decides; ``None`` if it
        cannot.
        """
        if (i, shape) not in self._follows:
            self._follows[i, shape] = self._compare(i, shape, sample())
        return self._follows[i, shape]

    def _compare(self, i: int, shape: tuple[int, ...], sample: Sample) -> bool | None:
        axes = [axis for axis, length in enumerate(shape) if length > 1 and length in sample.lengths()]
        if not axes:
            return False

        def compute(inputs: list[Any], variables: list[Any]) -> np.ndarray:
            return self._serial.compute(inputs, variables, [i], self._others)[0]

        def value(change: Callable[[np.ndarray], Any]) -> np.ndarray:
            return sample.compute(compute, change)

        try:
            value(lambda array: _repeated(array, len(array) + 1))
        except Exception as error:
            let_interrupts_pass(error)
        else:
            return False
        try:
            there, back = value(lambda array: array), value(lambda array: array[::-1])
        except Exception as error:
            let_interrupts_pass(error)
            return None
        reverse = [np.flip(there, axis) for axis in axes]
        return any(np.allclose(back, one) and not np.allclose(there, one) for one in reverse) or None


def _repeated(array: Any, n: int) -> Any:
    """Return ``n`` rows: those of the array, and then its first ones again."""
    return array[np.arange(n) % max(1, len(array))]


def _some(array: Any, times: int) -> Any:
    """Return rows of an array, repeated: a few at least, and no more than fit into memory."""
    row = max(1, array.nbytes // max(1, len(array)))
    n = max(_LEAST_ROWS, min(len(array), _MOST_BYTES // row))
    return _repeated(array, times * n)


_ENVIRONMENT = "SYNKHRONOS_CHECK"


def environment_asks() -> bool:
    """Return whether the environment requests a comparison with Theano; read when a function is built."""
    return os.environ.get(_ENVIRONMENT, "0") not in ("", "0")


def is_asked(argument: Any, default: bool, place: int) -> bool:
    """Return whether to compare a call with Theano: as its argument says, otherwise by default where possible.

    It is not possible after the first part of a sequence (``place`` > 1), since earlier parts may change variables.
    """
    if argument is None:
        return default and place < 2
    if not isinstance(argument, bool):
        raise TypeError(f"check_against_theano must be True, False or None; got {argument!r}")
    if argument and place > 1:
        raise ValueError("check_against_theano=True in a sequence is for the first in the block, or stand outside")
    return argument


class Serial:
    """Serial computation of a function, in the controller and without storing updates; compiled when first needed.

    Parameters
    ----------
    graph : Graph
    results : Results
    """

    def __init__(self, graph: _graph.Graph, results: Results) -> None:
        self._graph = graph
        self._results = results
        self._functions: dict[Any, Any] = {}

    def compute(
        self, inputs: Sequence[Any], variables: Sequence[Any], wanted: Sequence[int], others: Sequence[Any] = ()
    ) -> list[np.ndarray]:
        """Return some outputs and new values of updated variables, which are numbered after the outputs.

        Parameters
        ----------
        inputs, variables : list of array
            Values of all inputs, and of the sliceable shared variables followed by the others.
        wanted : list of int
        others : list of shared variables
            Variables that are given values, in addition to the sliceable ones.
        """
        values = self._function(wanted, others, False)(*inputs, *variables)
        return [np.asarray(to_host(value)) for value in values]

    def shapes(
        self, inputs: Sequence[Any], variables: Sequence[Any], wanted: Sequence[int], others: Sequence[Any]
    ) -> list[tuple[int, ...]]:
        """Return the shapes of the results of `compute`, computing no more than they need."""
        return [tuple(shape.tolist()) for shape in self._function(wanted, others, True)(*inputs, *variables)]

    def _function(self, wanted: Sequence[int], others: Sequence[Any], shapes: bool) -> Any:
        key = (tuple(wanted), tuple(others), shapes)
        if key not in self._functions:
            self._functions[key] = self._graph.compile_serial(wanted, others, shapes)
        return self._functions[key]

    def expected(
        self, session: Session, inputs: Sequence[Any], rows: list[Selection] | None, wanted: Sequence[int]
    ) -> list[np.ndarray]:
        """Return the serial outputs for the rows of all ranks; call it before the call and its updates.

        Parameters
        ----------
        session : Session
        inputs : list of array
            All chosen rows.
        rows : list of selections, or None
            The rows of the sliceable shared variables on each rank.
        wanted : list of int
            The outputs.

        Raises
        ------
        ValueError
            If the function draws random numbers, or Theano cannot compute these rows in one piece.
        """
        if self._graph.is_random:
            raise ValueError("check_against_theano: the function draws random numbers, which differ between ranks")
        variables = self._graph.sliceable_shareds
        sliceable = []
        if variables:
            on_ranks = session.run(Get(session.keys(variables)))
            for values in zip(*on_ranks):
                picked = values if rows is None else [rows_of(value, some) for value, some in zip(values, rows)]
                sliceable.append(np.concatenate(picked))
        try:
            return self.compute(inputs, sliceable, wanted)
        except Exception as error:
            let_interrupts_pass(error)
            raise ValueError(f"check_against_theano: {TITLE} fails on all rows in one piece: {error}") from error

    def compare(self, outputs: Sequence[Any], expected: Sequence[np.ndarray], wanted: Sequence[int]) -> None:
        """Raise `ValueError` for the output that differs most from the serial one, if any does.

        Outputs with the op ``None``, and gathered scalars, are left out, because no serial call returns them.
        """
        worst = None
        for i, output, right in zip(wanted, outputs, expected):
            op = self._results.modes[i]
            if op is None or (op == "gather" and right.ndim == 0):
                continue
            got = np.asarray(to_host(output))
            if got.shape != right.shape:
                raise ValueError(
                    f"{self._results.names[i]}, op {op!r}: shape {got.shape}, but {TITLE} gives {right.shape} for the "
                    "same rows in one piece"
                )
            difference, tolerance = _largest_difference(got, right)
            if difference > tolerance and (worst is None or difference / tolerance > worst[0]):
                worst = difference / tolerance, i, op, difference, got, right
        if worst is not None:
            _, i, op, difference, got, right = worst
            place = np.unravel_index(np.argmax(distances(got, right)), got.shape)
            raise ValueError(
                f"{self._results.names[i]}, op {op!r}, differs from what {TITLE} gives for the same rows in one piece "
                f"by up to {difference:.6g}: {got[place]:.9g}, expected {right[place]:.9g}. The op must make the value "
                "of the whole of the values of its parts (or the replicas differ: synkhronos.check_replicas)"
            )


def rows_of(value: Any, rows: Selection) -> Any:
    """Return the chosen rows of an array."""
    return value[slice(*rows.bounds)] if isinstance(rows, tuple) else value[rows]


def _largest_difference(got: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Return the largest difference and its tolerance: half the digits of the dtype, relative to the largest value."""
    differences = distances(got, right)
    if not differences.size:
        return 0.0, 1.0
    floats = [one.dtype for one in (got, right) if one.dtype.kind in "fc"]
    eps = max([float(np.finfo(dtype).eps) for dtype in floats], default=float(np.finfo(np.float64).eps))
    finite = np.abs(right[np.isfinite(right)].astype(np.complex128))
    return float(differences.max()), eps**0.5 * float(finite.max(initial=0)) + eps


class Doubt:
    """Warns if a function gives every rank all of the work, which the values of its first call show.

    Not in doubt are functions with scattered inputs or sliceable shared variables, without inputs or reduced outputs,
    and those whose inputs do not pick rows, such as a learning rate.

    Parameters
    ----------
    graph : Graph
    modes : list of str or None
        The ops of its outputs.
    """

    def __init__(self, graph: Graph, modes: Sequence[str | None]) -> None:
        self._open = bool(
            graph.input_variables
            and not graph.n_scattered
            and not graph.sliceable_shareds
            and any(mode in OPS for mode in modes)
            and graph.picks_rows_of_shared()
        )

    def settle(self, name: str | None, results: Sequence[Any]) -> None:
        """Warn, once, if all ranks have the same values.

        Parameters
        ----------
        name : str, optional
            The function's name.
        results : list
            For each rank, its outputs.
        """
        if not self._open or len(results) < 2:
            return
        self._open = False
        first, *others = results
        pairs = [pair for values in others for pair in zip(first, values)]
        known = [pair for pair in pairs if not any(value is None for value in pair)]  # None: only the controller has it
        if known and all(_same(*pair) for pair in known):
            warn(
                f"{name or 'a function'}: no input is scattered, and all {len(results)} ranks came to the same values: "
                "every rank computes the whole. Pass the data as inputs, and pick rows by batch; or scatter the shared "
                "variables, name them in sliceable_shareds, and pick rows by batch_s"
            )


def _same(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.shape == other.shape and one.tobytes() == other.tobytes()


class _Suspect(NamedTuple):
    """A value that is averaged without an op that the user named."""

    i: int  # position in the serial function: the outputs, then the new values of updated variables
    shape: tuple[int, ...]  # the same in all parts
    name: str
    remedy: str


class Averages:
    """Finds values that are averaged over ranks or slices without a named op, and refuses those that have rows.

    Parameters
    ----------
    graph : Graph
    serial : Serial
    results : Results
    meetings : Meetings
    named : list of bool
        For each output, whether the user named the op.
    named_updates : list of shared variables
        The variables whose updates have an op that the user named.
    """

    def __init__(
        self,
        graph: _graph.Graph,
        serial: Serial,
        results: Results,
        meetings: GraphCollectives,
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
        """Record variables that were scattered, and that the function reads in full on each rank.

        Warn where the ranks have different numbers of rows, and count the same in averages. Where an input picks the
        rows, the user is responsible for even shards.
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
        """Refuse to average values that have rows for the data points, if the user did not name the op.

        A value has rows if its shape changes with their number. Where the graph fixes sizes, the values for the same
        rows in reverse order decide; if they cannot, warn. What one call has shown is not examined again.

        Parameters
        ----------
        results : list
            For each rank, its values; ``None`` for a rank without data points.
        call : Call
        wanted : list of int
            The outputs of which the values are.
        select : callable
            Returns the inputs with the chosen rows.
        rows : list of selections, or None
            The rows of the sliceable shared variables on each rank.

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
        """Return the number of data points in a part of the data; of the controller, if it has any."""
        count = call.counts[call.master] or max(call.counts)
        return len(next(iter(pieces(count, call.num_slices))))

    def _suspects(self, results: Sequence[Any], call: Call, wanted: Sequence[int]) -> Iterator[_Suspect]:
        """Yield values that are averaged over two or more parts, and have the same shape in all."""
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
