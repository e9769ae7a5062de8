"""Collectives on shared variables: combining the replicas of a variable across ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from synkhronos import _graph
from synkhronos._api.variables import check_shapes, check_weights, like, no_value, over_nccl, start, without
from synkhronos._backends import to_host
from synkhronos._collectives import check_op, lists_ops, nccl_reduces
from synkhronos._rank import AllReduce, Command, Nccl, Reduce
from synkhronos._session import Session
from synkhronos._utils.display import checks_keywords
from synkhronos.errors import WorkerError
from synkhronos.typing import Reduction, Variables

__all__ = ["all_reduce", "reduce"]


@checks_keywords
@lists_ops
def reduce(shared_vars: Variables, op: Reduction = "avg", in_place: bool = True, nccl: bool = True) -> Any:
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

    Examples
    --------
    >>> s = theano.shared(np.zeros(2), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3, 4])
    ...     print(synk.reduce(s, op="sum", in_place=False))
    [4. 6.]
    """
    session, variables = start("reduce", shared_vars)
    op, in_place = check_op("reduce", op), bool(in_place)
    with session.lock, session.timeline.call("reduce"):
        direct = over_nccl(session, variables, nccl, lambda dtype: nccl_reduces(dtype, op, not in_place))
        reduced: dict[Any, Any] = {}
        if direct:
            command = Nccl("reduce", session.keys(direct), session.master_rank, op)
            reduced.update(zip(direct, _run(session, "reduce", direct, command)[session.master_rank]))
        rest = without(variables, direct)
        if rest and in_place:
            _submit(session, "reduce", rest, Reduce(session.keys(rest), op, True))
        elif rest:
            results = _run(session, "reduce", rest, Reduce(session.keys(rest), op, False))[session.master_rank]
            reduced.update(zip(rest, map(session.private, results)))
        if not in_place:
            return like(shared_vars, [to_host(reduced[var]) for var in variables])
        for var in direct:
            _graph.set_array(var, reduced[var])
    return None


@checks_keywords
@lists_ops
def all_reduce(
    shared_vars: Variables, op: Reduction = "avg", nccl: bool = True, weights: Sequence[float] | None = None
) -> None:
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

    Examples
    --------
    >>> s = theano.shared(np.zeros(2), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3, 4])
    ...     synk.all_reduce(s)
    ...     print(synk.get_value(1, s))
    [2. 3.]
    """
    session, variables = start("all_reduce", shared_vars)
    op = check_op("all_reduce", op)
    checked = check_weights(session, op, weights)
    with session.lock, session.timeline.call("all_reduce"):
        command = AllReduce(session.keys(variables), op, checked, bool(nccl))
        _submit(session, "all_reduce", variables, command)


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
