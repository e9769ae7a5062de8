"""`ExactFunction`: all ranks together compute what the serial program computes, updates included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from synkhronos import _graphs
from synkhronos._calls.functions import Function
from synkhronos._calls.results import Results
from synkhronos._calls.serial import Serial
from synkhronos._exact import DividedGraph
from synkhronos._partition import Rows
from synkhronos._rank import Call

if TYPE_CHECKING:
    from synkhronos._calls.arguments import Selector
    from synkhronos._partition import Selection
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

    _is_exact = True

    def __init__(
        self, session: Session, user: _graphs.Graph, divided: DividedGraph, *, single: bool, name: str | None
    ) -> None:
        title = name or "the function"
        results = Results(divided.outputs, divided.modes, [False] * len(divided.outputs), session.on_gpu, title)
        named = [True] * len(divided.outputs)
        super().__init__(session, divided, results, {}, named=named, named_updates=[], single=single, name=name)
        self._user = user
        as_asked = Results(user.outputs, ["exact"] * len(user.outputs), [False] * len(user.outputs), False, title)
        self._serial = Serial(user, as_asked)
        self.partition = divided.partition

    def _plain_function(self) -> Any:
        return self._user.compile()

    def _see_scattered(self, session: Session, variables: Sequence[Any]) -> None:
        if variables:
            raise ValueError(
                f"exact functions use shared variables that are the same on all ranks; {variables[0]} was scattered: "
                "pass the data as inputs, or broadcast it"
            )

    def _plan(
        self, session: Session, selector: Selector, rows: list[Selection] | None, num_slices: int, subset: Any
    ) -> Call:
        if num_slices > 1:
            raise ValueError("num_slices: an exact function cannot be sliced; give it smaller batches")
        call = super()._plan(session, selector, rows, num_slices, subset)
        n_rows = sum(call.counts)
        if call.shares is None or all(call.counts):
            return call._replace(exact=True)
        # fewer rows than ranks: each computes the whole, and the master's counts wherever they meet
        counts = tuple(n_rows * (rank == call.master) for rank in range(session.n_ranks))
        shares = (Rows(0, n_rows),) * session.n_ranks
        return call._replace(exact=True, shares=shares, counts=counts, everybody=False)
