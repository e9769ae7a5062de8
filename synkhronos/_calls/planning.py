"""What every rank is to do in a call: rows, shares, variants, and where in shared memory the inputs lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from synkhronos._calls.meetings import Meetings
from synkhronos._calls.points import count_points, lend_rows
from synkhronos._calls.results import Results
from synkhronos._calls.selecting import Selector
from synkhronos._graph import Graph, Variant
from synkhronos._graph.ops import Cut
from synkhronos._memory import ArrayRef
from synkhronos._rank import Call, Follow
from synkhronos._session import Session
from synkhronos._utils.rows import Rows, Selection

__all__ = ["Planner"]


class Planner:
    """Plans the calls of one function.

    Parameters
    ----------
    graph : Graph
    results : Results
    meetings : Meetings
    update_modes : dict
        The op of each update that was given.
    device : bool
        Whether the function computes on GPUs.
    """

    def __init__(
        self, graph: Graph, results: Results, meetings: Meetings, update_modes: dict[Any, str], device: bool
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
        """Stage what is not in shared memory; returns what every rank is to do, and where that was staged.

        Parameters
        ----------
        session : Session
        distributed : callable
            Gives the key of a variant of a graph, which it sees to that every rank has.
        selector : Selector
            The inputs.
        rows : list of selections, or None
            Those of the sliceable shared variables on each rank.
        num_slices : int
        subset : tuple of int, or None
            The outputs that are wanted; ``None``: all.
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
        """What is computed slice by slice, which outputs of that are needed, and what follows."""
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
    """An ``output_subset`` for a function of ``n`` outputs, without which Theano's linkers in Python do it all."""
    return None if subset == tuple(range(n)) else subset
