"""Rows of one call: the chosen rows of the inputs and of sliceable shared variables, and how the ranks share them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._api.arguments import Input
from synkhronos._api.data_arrays import Data
from synkhronos._graph import Graph
from synkhronos._memory import ArrayRef
from synkhronos._rank import RowsRef, Source
from synkhronos._session import Session
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.rows import Rows, Selection, select, select_per_rank, shares, shift

__all__ = ["Selector", "Staging", "choose", "count_points", "lend_rows", "rows_on_ranks", "sliceable_rows"]


def sliceable_rows(session: Session, graph: Graph, batch_s: Any, num_slices: int) -> list[Selection] | None:
    """Return the rows of the sliceable shared variables on each rank; ``None`` for all, as they are."""
    if not graph.sliceable_shareds:
        if batch_s is not None:
            raise ValueError("batch_s was given, but the function was built without sliceable_shareds")
        return None
    if batch_s is None and num_slices == 1:
        return None
    rows = select_per_rank(batch_s, rows_on_ranks(session, graph))
    if all(isinstance(one, Rows) for one in rows):
        return rows
    return [np.arange(*one.bounds, dtype=np.int64) if isinstance(one, Rows) else one for one in rows]


def rows_on_ranks(session: Session, graph: Graph) -> list[int]:
    """Return each rank's number of rows of the sliceable shared variables; it must be the same for all of them."""
    unknown = [var for var in graph.sliceable_shareds if session.replica.variables.key(var) is None]
    if unknown:  # a function that uses only their lengths is distributed without them
        session.distribute_variables(unknown)
    shapes = session.shapes(graph.sliceable_shareds)
    for rank, on_rank in enumerate(shapes):
        if len({shape[0] for shape in on_rank}) > 1:
            raise ValueError(
                f"sliceable_shareds have different lengths on rank {rank}: {[shape[0] for shape in on_rank]}"
            )
    return [on_rank[0][0] for on_rank in shapes]


def count_points(
    session: Session, graph: Graph, selector: Selector, rows: list[Selection] | None, num_slices: int
) -> tuple[tuple[int, ...], bool]:
    """Return each rank's number of data points, and whether ranks compute although none has any."""
    if selector.shares is not None:
        counts = selector.counts
        if rows is not None and num_slices > 1 and counts != tuple(map(len, rows)):
            raise ValueError(
                "num_slices: scattered inputs and sliceable shared variables are sliced together and need as many "
                f"rows on each rank; got {counts} and {tuple(map(len, rows))}"
            )
    elif rows is not None:
        counts = tuple(len(one) for one in rows)
    elif graph.sliceable_shareds:
        counts = tuple(rows_on_ranks(session, graph))
    else:
        return (1,) * session.n_ranks, False
    return counts, not any(counts)


def lend_rows(session: Session, graph: Graph, rows: list[Selection], counts: tuple[int, ...]) -> list[Selection]:
    """Return the rows; a rank without data points that picks none gets its first row, so that it can compute."""
    lent: list[Selection] = [Rows(0, min(1, length)) for length in rows_on_ranks(session, graph)]
    if not isinstance(rows[0], Rows):
        lent = [np.arange(len(one), dtype=np.int64) for one in lent]
    return [one if count or len(one) else own for one, own, count in zip(rows, lent, counts)]


@functools.lru_cache(maxsize=256)
def _split(n: int, n_ranks: int) -> tuple[tuple[Rows, ...], tuple[int, ...]]:
    """Return the ranks' shards of ``n`` data points, and their lengths."""
    split = tuple(shares(n, n_ranks))
    return split, tuple(map(len, split))


