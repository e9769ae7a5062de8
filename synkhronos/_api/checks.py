"""Check a function and its calls: arguments, averages that would mix rows, and a comparison with one process.

`Checks` refuses to average a value if the user did not name the op and the value is sharded by the rows of the data.
The sharding rules of exact functions decide that. Values for which there is no sharding rule are averaged.

`Serial` computes the function in one process, so that ``check_against_theano`` can compare the ranks' results with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos import _graph
from synkhronos._api.combine import Results
from synkhronos._backends import TITLE, known_lengths, to_host
from synkhronos._collectives import OPS
from synkhronos._graph import Graph
from synkhronos._rank import Call, Get
from synkhronos._session import Session, distances, warn
from synkhronos._sharding import row_axes
from synkhronos._utils.display import unknown_keyword
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.rows import Selection

# -- arguments of calls

#: The arguments of a call other than the inputs.
CALL_OPTIONS = ("output_subset", "batch", "batch_s", "num_slices")


def arrange(
    graph: Any, args: Sequence[Any], kwargs: dict[str, Any], options: Sequence[str] = CALL_OPTIONS
) -> list[Any]:
    """Return the value for each input, in the order of the inputs; raise `TypeError` for missing or surplus values.

    ``graph`` has the attributes ``input_names`` and ``input_defaults``. ``options`` are the names of the call's other
    arguments: an error for an unknown keyword suggests similar ones.
    """
    names, defaults = graph.input_names, graph.input_defaults
    if len(args) == len(names) and not kwargs and all(value is not None for value in args):
        return list(args)
    if len(args) > len(names):
        raise TypeError(f"got {len(args)} inputs; the function takes {len(names)}: {names}")
    values = list(args) + [None] * (len(names) - len(args))
    for name, value in kwargs.items():
        if name not in names:
            raise unknown_keyword("the function", name, [one for one in (*names, *options) if one])
        position = names.index(name)
        if values[position] is not None:
            raise TypeError(f"input {name!r} was given twice, in order and by name")
        values[position] = value
    for i, value in enumerate(values):
        if value is None:
            values[i] = defaults[i]
    missing = [names[i] or f"number {i}" for i, value in enumerate(values) if value is None]
    if missing:
        raise TypeError(f"got no value for input {', '.join(missing)}; the function takes {len(names)}: {names}")
    return values


def check_subset(subset: Any, n_outputs: int) -> tuple[int, ...] | None:
    """Check ``output_subset``, and return it as a tuple of ints, or ``None``."""
    if subset is None:
        return None
    if not isinstance(subset, (list, tuple)) or not all(isinstance(i, (int, np.integer)) for i in subset):
        raise TypeError(f"output_subset is {subset!r}; expected a list of ints")
    for i in subset:
        if not 0 <= i < n_outputs:
            raise IndexError(f"output_subset has output {i}; expected numbers of the {n_outputs} outputs, from 0")
    return tuple(int(i) for i in subset)


def check_num_slices(num_slices: Any) -> int:
    """Check ``num_slices``, and return it as an int."""
    if isinstance(num_slices, bool) or not isinstance(num_slices, (int, np.integer)):
        raise TypeError(f"num_slices is {num_slices!r}; expected an int")
    if num_slices < 1:
        raise ValueError(f"num_slices is {num_slices}; expected at least 1")
    return int(num_slices)


class Input(NamedTuple):
    """Requirements that `Data` must meet to be passed as an input of a function."""

    name: str
    dtype: np.dtype
    ndim: int
    lengths: dict[int, int]  # by axis, for the axes whose length is part of the type
    axis: int  # the axis along which it is scattered; 0 for broadcast inputs


def inputs_of(graph: Graph) -> list[Input]:
    """Return the requirements of a function's inputs, in order."""
    axes = [*graph.axes, *[0] * (len(graph.input_variables) - graph.n_scattered)]
    return [
        Input(
            name or f"number {position}",
            np.dtype(var.dtype),
            var.ndim,
            {at: length for at, length in enumerate(known_lengths(var)) if length is not None},
            axis,
        )
        for position, (name, var, axis) in enumerate(zip(graph.input_names, graph.input_variables, axes))
    ]


def describe_inputs(graph: Graph) -> str:
    """Return the names of the inputs for ``repr``: scattered ones, a semicolon, broadcast ones."""
    names = [name or str(var) for name, var in zip(graph.input_names, graph.input_variables)]
    groups = names[: graph.n_scattered], names[graph.n_scattered :]
    return "; ".join([", ".join(groups[0]), *([", ".join(groups[1])] if groups[1] else [])])


# -- results and variables

_ENVIRONMENT = "SYNKHRONOS_CHECK"

#: In place of the op of an output: an exact function, whose outputs are the serial ones.
EXACT = "exact"


def environment_asks() -> bool:
    """Return whether the environment requests a comparison of each call with Theano."""
    return os.environ.get(_ENVIRONMENT, "0") not in ("", "0")


