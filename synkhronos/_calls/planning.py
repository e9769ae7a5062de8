"""What every rank is to do in a call: rows, shares, variants, and where in shared memory the inputs lie."""

from __future__ import annotations

from typing import Any, Callable

from synkhronos._calls.arguments import Selector
from synkhronos._calls.meetings import Meetings
from synkhronos._calls.points import count_points
from synkhronos._calls.results import Results
from synkhronos._graphs import Graph, Variant
from synkhronos._partition import Rows, Selection
from synkhronos._rank import Call
from synkhronos._session import Session

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
        distributed: Callable[[Variant], int],
        selector: Selector,
        rows: list[Selection] | None,
        num_slices: int,
        subset: tuple[int, ...] | None,
    ) -> Call:
        """Stage what is not in shared memory; returns what every rank is to do.

        Parameters
        ----------
        session : Session
        distributed : callable
            Gives the key of a variant, which it sees to that every rank has.
        selector : Selector
            The inputs.
        rows : list of selections, or None
            Those of the sliceable shared variables on each rank.
        num_slices : int
        subset : tuple of int, or None
            The outputs that are wanted; ``None``: all.
        """
        if num_slices > 1 and self._meetings.any:
            raise ValueError("num_slices: a function with collectives in it cannot be sliced")
        accumulate = num_slices > 1 and bool(self._graph.accumulated)
        kind = "all" if rows is None else "range" if isinstance(rows[0], Rows) else "index"
        key = distributed(Variant(accumulate, kind, self._device))
        counts, everybody = count_points(session, self._graph, selector, rows, num_slices)
        sources, row_refs = selector.stage(rows)
        modes = self._results.modes
        wanted = range(len(modes)) if subset is None else subset
        updated = self._graph.accumulated if accumulate else []
        return Call(
            function=key,
            inputs=sources,
            n_scattered=self._graph.n_scattered,
            shares=selector.shares,
            rows=row_refs,
            counts=counts,
            everybody=everybody,
            num_slices=num_slices,
            output_modes=tuple([modes[i] for i in wanted]),
            output_subset=None if subset is None else (*subset, *range(len(modes), len(modes) + len(updated))),
            updated=session.keys(updated),
            update_modes=tuple([self._mode_of.get(var, "avg") for var in updated]),
            nccl=self._results.over_nccl(wanted) if session.nccl and (everybody or all(counts)) else (),
            master=session.master_rank,
            meets=self._meetings.any,
            kept=session.keys(self._meetings.kept(counts)),
        )
