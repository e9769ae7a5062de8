"""Collectives on shared variables: moving and combining the replicas of a variable across ranks.

Every function here takes one shared variable or a list of them, and, where it takes or returns values, one value or a
list to match. A variable must be used by a function of the session; a function that is not yet distributed is
distributed first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _graphs
from synkhronos._collectives import check_op, lists_ops, nccl_moves, nccl_reduces
from synkhronos._engine import to_host
from synkhronos._keywords import checks_keywords
from synkhronos._progress import progress
from synkhronos._rank import AllGather, AllReduce, Command, Get, Nccl, Reduce
from synkhronos._session import Session
from synkhronos._team import COLLECTIVES
from synkhronos._variables.replicated import (
    check_shapes,
    check_weights,
    like,
    match,
    no_value,
    over_nccl,
    put,
    start,
)
from synkhronos.errors import WorkerError

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
]


@checks_keywords
def broadcast(shared_vars: Any, values: Any = None, nccl: bool = True) -> None:
    """Give every rank the master's value of each variable, or ``values``.

    Parameters
    ----------
    shared_vars : shared variable or list
    values : array_like or Data, or list, optional
        New values, cast as the engine would.
    nccl : bool
        Use NCCL where the variable lives on a CUDA GPU; on CPU cores it changes nothing.
    """
    session, variables = start("broadcast", shared_vars, to_set=True)
    with session.lock, session.timeline.call("broadcast"):
        if values is not None:
            put(session, variables, match(shared_vars, variables, values))
            session.replicas.note_parts(variables, are_parts=False)
            return
        session.sequencer.check_first("broadcast of the master's values")
        direct = over_nccl(session, variables, nccl, nccl_moves)
        if direct:
            shapes = tuple(tuple(_graphs.get_array(var).shape) for var in direct)
            session.run(Nccl("broadcast", session.keys(direct), session.master_rank, shapes=shapes))
        rest = _without(variables, direct)
        if rest:
            workers = tuple(rank for rank in range(session.n_ranks) if rank != session.master_rank)
            put(session, rest, [_graphs.host_array(var) for var in rest], ranks=workers)
        _graphs.note_told(variables)
        session.replicas.note_parts(variables, are_parts=False)


@checks_keywords
def scatter(shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Split each value along axis 0, as evenly as possible, and give each rank its share as the variable's value.

    Parameters
    ----------
    shared_vars : shared variable or list
    values : array_like or Data, or list
        Shape ``(n, ...)``.
    batch : int, slice, list or array, optional
        Which rows of the values to use, as in a function call.
    """
    session, variables = start("scatter", shared_vars, to_set=True)
    with session.lock, session.timeline.call("scatter"):
        values = match(shared_vars, variables, values)
        for var in variables:
            if var.ndim == 0:
                raise ValueError(f"scatter: {var} is 0-dimensional")
        with progress("scattering"):
            put(session, variables, values, batch=batch, split=True)
        session.replicas.note_parts(variables)


@checks_keywords
def gather(shared_vars: Any, nd_up: int = 1, nccl: bool = True) -> Any:
    """All ranks' values of each variable, in rank order; nothing changes on any rank.

    Parameters
    ----------
    shared_vars : shared variable or list
    nd_up : int
        1: stacked on a new first axis, which needs equal shapes. 0: concatenated on axis 0; lengths may differ.
    nccl : bool
        Use NCCL where the variable lives on a CUDA GPU; on CPU cores it changes nothing.

    Raises
    ------
    ValueError
        If the shapes do not allow it.
    """
    session, variables = start("gather", shared_vars)
    if isinstance(nd_up, bool) or nd_up not in (0, 1):
        raise ValueError(f"nd_up must be 1 (stack) or 0 (concatenate); got {nd_up!r}")
    with session.lock, session.timeline.call("gather"):
        results = session.run(Get(session.keys(variables)))
        session.timeline.switch(COLLECTIVES)
        gathered = []
        for var, values in zip(variables, zip(*results)):
            check_shapes("gather", var, [value.shape for value in values], concatenate=nd_up == 0)
            gathered.append(np.concatenate(values) if nd_up == 0 else np.stack(values))
    return like(shared_vars, gathered)


