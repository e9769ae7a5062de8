"""Collectives on shared variables: moving the replicas of a variable across ranks.

Every function here takes one shared variable or a list of them, and, where it takes or returns values, one value or a
list to match. A variable must be used by a function of the session; a function that is not yet distributed is
distributed first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos import _graph
from synkhronos._api.variables import as_list, check_shapes, like, match, over_nccl, put, start, without
from synkhronos._collectives import nccl_moves
from synkhronos._processes import COLLECTIVES
from synkhronos._rank import AllGather, Get, Nccl
from synkhronos._utils.display import checks_keywords
from synkhronos._utils.progress import progress
from synkhronos.typing import Variables

__all__ = ["all_gather", "broadcast", "gather", "scatter"]


@checks_keywords
def broadcast(shared_vars: Variables, values: Any = None, nccl: bool = True) -> None:
    """Give every rank the master's value of each variable, or ``values``.

    Parameters
    ----------
    shared_vars : shared variable or list
    values : array_like or Data, or list, optional
        New values, cast as the engine would.
    nccl : bool
        Use NCCL where the variable lives on a CUDA GPU; on CPU cores it changes nothing.

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
        session.sequencer.check_first("broadcast of the master's values")
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


@checks_keywords
def scatter(shared_vars: Variables, values: Any, batch: Any = None) -> None:
    """Split each value along axis 0, as evenly as possible, and give each rank its share as the variable's value.

    Parameters
    ----------
    shared_vars : shared variable or list
    values : array_like or Data, or list
        Shape ``(n, ...)``.
    batch : int, slice, list or array, optional
        Which rows of the values to use, as in a function call.

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
                raise ValueError(f"scatter: {var} is 0-dimensional")
        with progress("scattering"):
            put(session, variables, matched, batch=batch, split=True, given=as_list(shared_vars, values))
        session.replicas.note_parts(variables)


@checks_keywords
def gather(shared_vars: Variables, nd_up: int = 1, nccl: bool = True) -> Any:
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
def all_gather(shared_vars: Variables, nccl: bool = True) -> None:
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
                raise ValueError(f"all_gather: axis 0 of {var} is broadcastable and must keep length 1")
        equal = [var for var, shapes in on_ranks.items() if len(set(shapes)) == 1]
        direct = over_nccl(session, equal, nccl, nccl_moves)
        if direct:
            session.run(Nccl("all_gather", session.keys(direct), session.master_rank))
        rest = without(variables, direct)
        if rest:
            session.run(AllGather(session.keys(rest), tuple(on_ranks[var] for var in rest)))
