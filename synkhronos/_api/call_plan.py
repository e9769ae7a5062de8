"""Plan of a function call: the rows to compute, their division among the ranks, and the command for every rank.

`BatchRows` holds the rows that ``batch=`` selects. They are computed once in each call, and `Planner` makes the command
from them.

A plan is cached. It is used again for calls with the same signature (`make_signature`), which differ only in the
contents of arrays. Each rank reads the contents of `Data` itself. The other contents are staged: NumPy inputs, index
lists, and the starts of slices. Later staging by any thread overwrites them, so each call stages them again, in the
same places.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._api.checks import Input, inputs_of
from synkhronos._api.combine import GraphCollectives, Results
from synkhronos._api.data_arrays import Data
from synkhronos._costs import Estimate
from synkhronos._graph import Graph, Variant
from synkhronos._graph.ops import Cut
from synkhronos._memory import ArrayRef
from synkhronos._rank import MOST_SUMS, MOST_VALUES, Call, Follow, RowProduct, RowsRef, SlicedUpdate, Source, Step
from synkhronos._session import Place, Session, Staged, can_be_read
from synkhronos._sharding import ShardedGraph, Slices
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.rows import Rows, Selection, select, select_per_rank, shares, shift


class BatchRows(NamedTuple):
    """Rows that ``batch=`` selects of each scattered input, and whether ``batch=`` is a slice."""

    rows: tuple[Selection, ...]
    is_slice: bool

    @classmethod
    def of(cls, batch: Any, values: Sequence[Any], scattered: Sequence[Input]) -> BatchRows:
        """Parse a user's ``batch``. ``values`` are the inputs of the call, the scattered ones first.

        Raises
        ------
        TypeError, ValueError, IndexError
            If ``batch`` is invalid, or out of range.
        """
        if batch is not None and not scattered:
            raise ValueError("got batch for a function without scattered inputs; leave it out")
        by_length: dict[int, Selection] = {}
        found = []
        for value, one in zip(values, scattered):
            length = value.shape[one.axis]
            if batch is not None and isinstance(value, Data) and value.minibatch:
                found.append(shift(batch, length, f"input {one.name}: batch"))
                continue
            rows = by_length.get(length)
            if rows is None:
                rows = by_length[length] = select(batch, length)
            found.append(rows)
        return cls(tuple(found), isinstance(batch, slice))


class CallSignature(NamedTuple):
    """Key of a call in a function's cache of plans, and the arrays that the plan does not contain.

    Attributes
    ----------
    key : tuple
        Everything that the plan depends on. Calls with equal keys have the same plan.
    contents : sequence of array
        The arrays that each call copies to shared memory, in the order of `stage`.
    batch : BatchRows, or None
        The selected rows; ``None`` if the key determines them.
    """

    key: tuple[Any, ...]
    contents: Sequence[np.ndarray]
    batch: BatchRows | None


def make_signature(
    values: Sequence[Any], batch: Any, scattered: Sequence[Input], *options: Any
) -> CallSignature | None:
    """Return the signature of a call, or ``None`` if its plan cannot be cached.

    Parameters
    ----------
    values : sequence
        The inputs.
    batch : Any
        As given by the user.
    scattered : sequence of Input
        The scattered inputs, which come first. ``batch`` applies to them.
    *options : hashable
        The other arguments of the call.
    """
    picks = batch is not None and type(batch) is not int
    if picks and not (scattered and isinstance(batch, (slice, list, np.ndarray))):
        return None
    key: list[Any] = [*options, type(batch) if picks else batch]
    contents: list[np.ndarray] = []
    for value in values:
        if isinstance(value, Data):
            key += value.ref, value.minibatch
        elif type(value) is np.ndarray and batch is None:
            key += value.shape, value.dtype
            contents.append(value)
        else:
            return None
    if not picks:
        return CallSignature(tuple(key), contents, None)
    try:
        chosen = BatchRows.of(batch, values, scattered)
    except (TypeError, ValueError, IndexError) as error:  # `check_inputs` raises it again
        let_interrupts_pass(error)
        return None
    lists: list[np.ndarray] = []
    starts = []
    moves = False
    for rows in chosen.rows:
        if isinstance(rows, Rows):
            key.append(rows.stop - rows.start)
            starts.append(rows.start)
            moves = chosen.is_slice
            continue
        place = next((i for i, other in enumerate(lists) if rows is other), len(lists))
        if place == len(lists):
            lists.append(rows)
        key.append((place, len(rows)))
        starts.append(0)
    contents = [*lists, *contents]
    if moves:
        contents.append(np.array(starts, np.int64))
    return CallSignature(tuple(key), contents, chosen)


class Inputs(NamedTuple):
    """Checked inputs of a call, and the division of its rows among the ranks."""

    values: list[Any]
    batch: BatchRows
    shares: tuple[Rows, ...] | None  # each rank's shard of the selected rows; None without scattered inputs
    counts: tuple[int, ...]  # lengths of the shards; empty without scattered inputs


def check_inputs(session: Session, graph: Graph, inputs: Sequence[Input], values: Sequence[Any], batch: Any) -> Inputs:
    """Check and cast the inputs of a call, and divide the rows that ``batch`` selects among the ranks.

    Parameters
    ----------
    session : Session
    graph : Graph
    inputs : list of Input
        The result of `inputs_of` for the graph.
    values : list of Data or array_like
        One for each input.
    batch : BatchRows, or as given by the user

    Raises
    ------
    TypeError, ValueError, IndexError
        For invalid inputs, and as `BatchRows.of`.
    """
    values = [_check(graph, position, one, value) for position, (one, value) in enumerate(zip(inputs, values))]
    return divide(session, inputs[: graph.n_scattered], values, batch)


def divide(session: Session, scattered: Sequence[Input], values: list[Any], batch: Any) -> Inputs:
    """Divide the rows that ``batch`` selects among the ranks. The values have been checked by `check_inputs`."""
    if not isinstance(batch, BatchRows):
        batch = BatchRows.of(batch, values, scattered)
    if not scattered:
        return Inputs(values, batch, None, ())
    sizes = [len(rows) for rows in batch.rows]
    if len(set(sizes)) > 1:
        raise ValueError(
            "the scattered inputs have different numbers of data points: "
            + ", ".join(f"{one.name}: {size}" for one, size in zip(scattered, sizes))
            + _second_axes([value.shape for value in values[: len(scattered)]])
            + ". Pass an input without data points in bcast_inputs"
        )
    return Inputs(values, batch, *_split(sizes[0], session.n_ranks))


def _order_of_inputs(graph: Graph) -> str:
    """Name the inputs, if some of them must be given after those with rows."""
    names = list(map(str, graph.input_variables))
    if not 0 < graph.n_scattered < len(names):
        return ""
    return f". The inputs are {', '.join(names)}, in this order: those in bcast_inputs come last"


def _check(graph: Graph, position: int, one: Input, value: Any) -> Any:
    name, dtype, ndim, lengths, _ = one
    if not isinstance(value, Data):
        try:
            return graph.filter_input(position, value)
        except TypeError as error:
            raise TypeError(f"input {name}: {error}{_order_of_inputs(graph)}") from None
        except (OverflowError, ValueError) as error:
            type_ = graph.input_variables[position].type
            raise TypeError(f"input {name}: got no array of {type_}: {error}") from None
    if position in graph.packed:
        raise TypeError(f"input {name}: got Data; expected a value of {graph.packed[position]}")
    if value.dtype != dtype:
        try:  # allow each dtype that Theano would cast; each rank casts its own rows
            graph.filter_input(position, np.zeros((1,) * ndim, value.dtype))
        except Exception as error:
            let_interrupts_pass(error)
            raise TypeError(f"input {name}: got Data of dtype {value.dtype}; expected {dtype}") from None
    if value.ndim != ndim:
        raise TypeError(f"input {name}: got Data of {value.ndim} dimensions; expected {ndim}")
    for axis, length in lengths.items():
        if value.shape[axis] != length:
            raise TypeError(
                f"input {name}: got shape {value.shape}; expected length {length} along axis {axis}, as in its type"
            )
    return value


@functools.lru_cache(maxsize=256)
def _split(n: int, n_ranks: int) -> tuple[tuple[Rows, ...], tuple[int, ...]]:
    """Return each rank's shard of ``n`` data points, and the lengths of the shards."""
    split = tuple(shares(n, n_ranks))
    return split, tuple(map(len, split))