@checks_keywords
def all_gather(shared_vars: Any, nccl: bool = True) -> None:
    """Make every rank's variable the concatenation, on axis 0 in rank order, of all ranks' values.

    Parameters
    ----------
    shared_vars : shared variable or list
    nccl : bool
        Use NCCL where the variable lives on a CUDA GPU; on CPU cores it changes nothing.

    Raises
    ------
    ValueError
        If the shapes differ beyond axis 0, or a variable is 0-dimensional; then nothing changes.
    """
    session, variables = start("all_gather", shared_vars)
    with session.lock, session.timeline.call("all_gather"):
        on_ranks = dict(zip(variables, zip(*session.shapes(variables))))
        for var, shapes in on_ranks.items():
            check_shapes("all_gather", var, shapes, concatenate=True)
            if var.broadcastable[0]:
                raise ValueError(f"all_gather: axis 0 of {var} is broadcastable and must keep length 1")
        equal = [var for var, shapes in on_ranks.items() if len(set(shapes)) == 1]
        direct = over_nccl(session, equal, nccl, nccl_moves)
        if direct:
            session.run(Nccl("all_gather", session.keys(direct), session.master_rank))
        rest = _without(variables, direct)
        if rest:
            session.run(AllGather(session.keys(rest), tuple(on_ranks[var] for var in rest)))


@checks_keywords
@lists_ops
def reduce(shared_vars: Any, op: str = "avg", in_place: bool = True, nccl: bool = True) -> Any:
    """Reduce all ranks' values of each variable to the master.

    Parameters
    ----------
    shared_vars : shared variable or list
    op : str
        {ops}.
    in_place : bool
        ``True``: into the master's variable (integers keep their dtype: averages round to the nearest). ``False``:
        returned (in NumPy's dtype for such a reduction), and nothing changes.
    nccl : bool
        Use NCCL where the variable lives on a CUDA GPU; on CPU cores it changes nothing.
    """
    session, variables = start("reduce", shared_vars)
    op, in_place = check_op("reduce", op), bool(in_place)
    with session.lock, session.timeline.call("reduce"):
        direct = over_nccl(session, variables, nccl, lambda dtype: nccl_reduces(dtype, op, not in_place))
        reduced: dict[Any, Any] = {}
        if direct:
            command = Nccl("reduce", session.keys(direct), session.master_rank, op)
            reduced.update(zip(direct, _run(session, "reduce", direct, command)[session.master_rank]))
        rest = _without(variables, direct)
        if rest and in_place:
            _submit(session, "reduce", rest, Reduce(session.keys(rest), op, True))
        elif rest:
            results = _run(session, "reduce", rest, Reduce(session.keys(rest), op, False))[session.master_rank]
            reduced.update(zip(rest, map(session.private, results)))
        if not in_place:
            return like(shared_vars, [to_host(reduced[var]) for var in variables])
        for var in direct:
            _graphs.set_array(var, reduced[var])
    return None


def _without(variables: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [var for var in variables if not any(var is other for other in others)]


def _run(session: Session, function: str, variables: Sequence[Any], command: Command) -> list[Any]:
    """Run a command that needs equal shapes on all ranks; if it fails, and they are not, say which."""
    try:
        return session.run(command)
    except WorkerError:
        _explain(session, function, variables)
        raise


def _submit(session: Session, function: str, variables: Sequence[Any], command: Command) -> None:
    """The same at once or in a sequence, for a command that returns nothing."""
    session.sequencer.keep(variables)
    session.submit(command, no_value, functools.partial(_explain, session, function, variables))


def _explain(session: Session, function: str, variables: Sequence[Any]) -> None:
    """Raise `ValueError` for the variable whose shapes differ between ranks, if there is one."""
    every = list(zip(*session.shapes(variables)))
    try:
        for var, shapes in zip(variables, every):
            check_shapes(function, var, shapes)
    except ValueError as error:
        raise error from None  # it says all that there is to say


@checks_keywords
@lists_ops
def all_reduce(shared_vars: Any, op: str = "avg", nccl: bool = True, weights: Sequence[float] | None = None) -> None:
    """Reduce all ranks' values of each variable into every rank's variable, the same to the bit everywhere.

    Parameters
    ----------
    shared_vars : shared variable or list
    op : str
        {ops}. Integers keep their dtype: averages round to the nearest.
    nccl : bool
        Use NCCL where the variable lives on a CUDA GPU; on CPU cores it changes nothing.
    weights : sequence of float, optional
        For ``"avg"``: one number for each rank; a weight of 0 leaves that rank's value out altogether. With
        ``f.counts`` the average over ranks of a mean over data points is the mean over all data points.

    Raises
    ------
    ValueError
        If a variable's shape is not the same on all ranks; then nothing changes.
    """
    session, variables = start("all_reduce", shared_vars)
    op = check_op("all_reduce", op)
    checked = check_weights(session, op, weights)
    with session.lock, session.timeline.call("all_reduce"):
        command = AllReduce(session.keys(variables), op, checked, bool(nccl))
        _submit(session, "all_reduce", variables, command)
