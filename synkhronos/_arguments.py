"""The arguments of a function call: matching them to inputs, checking them, and choosing each rank's rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._data import Data
from synkhronos._graphs import Graph
from synkhronos._partition import Rows, Selection, select, shares, shift
from synkhronos._protocol import RowsRef, Source
from synkhronos._segments import aligned
from synkhronos._session import Session

__all__ = ["Selector", "arrange", "check_num_slices", "check_subset"]


def arrange(graph: Graph, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The value given for each input, in the order of the inputs; `TypeError` for missing and surplus ones."""
    names, defaults = graph.input_names, graph.input_defaults
    if len(args) > len(names):
        raise TypeError(f"the function takes {len(names)} inputs {names}; got {len(args)}")
    values = list(args) + [None] * (len(names) - len(args))
    for name, value in kwargs.items():
        if name not in names:
            raise TypeError(f"the function has no input named {name!r}; its inputs are {names}")
        position = names.index(name)
        if values[position] is not None:
            raise TypeError(f"input {name!r} was given twice")
        values[position] = value
    values = [default if value is None else value for value, default in zip(values, defaults)]
    missing = [names[i] or f"number {i}" for i, value in enumerate(values) if value is None]
    if missing:
        raise TypeError(f"the function takes {len(names)} inputs {names}; missing: {', '.join(missing)}")
    return values


def check_subset(subset: Any, n_outputs: int) -> list[int] | None:
    """``output_subset`` as a list of ints, or ``None``."""
    if subset is None:
        return None
    if not isinstance(subset, (list, tuple)) or not all(isinstance(i, (int, np.integer)) for i in subset):
        raise TypeError(f"output_subset must be a list of ints; got {subset!r}")
    for i in subset:
        if not 0 <= i < n_outputs:
            raise IndexError(f"output_subset: there is no output {i}; the function has {n_outputs}")
    return [int(i) for i in subset]


def check_num_slices(num_slices: Any) -> int:
    """``num_slices`` as an int."""
    if isinstance(num_slices, bool) or not isinstance(num_slices, (int, np.integer)):
        raise TypeError(f"num_slices must be an int; got {num_slices!r}")
    if num_slices < 1:
        raise ValueError(f"num_slices must be at least 1; got {num_slices}")
    return int(num_slices)


class Selector:
    """The inputs of one call: arrays, the rows chosen from each, and how ranks share these rows.

    Parameters
    ----------
    session : Session
    graph : Graph
    values : list of Data or array_like
        One for each input.
    batch : Any
        What the user gave.

    Attributes
    ----------
    shares : tuple of Rows, or None
        Which of the chosen rows each rank takes; ``None`` without scattered inputs.
    """

    def __init__(self, session: Session, graph: Graph, values: Sequence[Any], batch: Any) -> None:
        self._session = session
        self._graph = graph
        self._values = [self._check(position, value) for position, value in enumerate(values)]
        self._rows: list[Selection] = []
        self._selected: dict[int, Selection] = {}  # what the batch selects, by number of rows
        self.shares: tuple[Rows, ...] | None = None
        if graph.n_scattered:
            self._rows = [self._choose(position, batch) for position in range(graph.n_scattered)]
            sizes = [len(rows) for rows in self._rows]
            if len(set(sizes)) > 1:
                raise ValueError(
                    "scattered inputs must all have the same number of data points; got "
                    + ", ".join(f"{name}: {size}" for name, size in zip(graph.input_names, sizes))
                )
            self.shares = tuple(shares(sizes[0], session.n_ranks))
        elif batch is not None:
            raise ValueError("batch was given, but the function has no scattered inputs")

    def _check(self, position: int, value: Any) -> Any:
        var = self._graph.input_variables[position]
        name = self._graph.input_names[position] or f"number {position}"
        if not isinstance(value, Data):
            try:
                return self._graph.filter_input(position, value)
            except TypeError as error:
                raise TypeError(f"input {name}: {error}") from None
            except ValueError as error:
                raise TypeError(f"input {name}: not an array of {var.type}: {error}") from None
        if value.dtype != var.dtype:
            raise TypeError(f"input {name}: expected Data of dtype {var.dtype}; got {value.dtype}")
        if value.ndim != var.ndim:
            raise TypeError(f"input {name}: expected Data of {var.ndim} dimensions; got {value.ndim}")
        for axis, fixed in enumerate(var.broadcastable if any(var.broadcastable) else ()):
            if fixed and value.shape[axis] != 1:
                raise TypeError(
                    f"input {name}: axis {axis} is broadcastable and must have length 1; got shape {value.shape}"
                )
        return value

    def _choose(self, position: int, batch: Any) -> Selection:
        value = self._values[position]
        if batch is None or not (isinstance(value, Data) and value.minibatch):
            length = len(value)
            if length not in self._selected:
                self._selected[length] = select(batch, length)
            return self._selected[length]
        rows, length = shift(batch)
        if len(value) < length:
            name = self._graph.input_names[position] or f"number {position}"
            raise IndexError(f"batch spans {length} rows, but the minibatch data of input {name} has {len(value)}")
        return rows

    def stage(self, sliceable_rows: Sequence[Selection] | None) -> tuple[tuple[Source, ...], tuple[RowsRef, ...]]:
        """Put into shared memory what is not there yet: NumPy inputs (the chosen rows alone) and index arrays.

        Returns
        -------
        (sources, rows) : tuple
            Where each input lies, and where the rows of the sliceable shared variables are listed for each rank.
        """
        indexes: dict[int, np.ndarray] = {}
        n_bytes = 0
        for position, value in enumerate(self._values):
            rows = self._rows[position] if position < len(self._rows) else None
            if not isinstance(value, Data):
                n_bytes += aligned(value.nbytes if rows is None else len(rows) * (value.nbytes // max(1, len(value))))
            elif isinstance(rows, np.ndarray):
                indexes[id(rows)] = rows
        for rows in sliceable_rows or ():
            if isinstance(rows, np.ndarray):
                indexes[id(rows)] = rows
        arena = self._session.reserve(n_bytes + sum(aligned(index.nbytes) for index in indexes.values()))
        placed = {key: arena.place(index) for key, index in indexes.items()}

        def where(rows: Selection) -> RowsRef:
            return rows if isinstance(rows, Rows) else placed[id(rows)]

        sources = []
        for position, value in enumerate(self._values):
            rows = self._rows[position] if position < len(self._rows) else None
            if isinstance(value, Data):
                sources.append(Source(value.ref, None if rows is None else where(rows)))
                continue
            shape = value.shape if rows is None else (len(rows), *value.shape[1:])
            ref, view = arena.empty(shape, value.dtype)
            if rows is None:
                np.copyto(view, value)
            elif isinstance(rows, Rows):
                np.copyto(view, value[rows.start : rows.stop])
            else:
                np.take(value, rows, axis=0, out=view, mode="clip")
            sources.append(Source(ref, None if rows is None else Rows(0, len(rows))))
        return tuple(sources), tuple(where(rows) for rows in sliceable_rows or ())
