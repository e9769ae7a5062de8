"""Plan of a call, and cache of the last call's plan.

A plan is what every rank does: rows, shards, variants, and the places of the inputs in shared memory. `LastCall` keeps
it for calls that differ from the last one only in the contents of arrays: those of `Data`, which each rank reads
itself, and those of staged arrays (NumPy inputs, index lists, and the starts of slices). Anything that is staged later,
by any thread, overwrites these, so they are staged again for each call, in the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._api.arguments import Input
from synkhronos._api.combine import GraphCollectives, Results
from synkhronos._api.data_arrays import Data
from synkhronos._api.rows import Selector, choose, count_points, lend_rows
from synkhronos._graph import Graph, Variant
from synkhronos._graph.ops import Cut
from synkhronos._memory import ArrayRef
from synkhronos._rank import Call, Follow
from synkhronos._session import Session
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.rows import Rows, Selection

__all__ = ["LastCall", "Planner", "Sight", "look_at"]


class Sight(NamedTuple):
    """A call as far as it can be repeated: a signature of all that its plan depends on, and the contents to stage."""

    signature: tuple[Any, ...]
    contents: Sequence[np.ndarray]


def look_at(values: Sequence[Any], batch: Any, scattered: Sequence[Input], *options: Any) -> Sight | None:
    """Return the signature and the contents of a call; ``None`` if it must be planned.

    Parameters
    ----------
    values : sequence
        The inputs.
    batch : Any
        As given by the user.
    scattered : sequence of Input
        The scattered inputs, to which `batch` applies. They come first.
    *options : hashable
        The other arguments of the call.
    """
    picks = batch is not None and type(batch) is not int
    if picks and not (scattered and isinstance(batch, (slice, list, np.ndarray))):
        return None
    signature: list[Any] = [*options, type(batch) if picks else batch]
    contents: list[np.ndarray] = []
    for value in values:
        if isinstance(value, Data):
            signature += value.ref, value.minibatch
        elif type(value) is np.ndarray and batch is None:
            signature += value.shape, value.dtype
            contents.append(value)
        else:
            return None
    if picks:
        selected: dict[int, Selection] = {}
        lists: list[np.ndarray] = []
        starts = [0] * len(scattered)
        moves = False
        for i, one in enumerate(scattered):
            try:
                rows = choose(values[i], batch, selected, one)
            except (TypeError, ValueError, IndexError) as error:  # planning the call raises it again
                let_interrupts_pass(error)
                return None
            signature.append(len(rows))
            if isinstance(rows, Rows):
                starts[i], moves = rows.start, True
            else:
                if not any(rows is other for other in lists):
                    lists.append(rows)
                signature.append(("list", next(place for place, other in enumerate(lists) if rows is other)))
        contents = [*lists, *contents]
        if moves and type(batch) is slice:
            contents.append(np.array(starts, np.int64))
    return Sight(tuple(signature), contents)


class LastCall:
    """Plan of the last call of a function, to be used again."""

    def __init__(self) -> None:
        self._signature: tuple[Any, ...] | None = None
        self._call: Call | None = None
        self._refs: Sequence[ArrayRef] = ()
        self._rows: list[Selection] | None = None

    def keep(self, sight: Sight | None, call: Call, refs: Sequence[ArrayRef], rows: list[Selection] | None) -> None:
        """Record a call, where its arrays were staged, and the rows of the sliceable shared variables."""
        self._signature = None if sight is None else sight.signature
        self._call, self._refs, self._rows = call, refs, rows

    def find(self, session: Session, sight: Sight) -> tuple[Call | None, list[Selection] | None]:
        """Return the last call and its rows if the signature is the same, with the new contents staged in place."""
        if sight.signature == self._signature and (not sight.contents or session.restage(self._refs, sight.contents)):
            return self._call, self._rows
        return None, None


class Planner:
    """Plans the calls of one function.

    Parameters
    ----------
    graph : Graph
    results : Results
    meetings : Meetings
    update_modes : dict
        The op of each given update.
    device : bool
        Whether the function computes on GPUs.
    """

    def __init__(
        self, graph: Graph, results: Results, meetings: GraphCollectives, update_modes: dict[Any, str], device: bool
    ) -> None:
        self._graph, self._results, self._meetings = graph, results, meetings
        self._mode_of, self._device = update_modes, device

    def plan(
        self,
        session: Session,
        distributed: Callable[[Variant, Graph], int],
        selector: Selector,
        rows: list[Selection] | None,
        num_slices: int,
        subset: tuple[int, ...] | None,
    ) -> tuple[Call, Sequence[ArrayRef]]:
        """Stage what is not in shared memory; returns the command for every rank, and the staged places.

        Parameters
        ----------
        session : Session
        distributed : callable
            Distributes a variant of a graph if necessary, and returns its key.
        selector : Selector
            The inputs.
        rows : list of selections, or None
            The rows of the sliceable shared variables on each rank.
        num_slices : int
        subset : tuple of int, or None
            The outputs to compute; ``None``: all.
        """
        modes = self._results.modes
        wanted = tuple(range(len(modes))) if subset is None else subset
        graph, follow = self._graph, None
        parts = self._meetings.cut() if num_slices > 1 and self._meetings.any else None
        if parts is not None:
            graph, subset, follow = self._in_two(distributed, wanted, *parts)
        accumulate = num_slices > 1 and bool(graph.accumulated)
        kind = "all" if rows is None else "range" if isinstance(rows[0], Rows) else "index"
        updated = graph.accumulated if accumulate else []
        n = len(graph.outputs)
        if subset is not None:
            subset = _some(subset, n)
        variant, asked = Variant(accumulate, kind, self._device).told(subset)
        key = distributed(variant, graph)
        counts, everybody = count_points(session, self._graph, selector, rows, num_slices)
        if rows is not None and self._meetings.any and any(counts) and not all(counts):
            rows = lend_rows(session, self._graph, rows, counts)
        staging = selector.stage(rows)
        call = Call(
            function=key,
            inputs=staging.sources,
            n_scattered=self._graph.n_scattered,
            shares=selector.shares,
            rows=staging.rows,
            counts=counts,
            everybody=everybody,
            num_slices=num_slices,
            output_modes=tuple([modes[i] for i in wanted]),
            output_subset=None if asked is None else (*asked, *range(n, n + len(updated))),
            updated=session.keys(updated),
            update_modes=tuple([self._mode_of.get(var, "avg") for var in updated]),
            nccl=self._results.over_nccl(wanted) if session.nccl and (everybody or all(counts)) else (),
            master=session.master_rank,
            meets=self._meetings.any,
            kept=session.keys(self._meetings.kept(counts)),
            follow=follow,
            starts=staging.starts,
        )
        return call, staging.refs

    def _in_two(
        self,
        distributed: Callable[[Variant, Graph], int],
        wanted: Sequence[int],
        cut: Cut,
        before: Graph,
        after: Graph,
    ) -> tuple[Graph, tuple[int, ...], Follow]:
        """Return the graph to compute slice by slice, its outputs that are needed, and the function that follows."""
        local = [i for i in wanted if i in cut.before]
        rest = [i for i in wanted if i in cut.after]
        n_local = len(before.outputs) - len(cut.ops)
        after_subset = tuple([list(cut.after).index(i) for i in rest])
        variant, asked = Variant(device=self._device).told(_some(after_subset, len(after.outputs)))
        follow = Follow(
            function=distributed(variant, after),
            modes=(*(self._results.modes[i] or "avg" for i in local), *cut.ops),
            n_entering=len(cut.ops),
            output_subset=asked,
            order=tuple([[*local, *rest].index(i) for i in wanted]),
        )
        entering = range(n_local, n_local + len(cut.ops))
        return before, (*(cut.before.index(i) for i in local), *entering), follow


def _some(subset: tuple[int, ...], n: int) -> tuple[int, ...] | None:
    """Return ``output_subset`` for a function of ``n`` outputs; ``None`` if it is all of them, in order."""
    return None if subset == tuple(range(n)) else subset