def _second_axes(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return a hint for inputs of unequal lengths whose data points seem to lie along axis 1 (time-major sequences)."""
    lengths = [set(shape[:2]) for shape in shapes]
    if not set.intersection(*lengths):
        return ""
    return (
        ". Rows are counted along axis 0. Of time-major inputs, shape (T, N, ...), the data points lie along axis 1: "
        "declare and pass them as (N, T, ...), and transpose them in the graph, x.dimshuffle(1, 0, 2); or build the "
        "function with exact=True, shard={x: 1}"
    )


class Staging(NamedTuple):
    """Places in shared memory of a call's inputs, of the sliceable rows, and of the starts of ranges; all of them."""

    sources: tuple[Source, ...]
    rows: tuple[RowsRef, ...]
    starts: ArrayRef | None
    refs: list[ArrayRef]


def _index(rows: Selection, axis: int) -> tuple[Any, ...]:
    """Return the index that selects rows of an array along an axis."""
    return (*[slice(None)] * axis, slice(*rows.bounds) if isinstance(rows, Rows) else rows)


def choose(value: Any, batch: Any, selected: dict[int, Selection], scattered: Input) -> Selection:
    """Return the rows of a scattered input that a batch selects; ``selected`` caches them by the number of rows."""
    if batch is not None and isinstance(value, Data) and value.minibatch:
        return shift(batch, value.shape[scattered.axis], f"input {scattered.name}: batch")
    length = value.shape[scattered.axis]
    if length not in selected:
        selected[length] = select(batch, length)
    return selected[length]


class Selector:
    """The inputs of one call: arrays, the rows chosen from each, and each rank's shard of these rows.

    Parameters
    ----------
    session : Session
    graph : Graph
    inputs : list of Input
        The result of `inputs_of` for the graph.
    values : list of Data or array_like
        One for each input.
    batch : Any
        As given by the user.

    Attributes
    ----------
    shares : tuple of Rows, or None
        Each rank's shard of the chosen rows; ``None`` without scattered inputs.
    counts : tuple of int
        The number of rows of each rank; empty without scattered inputs.
    """

    def __init__(
        self, session: Session, graph: Graph, inputs: Sequence[Input], values: Sequence[Any], batch: Any
    ) -> None:
        self._session = session
        self._graph = graph
        self._inputs = inputs
        self._values = [self._check(position, value) for position, value in enumerate(values)]
        self._rows: list[Selection | None] = [None] * len(values)
        selected: dict[int, Selection] = {}
        self._moves = isinstance(batch, slice)
        self.shares: tuple[Rows, ...] | None = None
        self.counts: tuple[int, ...] = ()
        if graph.n_scattered:
            sizes = []
            for position in range(graph.n_scattered):
                rows = self._rows[position] = choose(self._values[position], batch, selected, inputs[position])
                sizes.append(len(rows))
            if len(set(sizes)) > 1:
                raise ValueError(
                    "scattered inputs must all have the same number of data points; got "
                    + ", ".join(f"{one.name}: {size}" for one, size in zip(inputs, sizes))
                    + _second_axes([value.shape for value in self._values[: graph.n_scattered]])
                    + ". An input without data points belongs in bcast_inputs"
                )
            self.shares, self.counts = _split(sizes[0], session.n_ranks)
        elif batch is not None:
            raise ValueError("batch was given, but the function has no scattered inputs")

    def _check(self, position: int, value: Any) -> Any:
        name, dtype, ndim, lengths, _ = self._inputs[position]
        if not isinstance(value, Data):
            try:
                return self._graph.filter_input(position, value)
            except TypeError as error:
                raise TypeError(f"input {name}: {error}") from None
            except (OverflowError, ValueError) as error:
                type_ = self._graph.input_variables[position].type
                raise TypeError(f"input {name}: not an array of {type_}: {error}") from None
        if value.dtype != dtype:
            try:  # each rank casts its own rows, if Theano would cast an array of this dtype
                self._graph.filter_input(position, np.zeros((1,) * ndim, value.dtype))
            except Exception as error:
                let_interrupts_pass(error)
                raise TypeError(f"input {name}: expected Data of dtype {dtype}; got {value.dtype}") from None
        if value.ndim != ndim:
            raise TypeError(f"input {name}: expected Data of {ndim} dimensions; got {value.ndim}")
        for axis, length in lengths.items():
            if value.shape[axis] != length:
                raise TypeError(
                    f"input {name}: its type says that axis {axis} has length {length}; got shape {value.shape}"
                )
        return value

    def chosen(self) -> list[Any]:
        """Return the arrays of all ranks together: the chosen rows of scattered inputs, the other inputs in full."""
        arrays = [value.data if isinstance(value, Data) else value for value in self._values]
        return [
            value if rows is None else value[_index(rows, one.axis)]
            for value, rows, one in zip(arrays, self._rows, self._inputs)
        ]

    def stage(self, sliceable_rows: Sequence[Selection] | None) -> Staging:
        """Copy to shared memory what is not there yet: NumPy inputs (only the chosen rows) and index arrays.

        If the batch is a slice, its starts are staged, too, because the next slice may differ in them alone.

        Parameters
        ----------
        sliceable_rows : list of selections, or None
            The rows of the sliceable shared variables on each rank.
        """
        of_data = [rows for value, rows in zip(self._values, self._rows) if isinstance(value, Data)]
        listed = {id(rows): rows for rows in (*of_data, *(sliceable_rows or ())) if isinstance(rows, np.ndarray)}
        arrays = [
            value
            if rows is None
            else (value, rows)
            if isinstance(rows, np.ndarray) and not one.axis
            else value[_index(rows, one.axis)]
            for value, rows, one in zip(self._values, self._rows, self._inputs)
            if not isinstance(value, Data)
        ]
        moves = self._moves and any(isinstance(rows, Rows) for rows in of_data)
        pairs = list(zip(self._values, self._rows))[: self._graph.n_scattered]
        firsts = [rows.start if isinstance(rows, Rows) and isinstance(value, Data) else 0 for value, rows in pairs]
        starts = [np.array(firsts, np.int64)] if moves else []
        refs = self._session.stage([*listed.values(), *arrays, *starts])
        places = dict(zip(listed, refs))
        copied = iter(refs[len(listed) :])
        sources = []
        for value, rows, one in zip(self._values, self._rows, self._inputs):
            if not isinstance(value, Data):
                sources.append(Source(next(copied), None if rows is None else Rows(0, len(rows)), one.axis))
            elif isinstance(rows, np.ndarray):
                sources.append(Source(value.ref, places[id(rows)], one.axis))
            else:
                rows = Rows(0, len(rows)) if moves and rows is not None else rows
                sources.append(Source(value.ref, rows, one.axis))
        row_refs = [rows if isinstance(rows, Rows) else places[id(rows)] for rows in sliceable_rows or ()]
        return Staging(tuple(sources), tuple(row_refs), refs[-1] if moves else None, refs)