def is_asked(argument: Any, default: bool, place: int) -> bool:
    """Return whether to compare a call with Theano: ``argument``, or ``default`` if ``argument`` is ``None``.

    A comparison is impossible after the first part of a sequence (``place`` > 1), because earlier parts may change
    variables.
    """
    if argument is None:
        return default and place < 2
    if not isinstance(argument, bool):
        raise TypeError(f"check_against_theano must be True, False or None; got {argument!r}")
    if argument and place > 1:
        raise ValueError(
            "check_against_theano=True is possible only for the first call of a sequence; call it first, or outside of "
            "the block"
        )
    return argument


class Serial:
    """Serial computation of a function in the controller, without storing updates; compiled when first needed.

    Parameters
    ----------
    graph : Graph
    results : Results
    """

    def __init__(self, graph: _graph.Graph, results: Results) -> None:
        self._graph = graph
        self._results = results
        self._functions: dict[tuple[int, ...], Any] = {}  # by the positions of their outputs

    def expected(
        self, session: Session, inputs: Sequence[Any], rows: list[Selection] | None, wanted: Sequence[int]
    ) -> list[np.ndarray]:
        """Return the serial outputs for the rows of all ranks. It must run before the call, which may update variables.

        Parameters
        ----------
        session : Session
        inputs : list of array
            The inputs, with all selected rows.
        rows : list of selections, or None
            The rows of the sliceable shared variables on each rank; ``None``: all rows.
        wanted : list of int
            Positions of the outputs to compute.

        Raises
        ------
        ValueError
            If the function draws random numbers, or Theano raises an exception on these rows.
        """
        if self._graph.is_random:
            raise ValueError("check_against_theano: the function draws random numbers, which differ between ranks")
        variables = self._graph.sliceable_shareds
        sliceable = []
        if variables:
            on_ranks = session.run(Get(session.keys(variables)))
            for values in zip(*on_ranks):
                picked = values if rows is None else [_picked(value, some) for value, some in zip(values, rows)]
                sliceable.append(np.concatenate(picked))
        key = tuple(wanted)
        try:
            if key not in self._functions:
                self._functions[key] = self._graph.compile_serial(key)
            return [np.asarray(to_host(value)) for value in self._functions[key](*inputs, *sliceable)]
        except Exception as error:
            let_interrupts_pass(error)
            raise ValueError(f"check_against_theano: {TITLE} fails on all rows in one process: {error}") from error

    def compare(self, outputs: Sequence[Any], expected: Sequence[np.ndarray], wanted: Sequence[int]) -> None:
        """Raise `ValueError` if outputs differ from the serial ones; the message names the one that differs most.

        Outputs with the op ``None`` and gathered scalars are not compared, because no serial call returns them.
        """
        worst = None
        for i, output, right in zip(wanted, outputs, expected):
            op = self._results.modes[i]
            if op is None or (op == "gather" and right.ndim == 0):
                continue
            got = np.asarray(to_host(output))
            if got.shape != right.shape:
                raise ValueError(
                    f"{self._described(i)} has shape {got.shape}, but {TITLE} gives {right.shape} for the same rows in "
                    "one process"
                )
            difference, tolerance = _largest_difference(got, right)
            if difference > tolerance and (worst is None or difference / tolerance > worst[0]):
                worst = difference / tolerance, i, op, difference, got, right
        if worst is not None:
            _, i, op, difference, got, right = worst
            place = np.unravel_index(np.argmax(distances(got, right)), got.shape)
            expected_op = "The op must combine the ranks' values to the value for all rows"
            cause = "This is a bug of synkhronos" if op == EXACT else expected_op
            raise ValueError(
                f"{self._described(i)} differs from what {TITLE} gives for the same rows in one process by up to "
                f"{difference:.6g}: {got[place]:.9g}, expected {right[place]:.9g}. {cause} (or the replicas differ: "
                "synkhronos.check_replicas)"
            )

    def _described(self, i: int) -> str:
        """Return the name of an output, and its op if it has one."""
        op = self._results.modes[i]
        return self._results.names[i] if op == EXACT else f"{self._results.names[i]}, op {op!r},"


def _picked(value: Any, rows: Selection) -> Any:
    """Return the selected rows of an array."""
    return value[slice(*rows.bounds)] if isinstance(rows, tuple) else value[rows]


