"""Collectives that reduce the values of shared variables over ranks: reduce and all-reduce."""

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
from synkhronos.errors import WorkerError
from synkhronos.typing import Reduction, Variables


@lists_ops
def reduce(shared_vars: Variables, op: Reduction = "avg", in_place: bool = True, nccl: bool = True) -> Any:
    """Reduce all ranks' values of each variable to the controller, element by element.

    Values are reduced in rank order. On several nodes, each node reduces its values first, and then the nodes' results
    are reduced in node order. ``"avg"`` is ``sum(x_k) / n_ranks``: all ranks have the same weight. Averages, sums and
    products of half precision are computed in single precision and rounded once. Variables on ranks other than the
    controller do not change.

    Large arrays in shared memory are reduced in place, each rank reducing a part of the elements. Other arrays are
    copied through buffers in shared memory.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses, of the same shape on all ranks.
    op : str
        {ops}.
    in_place : bool
        ``True``: set the controller's variable to the result, in the variable's dtype; averages of integers are rounded
        to the nearest integer. ``False``: return the result, and change no variable.
    nccl : bool
        Use NCCL for variables on CUDA GPUs, if the ranks are connected by NCCL and it supports the dtype and ``op``.
        NCCL sums in its own order. No effect on CPU cores.

    Returns
    -------
    None, numpy.ndarray, or list of numpy.ndarray
        ``None`` if ``in_place``. Otherwise new arrays of the variables' shapes, with the dtypes of NumPy's reductions:
        float64 for averages of integers and booleans, that of `numpy.sum` for their sums and products, and the
        variable's dtype in all other cases.

    Raises
    ------
    SessionError
        Without a session. With ``in_place=False`` also in a `sequence`, unless it is the first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        If the op is unknown, the shapes differ between ranks, or no function of the session uses a variable. No
        variable changes then.
    WorkerError
        If a rank fails.

    See Also
    --------
    all_reduce : Give every rank the result.

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
            reduced.update(zip(rest, session.private(results)))
        if not in_place:
            return like(shared_vars, [to_host(reduced[var]) for var in variables])
        for var in direct:
            _graph.set_array(var, reduced[var])
    return None


@lists_ops
def all_reduce(
    shared_vars: Variables, op: Reduction = "avg", nccl: bool = True, weights: Sequence[float] | None = None
) -> None:
    """Reduce all ranks' values of each variable, and set the variable to the result on every rank.

    The result is bitwise equal on all ranks. Values are reduced element by element in rank order. On several nodes,
    each node reduces its values first, and then the nodes' results are reduced in node order.

    Large arrays in shared memory are reduced in place: each rank reduces a part of the elements and writes the result
    to all ranks. This is a reduce-scatter followed by an all-gather (R. Thakur, R. Rabenseifner, W. Gropp (2005),
    Optimization of collective communication operations in MPICH, IJHPCA 19(1)). Other arrays are copied to buffers in
    shared memory, from which each rank reduces all elements.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses, of the same shape on all ranks.
    op : str
        {ops}. The dtype does not change: averages of integers are rounded to the nearest integer. Averages, sums and
        products of half precision are computed in single precision and rounded once.
    nccl : bool
        Use NCCL for variables on CUDA GPUs, if the ranks are connected by NCCL and it supports the dtype and ``op``.
        NCCL sums in its own order. No effect on CPU cores.
    weights : sequence of float, optional
        For ``"avg"``: one weight ``w_k`` for each rank, so that the result is ``sum(w_k * x_k) / sum(w_k)``. A rank
        with weight 0 is left out, so that its NaNs have no effect. With ``weights=f.counts``, averaging the ranks'
        means over data points gives the mean over all data points. Default: equal weights.

    Raises
    ------
    SessionError
        Without a session.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        If a variable's shape is not the same on all ranks, no function of the session uses it, or the op is unknown.
        Also if ``weights`` is given with another op, does not have one number for each rank, or has numbers that are
        negative, not finite, or all 0. No variable changes then.
    WorkerError
        If a rank fails.

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
        session.replica_check.note_parts(variables, are_parts=False)


def _run(session: Session, function: str, variables: Sequence[Any], command: Command) -> list[Any]:
    """Run a command that needs equal shapes on all ranks; if they differ, raise an error that names the variable."""
    try:
        return session.run(command)
    except WorkerError:
        _explain(session, function, variables)
        raise


def _submit(session: Session, function: str, variables: Sequence[Any], command: Command) -> None:
    """Run a command that returns nothing, or record it in a sequence; explain failures as `_run` does."""
    session.sequencer.keep(variables)
    session.submit(command, no_value, functools.partial(_explain, session, function, variables))


def _explain(session: Session, function: str, variables: Sequence[Any]) -> None:
    """Raise `ValueError` for a variable whose shapes differ between ranks, if there is one."""
    every = list(zip(*session.shapes(variables)))
    try:
        for var, shapes in zip(variables, every):
            check_shapes(function, var, shapes)
    except ValueError as error:
        raise error from None