def _second_axes(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return a hint for an error message if the data points seem to lie along axis 1, as in time-major sequences."""
    lengths = [set(shape[:2]) for shape in shapes]
    if not set.intersection(*lengths):
        return ""
    return (
        ". Rows are counted along axis 0. Of time-major inputs, shape (T, N, ...), the data points lie along axis 1: "
        "declare and pass them as (N, T, ...), and transpose them in the graph, x.dimshuffle(1, 0, 2); or build the "
        "function with exact=True, shard={x: 1}"
    )


def chosen(values: Sequence[Any], batch: Any, specs: Sequence[Input], n_scattered: int) -> list[Any]:
    """Return the arrays that a serial call gets: the selected rows of scattered inputs, other inputs in full.

    The parameters are those of `check_inputs`.
    """
    arrays = [value.data if isinstance(value, Data) else value for value in values]
    if batch is None:
        return arrays
    scattered = specs[:n_scattered]
    rows = batch.rows if isinstance(batch, BatchRows) else BatchRows.of(batch, values, scattered).rows
    arrays[:n_scattered] = [array[_index(one, spec.axis)] for array, one, spec in zip(arrays, rows, scattered)]
    return arrays


def _index(rows: Selection, axis: int) -> tuple[Any, ...]:
    """Return the index that selects rows of an array along an axis."""
    return (*[slice(None)] * axis, slice(*rows.bounds) if isinstance(rows, Rows) else rows)


#: Bytes of a NumPy input from which on the controller's rows are not copied; for less, a copy of all takes less time.
_LEAST_IN_PLACE = 64 * 1024


class ControllerCall(NamedTuple):
    """Plan of a call that the controller computes alone, in place of a `Call`."""

    #: ``compute(session, values, batch)`` computes the outputs from the values of the inputs; `chosen` has the latter.
    compute: Callable[[Session, Sequence[Any], Any], list[Any]]
    counts: tuple[int, ...]  # data points by rank
    subset: tuple[int, ...] | None  # of the outputs; ``None``: all
    estimate: Estimate | None  # prediction by which the plan was chosen


class Staging(NamedTuple):
    """Places of a call's arrays in shared memory."""

    sources: tuple[Source, ...]  # of the inputs
    rows: tuple[RowsRef, ...]  # of the rows of sliceable shared variables, one for each rank
    starts: ArrayRef | None  # of the starts of ranges, one for each scattered input
    places: list[Place]  # of all staged arrays, in the order of staging


def stage(session: Session, inputs: Inputs, specs: Sequence[Input], sliceable: Sequence[Selection] | None) -> Staging:
    """Copy arrays that are not in shared memory to the staging arena: selected rows of NumPy inputs, and index arrays.

    If ``batch=`` is a slice of `Data`, its starts are staged, too, so that the next slice of the same length can use
    the same plan. The controller reads its own rows of NumPy inputs from the program's arrays, if possible.

    Parameters
    ----------
    session : Session
    inputs : Inputs
    specs : list of Input
        The result of `inputs_of` for the graph.
    sliceable : list of selections, or None
        The rows of the sliceable shared variables on each rank; ``None``: all rows.
    """
    values, chosen = inputs.values, inputs.batch.rows
    triples = [(value, rows, one.axis) for value, rows, one in zip_longest(values, chosen, specs)]
    of_data = [rows for value, rows, _ in triples if isinstance(value, Data)]
    listed = {id(rows): rows for rows in (*of_data, *(sliceable or ())) if isinstance(rows, np.ndarray)}
    own = _own_rows(session, inputs)
    arrays = [
        _to_stage(value, rows, axis, own if i < len(chosen) else None)
        for i, (value, rows, axis) in enumerate(triples)
        if not isinstance(value, Data)
    ]
    moves = inputs.batch.is_slice and any(isinstance(rows, Rows) for rows in of_data)
    firsts = [
        rows.start if isinstance(rows, Rows) and isinstance(value, Data) else 0 for value, rows in zip(values, chosen)
    ]
    starts = [np.array(firsts, np.int64)] if moves else []
    staged = [*listed.values(), *arrays, *starts]
    refs = session.stage(staged)
    places = dict(zip(listed, refs))
    copied = iter(refs[len(listed) :])
    sources = []
    for value, rows, axis in triples:
        if not isinstance(value, Data):
            sources.append(Source(next(copied), None if rows is None else Rows(0, len(rows)), axis))
        elif isinstance(rows, np.ndarray):
            sources.append(Source(value.ref, places[id(rows)], axis))
        else:
            rows = Rows(0, len(rows)) if moves and rows is not None else rows
            sources.append(Source(value.ref, rows, axis))
    row_refs = [rows if isinstance(rows, Rows) else places[id(rows)] for rows in sliceable or ()]
    ranges = [item[1] if isinstance(item, tuple) and isinstance(item[1], Rows) else None for item in staged]
    return Staging(tuple(sources), tuple(row_refs), refs[-1] if moves else None, list(map(Place, refs, ranges)))


def _own_rows(session: Session, inputs: Inputs) -> Rows | None:
    """Return the rows of scattered inputs that only the controller reads; ``None`` if other ranks may read them."""
    if inputs.shares is None or not all(inputs.counts) or session.sequencer.place or not session.is_on_one_node:
        return None  # a rank without rows reads another rank's; the program may change its arrays during a sequence
    return inputs.shares[session.master_rank]


def _to_stage(value: Any, rows: Selection | None, axis: int, own: Rows | None) -> Staged:
    """Return an item to stage for an input; ``own`` as `_own_rows`."""
    if isinstance(rows, np.ndarray) and not axis:
        return value, rows
    array = value if rows is None else value[_index(rows, axis)]
    if own is None or axis or array.nbytes < _LEAST_IN_PLACE or not can_be_read(array, array.dtype):
        return array
    return array, own


def sliceable_rows(session: Session, graph: Graph, batch_s: Any, num_slices: int) -> list[Selection] | None:
    """Return the selected rows of the sliceable shared variables on each rank; ``None`` for all rows, unsliced.

    The result has either `Rows` or index arrays for all ranks, because the ranks run the same compiled variant.
    """
    if not graph.sliceable_shareds:
        if batch_s is not None:
            raise ValueError(
                "got batch_s for a function without sliceable_shareds; leave it out, or build the function with them"
            )
        return None
    if batch_s is None and num_slices == 1:
        return None
    rows = select_per_rank(batch_s, rows_on_ranks(session, graph))
    if all(isinstance(one, Rows) for one in rows):
        return rows
    return [np.arange(*one.bounds, dtype=np.int64) if isinstance(one, Rows) else one for one in rows]


def count_rows(session: Session, graph: Graph, inputs: Inputs) -> int:
    """Return the number of rows of the scattered inputs, or else of the sliceable shared variables; 0 without both."""
    return sum(inputs.counts or (rows_on_ranks(session, graph) if graph.sliceable_shareds else ()))


def rows_on_ranks(session: Session, graph: Graph) -> list[int]:
    """Return the number of rows of the sliceable shared variables on each rank.

    On one rank, it must be the same for all these variables.
    """
    unknown = [var for var in graph.sliceable_shareds if session.replica.variables.key(var) is None]
    if unknown:  # a compiled function that uses only the length of a variable is distributed without the variable
        session.distribute_variables(unknown)
    shapes = session.shapes(graph.sliceable_shareds)
    for rank, on_rank in enumerate(shapes):
        if len({shape[0] for shape in on_rank}) > 1:
            raise ValueError(
                f"sliceable_shareds have the lengths {[shape[0] for shape in on_rank]} on rank {rank}; "
                "expected equal ones"
            )
    return [on_rank[0][0] for on_rank in shapes]


def count_points(
    session: Session, graph: Graph, inputs: Inputs, rows: list[Selection] | None, num_slices: int
) -> tuple[tuple[int, ...], bool]:
    """Return each rank's number of data points, and whether all ranks compute because no rank has data points."""
    if inputs.shares is not None:
        counts = inputs.counts
        if rows is not None and num_slices > 1 and counts != tuple(map(len, rows)):
            raise ValueError(
                f"num_slices is {num_slices}, and the ranks have {counts} rows of the inputs and "
                f"{tuple(map(len, rows))} of the sliceable shared variables, which are sliced together; expected equal "
                "numbers of rows"
            )
    elif rows is not None:
        counts = tuple(len(one) for one in rows)
    elif graph.sliceable_shareds:
        counts = tuple(rows_on_ranks(session, graph))
    else:
        return (1,) * session.n_ranks, False
    return counts, not any(counts)


def pad_empty_ranks(session: Session, graph: Graph, rows: list[Selection], counts: tuple[int, ...]) -> list[Selection]:
    """Return the selected rows, but the first row for a rank without data points and without selected rows.

    Such a rank must compute, because the other ranks wait for it in collectives; its weight is 0.
    """
    lent: list[Selection] = [Rows(0, min(1, length)) for length in rows_on_ranks(session, graph)]
    if not isinstance(rows[0], Rows):
        lent = [np.arange(len(one), dtype=np.int64) for one in lent]
    return [one if count or len(one) else own for one, own, count in zip(rows, lent, counts)]


class Planner:
    """Planner of the calls of one function.

    Parameters
    ----------
    graph : Graph
    results : Results
    collectives : GraphCollectives
    update_modes : dict
        The op of each update, by shared variable.
    device : bool
        Whether the function computes on GPUs.
    """

    def __init__(
        self, graph: Graph, results: Results, collectives: GraphCollectives, update_modes: dict[Any, str], device: bool
    ) -> None:
        self._graph, self._results, self._collectives = graph, results, collectives
        self._specs = inputs_of(graph)
        self._mode_of, self._device = update_modes, device

    def plan(
        self,
        session: Session,
        distributed: Callable[[Variant, Graph], int],
        inputs: Inputs,
        rows: list[Selection] | None,
        num_slices: int,
        subset: tuple[int, ...] | None,
    ) -> tuple[Call | ControllerCall, Sequence[Place]]:
        """Stage the arrays of a call; return the command for every rank, and the places of the staged arrays.

        Parameters
        ----------
        session : Session
        distributed : callable
            ``distributed(variant, graph)`` distributes a variant of a graph if necessary, and returns its key.
        inputs : Inputs
        rows : list of selections, or None
            The rows of the sliceable shared variables on each rank; ``None``: all rows.
        num_slices : int
        subset : tuple of int, or None
            The outputs to compute; ``None``: all.
        """
        modes = self._results.modes
        wanted = tuple(range(len(modes))) if subset is None else subset
        graph, follow = self._graph, None
        slices = self._slices(session, num_slices)
        if slices is not None:
            graph, subset = slices.graph, (*wanted, *range(len(modes), len(slices.graph.outputs)))
        parts = self._collectives.parts if num_slices > 1 and self._collectives.any else None
        if parts is not None:
            graph, subset, follow = self._in_two(distributed, wanted, *parts)
        accumulate = num_slices > 1 and bool(graph.accumulated)
        kind = "all" if rows is None else "range" if isinstance(rows[0], Rows) else "index"
        updated = graph.accumulated if accumulate else []
        n = len(graph.outputs)
        if subset is not None:
            subset = _some(subset, n)
        variant, asked = Variant(accumulate, kind, self._device).for_subset(subset)
        key = distributed(variant, graph)
        step = None if slices is None else _step(session, distributed, slices)
        counts, all_compute = count_points(session, self._graph, inputs, rows, num_slices)
        if rows is not None and self._collectives.any and any(counts) and not all(counts):
            rows = pad_empty_ranks(session, self._graph, rows, counts)
        staging = stage(session, inputs, self._specs, rows)
        call = Call(
            function=key,
            inputs=staging.sources,
            n_scattered=self._graph.n_scattered,
            shares=inputs.shares,
            rows=staging.rows,
            counts=counts,
            all_compute=all_compute,
            num_slices=num_slices,
            output_modes=tuple([modes[i] for i in wanted]),
            output_subset=None if asked is None else (*asked, *range(n, n + len(updated))),
            updated=session.keys(updated),
            update_modes=tuple([self._mode_of.get(var, "avg") for var in updated]),
            nccl=self._results.over_nccl(wanted) if session.nccl and (all_compute or all(counts)) else (),
            controller=session.master_rank,
            has_collectives=self._collectives.any,
            kept=session.keys(self._collectives.kept(counts)),
            follow=follow,
            starts=staging.starts,
            step=step,
        )
        return call, staging.places

    def _slices(self, session: Session, num_slices: int) -> Slices | None:
        """Return how the function's updates are computed by slices; ``None``: the function computes them."""
        return None

    def _in_two(
        self, distributed: Callable[[Variant, Graph], int], wanted: Sequence[int], cut: Cut, before: Graph, after: Graph
    ) -> tuple[Graph, tuple[int, ...], Follow]:
        """Plan a call in slices of a graph that was cut at its collectives.

        Return the graph to compute slice by slice, the outputs of it that are needed, and the function to compute
        after all slices.
        """
        local = [i for i in wanted if i in cut.before]
        rest = [i for i in wanted if i in cut.after]
        n_local = len(before.outputs) - len(cut.ops)
        after_subset = tuple([list(cut.after).index(i) for i in rest])
        variant, asked = Variant(device=self._device).for_subset(_some(after_subset, len(after.outputs)))
        follow = Follow(
            function=distributed(variant, after),
            modes=(*(self._results.modes[i] or "avg" for i in local), *cut.ops),
            n_entering=len(cut.ops),
            output_subset=asked,
            order=tuple([[*local, *rest].index(i) for i in wanted]),
        )
        entering = range(n_local, n_local + len(cut.ops))
        return before, (*(cut.before.index(i) for i in local), *entering), follow


def slices_of(session: Session, graph: ShardedGraph) -> Slices | None:
    """Return how a function's large updates are computed by slices; ``None`` if they are not."""
    slices = graph.slices if session.stale.shares and not session.on_gpu else None
    if slices is None or len(slices.summed) > MOST_SUMS:
        return None
    return slices if max(len(group.variables) for group in slices.groups) <= MOST_VALUES else None


def view_variables(session: Session, slices: Slices) -> bool:
    """Have the workers view the variables that are updated by slices; return whether they do."""
    used = [*slices.others, *slices.variables, *slices.values]
    unknown = [var for var in dict.fromkeys(used) if session.replica.variables.key(var) is None]
    if unknown:
        session.distribute_variables(unknown)
    return session.view(session.keys(slices.variables))


def _step(session: Session, distributed: Callable[[Variant, Graph], int], slices: Slices) -> Step:
    """Return the updates of a call that are computed by slices, for the ranks."""
    position = {one: place for place, one in enumerate(slices.returned, len(slices.others))}
    products = [
        RowProduct(position[one.left], position[one.right], distributed(Variant(), one.function))
        for one in slices.products.values()
    ]
    places = {"product": {one: i for i, one in enumerate(slices.products)}}
    sliced = []
    for group in slices.groups:
        inputs = []
        for kind, variable, _ in group.leaves:
            number = session.keys([variable])[0] if kind == "value" else places.get(kind, position)[variable]
            inputs.append((kind, number))
        sliced.append(
            SlicedUpdate(distributed(Variant(), group.function), session.keys(group.variables), tuple(inputs))
        )
    adopted = frozenset(session.keys(slices.adopted if session.is_on_one_node else ()))  # or all would be sent
    others, drawn = session.keys(slices.others), session.keys(slices.drawn)
    return Step(others, adopted, drawn, tuple(sliced), tuple(products))


def _some(subset: tuple[int, ...], n: int) -> tuple[int, ...] | None:
    """Return a subset of a function's ``n`` outputs, or ``None`` if it consists of all outputs in order."""
    return None if subset == tuple(range(n)) else subset
