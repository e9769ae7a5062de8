"""The arguments of a function call: matching them to inputs, checking them, and choosing each rank's rows of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._data import Data
from synkhronos._graphs import Graph
from synkhronos._interrupts import let_interrupts_pass
from synkhronos._keywords import unknown_keyword
from synkhronos._partition import Rows, Selection, select, shares, shift
from synkhronos._rank import RowsRef, Source
from synkhronos._session import Session

__all__ = ["Input", "Selector", "arrange", "check_num_slices", "check_subset", "describe_inputs", "inputs_of"]


#: What a call takes beside the inputs.
CALL_OPTIONS = ("output_subset", "batch", "batch_s", "num_slices")


def arrange(
    graph: Any, args: Sequence[Any], kwargs: dict[str, Any], options: Sequence[str] = CALL_OPTIONS
) -> list[Any]:
    """The value given for each input, in the order of the inputs; `TypeError` for missing and surplus ones.

    ``graph`` has ``input_names`` and ``input_defaults``. ``options`` are the arguments beside the inputs, one of which
    the user may have misspelled.
    """
    names, defaults = graph.input_names, graph.input_defaults
    if len(args) == len(names) and not kwargs and all(value is not None for value in args):
        return list(args)
    if len(args) > len(names):
        raise TypeError(f"the function takes {len(names)} inputs {names}; got {len(args)}")
    values = list(args) + [None] * (len(names) - len(args))
    for name, value in kwargs.items():
        if name not in names:
            raise unknown_keyword("the function", name, [one for one in (*names, *options) if one])
        position = names.index(name)
        if values[position] is not None:
            raise TypeError(f"input {name!r} was given twice")
        values[position] = value
    for i, value in enumerate(values):
        if value is None:
            values[i] = defaults[i]
    missing = [names[i] or f"number {i}" for i, value in enumerate(values) if value is None]
    if missing:
        raise TypeError(f"the function takes {len(names)} inputs {names}; missing: {', '.join(missing)}")
    return values


def check_subset(subset: Any, n_outputs: int) -> tuple[int, ...] | None:
    """``output_subset`` as a tuple of ints, or ``None``."""
    if subset is None:
        return None
    if not isinstance(subset, (list, tuple)) or not all(isinstance(i, (int, np.integer)) for i in subset):
        raise TypeError(f"output_subset must be a list of ints; got {subset!r}")
    for i in subset:
        if not 0 <= i < n_outputs:
            raise IndexError(f"output_subset: there is no output {i}; the function has {n_outputs}")
    return tuple(int(i) for i in subset)


def check_num_slices(num_slices: Any) -> int:
    """``num_slices`` as an int."""
    if isinstance(num_slices, bool) or not isinstance(num_slices, (int, np.integer)):
        raise TypeError(f"num_slices must be an int; got {num_slices!r}")
    if num_slices < 1:
        raise ValueError(f"num_slices must be at least 1; got {num_slices}")
    return int(num_slices)


class Input(NamedTuple):
    """What `Data` must be like for an input of a function."""

    name: str
    dtype: np.dtype
    ndim: int
    fixed: tuple[int, ...]  # axes that are broadcastable


def inputs_of(graph: Graph) -> list[Input]:
    """The inputs of a function."""
    return [
        Input(
            name or f"number {position}",
            np.dtype(var.dtype),
            var.ndim,
            tuple(axis for axis, fixed in enumerate(var.broadcastable) if fixed),
        )
        for position, (name, var) in enumerate(zip(graph.input_names, graph.input_variables))
    ]


def describe_inputs(graph: Graph) -> str:
    """The names of the inputs: of the scattered ones, then of the broadcast ones."""
    names = [name or str(var) for name, var in zip(graph.input_names, graph.input_variables)]
    groups = names[: graph.n_scattered], names[graph.n_scattered :]
    return "; ".join([", ".join(groups[0]), *([", ".join(groups[1])] if groups[1] else [])])


def _index(rows: Selection) -> Any:
    """What takes rows of an array along an axis."""
    return slice(*rows.bounds) if isinstance(rows, Rows) else rows


@functools.lru_cache(maxsize=256)
def _split(n: int, n_ranks: int) -> tuple[tuple[Rows, ...], tuple[int, ...]]:
    """The ranks' shares of ``n`` data points, and their lengths."""
    split = tuple(shares(n, n_ranks))
    return split, tuple(map(len, split))


def _second_axes(shapes: Sequence[tuple[int, ...]]) -> str:
    """A hint for inputs of unequal lengths whose data points seem to lie along axis 1, as in time-major sequences."""
    lengths = [set(shape[:2]) for shape in shapes]
    if not set.intersection(*lengths):
        return ""
    return (
        ". Rows are counted along axis 0. Of time-major inputs, shape (T, N, ...), the data points lie along axis 1: "
        "declare and pass them as (N, T, ...), and transpose them in the graph, x.dimshuffle(1, 0, 2); or build the "
        "function with exact=True, shard={x: 1}"
    )


