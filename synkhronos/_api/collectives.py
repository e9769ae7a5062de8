"""Collectives that move the values of shared variables between ranks.

Every function takes one shared variable or a list of them. Where it takes or returns values, it takes or returns one
value for one variable, and a list of values for a list of variables. It is called in the controller and acts on all
ranks of the session, those on other nodes included. Functions of the session that are not yet distributed and use a
variable are distributed first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos import _graph
from synkhronos._api.variables import as_list, check_shapes, like, match, over_nccl, put, start, without
from synkhronos._collectives import nccl_moves
from synkhronos._processes import COLLECTIVES
from synkhronos._rank import AllGather, Get, Nccl
from synkhronos._utils.progress import progress
from synkhronos.typing import Variables


def broadcast(shared_vars: Variables, values: Any = None, nccl: bool = True) -> None:
    """Set each variable to the same value on every rank: to ``values``, or to the controller's value.

    Without ``values`` the controller's variables stay as they are, and all other ranks get a copy. With ``values``
    every rank, the controller included, gets a copy. A NumPy value is copied once into shared memory; each rank then
    copies it from there into its own variable. `Data` lies in shared memory already, so the first copy is left out.

    Variables that no function of the session uses yet are given to the ranks first.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables of any dtype and shape.
    values : array_like or Data, or list, optional
        New values, one for each variable, with the variable's number of dimensions. Arrays are cast to the variable's
        dtype where that is safe (`numpy.can_cast`), numbers and lists where no value changes; a Python float is cast to
        any floating dtype. Default: the controller's values.
    nccl : bool
        Use NCCL for variables on CUDA GPUs where the ranks are connected by it, and ``values`` is not given. No effect
        on CPU cores.

    Raises
    ------
    SessionError
        Without a session. Without ``values`` also in a `sequence`, unless it is the first part.
    TypeError
        If an item is not a shared variable that holds an array, or a value does not have its dtype and dimensions.
    ValueError
        If there is no variable, one is named twice, the number of values differs, or a value is not of length 1 along a
        broadcastable axis.
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
            session.replicas.note_parts(variables, are_parts=False)
            return
        session.sequencer.check_first("broadcast of the controller's values")
        direct = over_nccl(session, variables, nccl, nccl_moves)
        if direct:
            shapes = tuple(tuple(_graph.get_array(var).shape) for var in direct)
            session.run(Nccl("broadcast", session.keys(direct), session.master_rank, shapes=shapes))
        rest = without(variables, direct)
        if rest:
            workers = tuple(rank for rank in range(session.n_ranks) if rank != session.master_rank)
            put(session, rest, [_graph.host_array(var) for var in rest], ranks=workers)
        _graph.note_sent(variables)
        session.replicas.note_parts(variables, are_parts=False)


def scatter(shared_vars: Variables, values: Any, batch: Any = None) -> None:
    """Split each value along axis 0, and set the variable on each rank to its shard.

    ``n`` rows are split as evenly as possible, in rank order: the first ``n % n_ranks`` ranks get one row more than the
    others. Ranks get no rows where ``n`` is smaller than the number of ranks. A NumPy value (with an index list as
    ``batch``: its chosen rows) is copied once into shared memory; each rank then copies its own rows. `Data` lies in
    shared memory already, so the first copy is left out.

    Variables that no function of the session uses yet are given to the ranks first. Until a collective makes them
    equal again, scattered variables are left out of `check_replicas` without arguments.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables with one dimension at least, of any dtype.
    values : array_like or Data, or list
        One for each variable, of shape ``(n, ...)``. Cast as by `broadcast`.
    batch : int, slice, or list / 1-d array of integers or booleans, optional
        The rows of each value to use, as in a function call: the first ``batch`` rows, a range, or an index list.
        Default: all.

    Raises
    ------
    SessionError
        Without a session.
    TypeError
        If an item is not a shared variable that holds an array, or a value does not have its dtype and dimensions, or
        ``batch`` is of another type.
    ValueError
        If a variable is 0-dimensional or its axis 0 is broadcastable and ranks would not have one row each; or as
        `broadcast`.
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
        session.replicas.note_parts(variables)


def gather(shared_vars: Variables, nd_up: int = 1, nccl: bool = True) -> Any:
    """Return all ranks' values of each variable in the controller, in rank order; no variable changes.

    Each rank's value is read where it lies, or copied to shared memory first; the result is a new array.

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
        For a variable of shape ``(n_k, ...)`` on rank k: with ``nd_up=1`` shape ``(n_ranks, n, ...)``, with ``nd_up=0``
        shape ``(sum of n_k, ...)``. Of the variable's dtype.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        If the shapes do not allow it, ``nd_up`` is neither 0 nor 1, or no function of the session uses a variable.
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
        Tensor variables that a function of the session uses, of shape ``(n_k, ...)`` on rank k; afterwards of shape
        ``(sum of n_k, ...)`` on every rank. The dtype does not change.
    nccl : bool
        Use NCCL for variables on CUDA GPUs that have equal shapes on all ranks, where the ranks are connected by it. No
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
        session.replicas.note_parts(variables, are_parts=False)
