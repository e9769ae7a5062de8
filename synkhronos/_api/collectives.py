"""Collectives that move the values of shared variables between ranks: broadcast, scatter, gather, all-gather.

Each function takes one shared variable or a list of them. Values that it takes or returns have the same form: one value
for one variable, a list of values for a list of variables. The controller calls it, and it acts on all ranks of the
session, on all nodes. Functions of the session that use a variable and are not yet distributed are distributed first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos import _graph
from synkhronos._api.variables import as_list, check_shapes, like, match, over_nccl, put, start, without
from synkhronos._collectives import nccl_moves
from synkhronos._processes import COLLECTIVES
from synkhronos._rank import AllGather, Get, Nccl
from synkhronos._utils.display import progress
from synkhronos.typing import Variables


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
            elif rest:
                session.stale.add(rest)
                session.update_replicas()
            _graph.note_sent(variables)
        session.replica_check.note_parts(variables, are_parts=False)


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
        session.replica_check.note_parts(variables)


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