def _largest_difference(got: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Return the largest difference and the tolerance: half of the dtype's digits, relative to the largest value."""
    differences = distances(got, right)
    if not differences.size:
        return 0.0, 1.0
    floats = [one.dtype for one in (got, right) if one.dtype.kind in "fc"]
    eps = max([float(np.finfo(dtype).eps) for dtype in floats], default=float(np.finfo(np.float64).eps))
    finite = np.abs(right[np.isfinite(right)].astype(np.complex128))
    return float(differences.max()), eps**0.5 * float(finite.max(initial=0)) + eps


class Checks:
    """Checks that refuse averages over ranks or slices that would mix rows, and warn of work that is not divided.

    Parameters
    ----------
    graph : Graph
    results : Results
    named : list of bool
        For each output, whether the user named the op.
    named_updates : list of shared variables
        The variables whose updates have an op that the user named.
    """

    def __init__(
        self, graph: _graph.Graph, results: Results, named: Sequence[bool], *, named_updates: Sequence[Any]
    ) -> None:
        self._graph, self._names = graph, results.names
        self._named_updates = named_updates
        modes = results.modes
        self._averaged = [i for i, mode in enumerate(modes) if mode == "avg" and not named[i]]
        self._own = [i for i, mode in enumerate(modes) if mode is None]
        self._undeclared: list[Any] = []
        self._axes: dict[int, int] | None = None  # cache: sharded axis of outputs and new values
        self._warned: set[Any] = set()  # shared variables of which a warning was issued
        self._may_be_undivided = bool(
            graph.input_variables
            and not graph.n_scattered
            and not graph.sliceable_shareds
            and any(mode in OPS for mode in modes)
            and graph.picks_rows_of_shared()
            and not graph.is_random
        )

    def check_variables(self, session: Session, name: str | None, scattered: Sequence[Any]) -> None:
        """Warn if scattered variables do not divide the work well. To be called when the scattered variables change.

        Warn if an input selects rows of shared variables, but all ranks have the same rows. Warn if the ranks have
        different numbers of rows, but equal weights in averages; if an input selects the rows, the user is responsible
        for even shards.

        Parameters
        ----------
        session : Session
        name : str, optional
            The function's name.
        scattered : list of shared variables
            The variables that the function reads and that are scattered.
        """
        if self._may_be_undivided and not scattered and session.n_ranks > 1:
            self._may_be_undivided = False  # warn once
            warn(
                f"{name or 'a function'}: no input and no shared variable of it is scattered: all {session.n_ranks} "
                "ranks compute the same. Pass the data as inputs, and pick rows by batch; or scatter the shared "
                "variables, name them in sliceable_shareds, and pick rows by batch_s"
            )
        declared = {id(var) for var in self._graph.sliceable_shareds}
        undeclared = [var for var in scattered if id(var) not in declared]
        if not (undeclared or self._undeclared) or self._graph.picks_rows_of_shared():
            return
        self._undeclared, self._axes = undeclared, None
        if not undeclared or not self._averaged or self._graph.n_scattered or declared:
            return
        for var, shapes in zip(undeclared, zip(*session.shapes(undeclared))):
            if len({shape[0] for shape in shapes}) > 1 and var not in self._warned:
                self._warned.add(var)
                warn(
                    f"{self._names[self._averaged[0]]} is averaged, and all ranks count as equal, but they have "
                    f"{', '.join(str(shape[0]) for shape in shapes)} rows of {var}, which was scattered: name {var} in "
                    'sliceable_shareds, so that ranks count by their rows, or name the op "avg" if this is meant'
                )

    def check_call(self, call: Call, wanted: Sequence[int]) -> None:
        """Refuse to average values that are sharded by rows, if the user did not name the op.

        Parameters
        ----------
        call : Call
        wanted : list of int
            Positions of the outputs to compute.

        Raises
        ------
        ValueError
            For an output or an update that has one row for each data point.
        """
        n_parts = sum(min(count, call.num_slices) for count in call.counts)
        is_sliced = min(call.counts[call.controller], call.num_slices) > 1
        suspects = [i for i in wanted if (n_parts > 1 and i in self._averaged) or (is_sliced and i in self._own)]
        has_slices = min(max(call.counts), call.num_slices) > 1  # on any rank: all have the updates
        n, updates = len(self._graph.outputs), self._graph.expressions[1] if has_slices else ()
        named = set(map(id, self._named_updates))
        suspects += [n + i for i, (var, _) in enumerate(updates) if id(var) not in named]
        if not suspects:
            return
        if self._axes is None:
            self._axes = row_axes(self._graph, self._undeclared)
        for i in suspects:
            if i in self._axes:
                name = self._names[i] if i < n else f"the update of {updates[i - n][0]}"
                raise ValueError(
                    f"{name} has a row for each data point, along axis {self._axes[i]}: an average would mix unrelated "
                    f"rows. {_remedy(is_output=i < n, is_own=i in self._own)}"
                )


def _remedy(is_output: bool, is_own: bool) -> str:
    if not is_output:
        return 'No op was named. Do not slice, or name the op "avg" if the average over slices is meant'
    if is_own:
        return 'With the op None, it is averaged over num_slices. Name the op "gather", or do not slice'
    return 'No op was named. Name it: "gather" for all rows, or "avg" if their average is meant'


class ExactChecks(Checks):
    """`Checks` of exact functions: nothing is averaged, and only sliceable variables may be scattered."""

    def check_variables(self, session: Session, name: str | None, scattered: Sequence[Any]) -> None:
        """Raise `ValueError` for a scattered variable that is not sliceable."""
        unknown = [var for var in scattered if var not in self._graph.sliceable_shareds]
        if unknown:
            raise ValueError(
                f"{unknown[0]} was scattered; expected a variable that is equal on all ranks. Name it in "
                "sliceable_shareds, pass the data as inputs, or broadcast it"
            )

    def check_call(self, call: Call, wanted: Sequence[int]) -> None:
        """Accept all calls."""
