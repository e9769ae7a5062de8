"""`ExactFunction`: all ranks together compute what the serial program computes, updates included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos import _graphs
from synkhronos._calls.averages import Averages
from synkhronos._calls.functions import Function
from synkhronos._calls.planning import Planner
from synkhronos._calls.results import Results
from synkhronos._calls.serial import Serial
from synkhronos._exact import DividedGraph
from synkhronos._memory import ArrayRef
from synkhronos._partition import Rows
from synkhronos._rank import Call
from synkhronos._session import Session

__all__ = ["ExactFunction"]


class ExactFunction(Function):
    """A function whose graph is divided by the rows of its scattered inputs; made by `function(..., exact=True)`.

    Parameters
    ----------
    session : Session
    user : Graph
        What the user asked for.
    divided : DividedGraph
        What each rank computes of it.
    single : bool
        Whether a call returns one array rather than a list.
    name : str or None

    Attributes
    ----------
    partition : list
        The collectives in it, as a table.
    """

    def __init__(
        self, session: Session, user: _graphs.Graph, divided: DividedGraph, *, single: bool, name: str | None
    ) -> None:
        title, n_outputs = name or "the function", len(divided.outputs)
        results = Results(divided.outputs, divided.modes, [False] * n_outputs, session.on_gpu, title)
        named = [True] * n_outputs
        super().__init__(session, divided, results, {}, named=named, named_updates=[], single=single, name=name)
        self._user = user
        self._serial = Serial(user, Results(user.outputs, ["exact"] * n_outputs, [False] * n_outputs, False, title))
        self._averages = _NoParts(divided, self._serial, results, self._meetings, named, named_updates=[])
        self._planner = _ExactPlanner(divided, results, self._meetings, {}, session.on_gpu)
        self.partition = divided.partition


class _NoParts(Averages):
    """Nothing is averaged, and no variable may be in parts."""

    def see_parts(self, session: Session, scattered: Sequence[Any]) -> None:
        """Refuse them."""
        if scattered:
            raise ValueError(
                f"exact functions use shared variables that are the same on all ranks; {scattered[0]} was scattered: "
                "pass the data as inputs, or broadcast it"
            )


class _ExactPlanner(Planner):
    def plan(self, session: Session, *arguments: Any) -> tuple[Call, Sequence[ArrayRef]]:
        """As of other functions, but that all ranks compute, and are told which rows they have."""
        *_, num_slices, _ = arguments
        if num_slices > 1:
            raise ValueError("num_slices: an exact function cannot be sliced; give it smaller batches")
        call, refs = super().plan(session, *arguments)
        n_rows = sum(call.counts)
        if call.shares is None or all(call.counts):
            return call._replace(exact=True), refs
        # fewer rows than ranks: each computes the whole, and where they meet the master's counts; of no rows, all count
        counts = tuple(n_rows * (rank == call.master) for rank in range(session.n_ranks))
        shares = (Rows(0, n_rows),) * session.n_ranks
        return call._replace(exact=True, shares=shares, counts=counts, everybody=n_rows == 0), refs