class Selector:
    """The inputs of one call: arrays, the rows chosen from each, and how ranks share these rows.

    Parameters
    ----------
    session : Session
    graph : Graph
    inputs : list of Input
        Its `inputs_of`.
    values : list of Data or array_like
        One for each input.
    batch : Any
        What the user gave.

    Attributes
    ----------
    shares : tuple of Rows, or None
        Which of the chosen rows each rank takes; ``None`` without scattered inputs.
    counts : tuple of int
        How many rows each rank takes; empty without scattered inputs.
    """

    def __init__(
        self, session: Session, graph: Graph, inputs: Sequence[Input], values: Sequence[Any], batch: Any
    ) -> None:
        self._session = session
        self._graph = graph
        self._inputs = inputs
        self._values = [self._check(position, value) for position, value in enumerate(values)]
        self._rows: list[Selection | None] = [None] * len(values)
        self._axes = [*graph.axes, *[0] * (len(values) - graph.n_scattered)]
        self._selected: dict[int, Selection] = {}  # what the batch selects, by number of rows
        self.shares: tuple[Rows, ...] | None = None
        self.counts: tuple[int, ...] = ()
        if graph.n_scattered:
            sizes = []
            for position in range(graph.n_scattered):
                rows = self._rows[position] = self._choose(position, batch)
                sizes.append(len(rows))
            if len(set(sizes)) > 1:
                raise ValueError(
                    "scattered inputs must all have the same number of data points; got "
                    + ", ".join(f"{one.name}: {size}" for one, size in zip(inputs, sizes))
                    + ". An input without data points belongs in bcast_inputs"
                    + _second_axes([value.shape for value in self._values[: graph.n_scattered]])
                )
            self.shares, self.counts = _split(sizes[0], session.n_ranks)
        elif batch is not None:
            raise ValueError("batch was given, but the function has no scattered inputs")

    def _check(self, position: int, value: Any) -> Any:
        name, dtype, ndim, fixed = self._inputs[position]
        if not isinstance(value, Data):
            try:
                return self._graph.filter_input(position, value)
            except TypeError as error:
                raise TypeError(f"input {name}: {error}") from None
            except ValueError as error:
                type_ = self._graph.input_variables[position].type
                raise TypeError(f"input {name}: not an array of {type_}: {error}") from None
        if value.dtype != dtype:
            try:  # each rank casts its own rows, where Theano would cast an array
                self._graph.filter_input(position, np.zeros((1,) * ndim, value.dtype))
            except Exception as error:
                let_interrupts_pass(error)
                raise TypeError(f"input {name}: expected Data of dtype {dtype}; got {value.dtype}") from None
        if value.ndim != ndim:
            raise TypeError(f"input {name}: expected Data of {ndim} dimensions; got {value.ndim}")
        for axis in fixed:
            if value.shape[axis] != 1:
                raise TypeError(
                    f"input {name}: axis {axis} is broadcastable and must have length 1; got shape {value.shape}"
                )
        return value

    def _choose(self, position: int, batch: Any) -> Selection:
        value = self._values[position]
        if batch is None or not (isinstance(value, Data) and value.minibatch):
            length = value.shape[self._graph.axes[position]]
            if length not in self._selected:
                self._selected[length] = select(batch, length)
            return self._selected[length]
        return shift(batch, value.shape[self._graph.axes[position]], f"input {self._inputs[position].name}: batch")

    def chosen(self) -> list[Any]:
        """The arrays that are used, all ranks together: the chosen rows of each scattered input, the others whole."""
        arrays = [value.data if isinstance(value, Data) else value for value in self._values]
        return [
            value if rows is None else value[(slice(None),) * axis + (_index(rows),)]
            for value, rows, axis in zip(arrays, self._rows, self._axes)
        ]

    def stage(self, sliceable_rows: Sequence[Selection] | None) -> tuple[tuple[Source, ...], tuple[RowsRef, ...]]:
        """Put into shared memory what is not there yet: NumPy inputs (the chosen rows alone) and index arrays.

        Returns
        -------
        (sources, rows) : tuple
            Where each input lies, and where the rows of the sliceable shared variables are listed for each rank.
        """
        of_data = [rows for value, rows in zip(self._values, self._rows) if isinstance(value, Data)]
        listed = {id(rows): rows for rows in (*of_data, *(sliceable_rows or ())) if isinstance(rows, np.ndarray)}
        arrays = [
            value
            if rows is None
            else (value, rows)
            if isinstance(rows, np.ndarray) and not axis
            else value[(slice(None),) * axis + (_index(rows),)]
            for value, rows, axis in zip(self._values, self._rows, self._axes)
            if not isinstance(value, Data)
        ]
        refs = self._session.stage([*listed.values(), *arrays])
        places = dict(zip(listed, refs))
        copied = iter(refs[len(listed) :])
        sources = []
        for value, rows, axis in zip(self._values, self._rows, self._axes):
            if not isinstance(value, Data):
                sources.append(Source(next(copied), None if rows is None else Rows(0, len(rows)), axis))
            else:
                sources.append(Source(value.ref, places[id(rows)] if isinstance(rows, np.ndarray) else rows, axis))
        row_refs = [rows if isinstance(rows, Rows) else places[id(rows)] for rows in sliceable_rows or ()]
        return tuple(sources), tuple(row_refs)
