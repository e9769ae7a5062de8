"""Collectives on the values of shared variables: broadcast, scatter, gather, all-gather, reduce, all-reduce.

Broadcast, scatter, gather and all-gather move values between ranks. Reduce and all-reduce combine the ranks' values.

Each function takes one shared variable or a list of them. Values that it takes or returns have the same form: one value
for one variable, a list of values for a list of variables. The controller calls it, and it acts on all ranks of the
session, on all nodes. Functions of the session that use a variable and are not yet distributed are distributed first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _graph
from synkhronos._api.variables import (
    as_list,
    check_shapes,
    check_weights,
    like,
    match,
    no_value,
    over_nccl,
    put,
    start,
    without,
)
from synkhronos._backends import to_host
from synkhronos._collectives import check_op, lists_ops, nccl_moves, nccl_reduces
from synkhronos._processes import COLLECTIVES
from synkhronos._rank import AllGather, AllReduce, Command, Get, Nccl, Reduce
from synkhronos._session import Session
from synkhronos._utils.display import progress
from synkhronos.errors import WorkerError
from synkhronos.typing import Reduction, Variables


def broadcast(shared_vars: Variables, values: Any = None, nccl: bool = True) -> None:
    """Set each variable to the same value on every rank: to ``values``, or to the controller's value.

    Without ``values``, all other ranks get a copy of the controller's value, which does not change. With ``values``,
    every rank gets a copy, the controller included. A NumPy value is copied once into shared memory; each rank then
    copies it from there into its own variable. `Data` is in shared memory already, so the first copy is not made.

    Variables that no function of the session uses yet are distributed to the ranks first.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables of any dtype and shape.
    values : array_like or Data, or list, optional
        New values, one for each variable, with the variable's number of dimensions. An array is cast to the variable's
        dtype if that is safe (`numpy.can_cast`). Numbers and lists are cast if no value changes; a Python float is cast
        to any floating dtype. `Data` must have the variable's dtype. Default: the controller's values.
    nccl : bool
        Use NCCL for variables on CUDA GPUs, if the ranks are connected by NCCL and ``values`` is not given. No effect
        on CPU cores.

    Raises
    ------
    SessionError
        Without a session. Without ``values`` also in a `sequence`, unless it is the first part.
    TypeError
        If an item is not a shared variable that holds an array, or a value does not have the variable's dtype or number
        of dimensions.
    ValueError
        If the list is empty or has a variable twice, the number of values differs from the number of variables, or a
        value does not have length 1 along a broadcastable axis.
    WorkerError
        If a rank fails.

    See Also
    --------
    scatter : Give each rank its own rows.
    set_value : Set the value of one rank.

    Examples
    --------
    >>> s = theano.shared(np.zeros(2), "s")
    >>> with synk.session(2):
    ...     synk.broadcast(s, [1, 2])
    ...     print(synk.get_value(1, s))
    [1. 2.]
    """
    session, variables = start("broadcast", shared_vars, to_set=True)
    with session.lock, session.timeline.call("broadcast"):
        if values is not None:
            put(session, variables, match(shared_vars, variables, values))
        else:
            session.sequencer.check_first("broadcast of the controller's values")
            direct = over_nccl(session, variables, nccl, nccl_moves)
            if direct:
                shapes = tuple(tuple(_graph.get_array(var).shape) for var in direct)
                session.run(Nccl("broadcast", session.keys(direct), session.master_rank, shapes=shapes))
            rest = without(variables, direct)
            if rest and session.sequencer.place:  # not as below: if the block raises, the ranks keep their values
                workers = tuple(rank for rank in range(session.n_ranks) if rank != session.master_rank)
                put(session, rest, [_graph.host_array(var) for var in rest], ranks=workers)
                session.sequencer.note(lambda: session.stale.note_sent(rest))
            elif rest:
                session.stale.add(rest)
                session.update_replicas()
            _graph.note_sent(direct)
            session.replica_check.note_parts(direct, are_parts=False)
            variables = rest
        _note_equal(session, variables)


def scatter(shared_vars: Variables, values: Any, batch: Any = None) -> None:
    """Split each value along axis 0, and set the variable on each rank to its shard.

    ``n`` rows are split as evenly as possible, in rank order: the first ``n % n_ranks`` ranks get one row more than the
    others. If ``n`` is smaller than the number of ranks, the last ranks get no rows. A NumPy value is copied once into
    shared memory; each rank then copies its own rows from there. `Data` is in shared memory already, so the first copy
    is not made.

    Variables that no function of the session uses yet are distributed to the ranks first. `check_replicas` without
    arguments skips scattered variables until a collective makes them equal again.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables with at least one dimension, of any dtype.
    values : array_like or Data, or list
        One value for each variable, of shape ``(n, ...)``; cast as by `broadcast`.
    batch : int, slice, or list / 1-d array of integers or booleans, optional
        The rows of each value to use, as in a function call: the first ``batch`` rows, a range, or an index list.
        Default: all.

    Raises
    ------
    SessionError
        Without a session.
    TypeError
        If an item is not a shared variable that holds an array, a value does not have the variable's dtype or number of
        dimensions, or ``batch`` is of another type.
    ValueError
        If a variable is 0-dimensional or broadcastable along axis 0; or as `broadcast`.
    IndexError
        If ``batch`` is out of range.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     print(synk.get_value(0, s), synk.get_value(1, s))
    [1. 2.] [3.]
    """
    session, variables = start("scatter", shared_vars, to_set=True)
    with session.lock, session.timeline.call("scatter"):
        matched = match(shared_vars, variables, values)
        for var in variables:
            if var.ndim == 0:
                raise ValueError(f"scatter: {var} is 0-dimensional; expected at least one dimension")
        with progress("scattering"):
            put(session, variables, matched, batch=batch, split=True, given=as_list(shared_vars, values))
        session.sequencer.note(lambda: session.replica_check.note_parts(variables))


def gather(shared_vars: Variables, nd_up: int = 1, nccl: bool = True) -> Any:
    """Return all ranks' values of each variable to the controller, in rank order; no variable changes.

    The controller reads each rank's value in shared memory. A value that is not there is copied to it first. The result
    is a new array.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses.
    nd_up : int
        1: stack values of equal shapes along a new axis 0. 0: concatenate values along axis 0; their lengths may
        differ.
    nccl : bool
        No effect: accepted for programs written for the release of 2017. Values are gathered through host memory.

    Returns
    -------
    numpy.ndarray, or list of numpy.ndarray
        Arrays of the variables' dtypes. For a variable of shape ``(n_k, ...)`` on rank k, the shape is
        ``(n_ranks, n, ...)`` with ``nd_up=1`` (all ``n_k`` equal ``n``), and ``(sum of n_k, ...)`` with ``nd_up=0``.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        If the shapes on the ranks cannot be stacked or concatenated, ``nd_up`` is neither 0 nor 1, or no function of
        the session uses a variable.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     print(synk.gather(s, nd_up=0))
    [1. 2. 3.]
    """
    session, variables = start("gather", shared_vars)
    if isinstance(nd_up, bool) or nd_up not in (0, 1):
        raise ValueError(f"nd_up is {nd_up!r}; expected 1 (stack) or 0 (concatenate)")
    with session.lock, session.timeline.call("gather"):
        results = session.run(Get(session.keys(variables)))
        session.timeline.switch(COLLECTIVES)
        gathered = []
        for var, values in zip(variables, zip(*results)):
            check_shapes("gather", var, [value.shape for value in values], concatenate=nd_up == 0)
            gathered.append(np.concatenate(values) if nd_up == 0 else np.stack(values))
    return like(shared_vars, gathered)


def all_gather(shared_vars: Variables, nccl: bool = True) -> None:
    """Set each variable on every rank to the concatenation of all ranks' values, along axis 0 in rank order.

    Each rank gets a new array of its own, which it copies from the other ranks' shared memory.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses, of shape ``(n_k, ...)`` on rank k. Their new shape is
        ``(sum of n_k, ...)`` on every rank. The dtype does not change.
    nccl : bool
        Use NCCL for variables on CUDA GPUs that have equal shapes on all ranks, if the ranks are connected by NCCL. No
        effect on CPU cores.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        If the shapes differ beyond axis 0, or a variable is 0-dimensional or broadcastable along axis 0, or no function
        of the session uses it. Then nothing changes.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     synk.all_gather(s)
    ...     print(synk.get_value(1, s))
    [1. 2. 3.]
    """
    session, variables = start("all_gather", shared_vars)
    with session.lock, session.timeline.call("all_gather"):
        on_ranks = dict(zip(variables, zip(*session.shapes(variables))))
        for var, shapes in on_ranks.items():
            check_shapes("all_gather", var, shapes, concatenate=True)
            if var.broadcastable[0]:
                raise ValueError(f"all_gather: axis 0 of {var} is broadcastable; expected an axis of any length")
        equal = [var for var, shapes in on_ranks.items() if len(set(shapes)) == 1]
        direct = over_nccl(session, equal, nccl, nccl_moves)
        if direct:
            session.run(Nccl("all_gather", session.keys(direct), session.master_rank))
        rest = without(variables, direct)
        if rest:
            session.run(AllGather(session.keys(rest), tuple(on_ranks[var] for var in rest)))
        session.replica_check.note_parts(variables, are_parts=False)


# -- reductions


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
        _note_equal(session, variables)


def _note_equal(session: Session, variables: Sequence[Any]) -> None:
    """Record that variables are equal on all ranks, unless the open sequence, if there is one, does not succeed."""
    if session.replica_check.differs(variables):
        session.sequencer.note(lambda: session.replica_check.note_parts(variables, are_parts=False))


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
