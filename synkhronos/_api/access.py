"""Read, write and compare the values that shared variables have on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos._api.variables import as_list, check_rank, like, match, put, start
from synkhronos._processes import TRANSFERS
from synkhronos._rank import Get
from synkhronos._session import current
from synkhronos.typing import Variables


def check_replicas(shared_vars: Variables | None = None) -> dict[Any, float]:
    """Compare shared variables between ranks, and return those that differ; no variable changes.

    Each rank computes a digest of each value (BLAKE2b of 128 bits, RFC 7693). If the digests of a variable differ, its
    values are sent to the controller and compared there.

    Parameters
    ----------
    shared_vars : shared variable or list, optional
        Tensor variables that a function of the session uses. Default: all variables that should be equal on all ranks.
        These are the variables that functions use, except for states of random streams, ``sliceable_shareds``, and
        variables that were scattered and that no `broadcast`, `all_reduce` or `all_gather` has made equal again.
        Functions that are not yet distributed are distributed first.

    Returns
    -------
    dict
        For each variable that differs, a float: the largest absolute difference of an element from the controller's
        value. It is infinite if shapes differ, or if only one of the two elements is NaN. The dictionary is empty if
        all replicas are equal. 0.0 equals -0.0, and NaN equals NaN.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        If the list is empty or has a variable twice, or if no function of the session uses a variable.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(2), "s")
    >>> with synk.session(2):
    ...     synk.broadcast(s, [1, 2])
    ...     synk.set_value(1, s, [1, 5])
    ...     print(synk.check_replicas(s)[s])
    3.0
    """
    if shared_vars is None:
        session = current("check_replicas")
        session.distribute()
        variables = None
    else:
        session, variables = start("check_replicas", shared_vars)
    with session.lock, session.timeline.call("check_replicas"):
        return session.replica_check.compare(session.replica_check.all() if variables is None else variables)


def set_value(rank: int, shared_vars: Variables, values: Any, batch: Any = None) -> None:
    """Set each variable on one rank; the other ranks keep their values.

    A variable's own ``set_value`` sets it on the controller only; this function sets it on any rank. A NumPy value is
    copied into shared memory, and from there into the rank's variable. Variables that no function of the session uses
    yet are distributed to the ranks first.

    Parameters
    ----------
    rank : int
        From 0 to the number of ranks minus 1.
    shared_vars : shared variable or list
        Tensor variables of any dtype and shape.
    values : array_like or Data, or list
        One value for each variable, with the variable's number of dimensions; cast as by `broadcast`.
    batch : int, slice, or list / 1-d array of integers or booleans, optional
        The rows of each value to use: the first ``batch`` rows, a range, or an index list. Default: all.

    Raises
    ------
    SessionError
        Without a session.
    TypeError
        If ``rank`` is not an int, an item is not a shared variable that holds an array, a value does not have the
        variable's dtype or number of dimensions, or ``batch`` is of another type.
    ValueError
        If there is no such rank, the number of values differs from the number of variables, ``batch`` is given for a
        0-dimensional value, or a value does not have length 1 along a broadcastable axis.
    IndexError
        If ``batch`` is out of range.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.broadcast(s, [0])
    ...     synk.set_value(1, s, [5])
    ...     print(synk.gather(s, nd_up=0))
    [0. 5.]
    """
    session, variables = start("set_value", shared_vars, to_set=True)
    with session.lock, session.timeline.call("set_value"):
        matched, given = match(shared_vars, variables, values), as_list(shared_vars, values)
        put(session, variables, matched, ranks=(check_rank(session, rank),), batch=batch, given=given)


def get_value(rank: int, shared_vars: Variables) -> Any:
    """Return a copy of one rank's value of each variable; no variable changes.

    Parameters
    ----------
    rank : int
        From 0 to the number of ranks minus 1.
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses.

    Returns
    -------
    numpy.ndarray, or list of numpy.ndarray
        A new array in the controller's memory, with the variable's dtype and its shape on that rank.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If ``rank`` is not an int, or an item is not a shared variable that holds an array.
    ValueError
        If there is no such rank, or no function of the session uses a variable.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     print(synk.get_value(1, s))
    [3.]
    """
    session, variables = start("get_value", shared_vars)
    rank = check_rank(session, rank)
    with session.lock, session.timeline.call("get_value"):
        values = session.run(Get(session.keys(variables), ranks=(rank,)))[rank]
        session.timeline.switch(TRANSFERS)
        return like(shared_vars, [np.array(value) for value in values])


def get_shapes(shared_vars: Variables) -> list[Any]:
    """Return the shape of each variable on each rank.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses.

    Returns
    -------
    list of tuple of int
        One shape for each rank, in rank order; for a list of variables, a list of such lists.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        If no function of the session uses a variable.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     print(synk.get_shapes(s))
    [(2,), (1,)]
    """
    session, variables = start("get_shapes", shared_vars)
    return like(shared_vars, [list(shapes) for shapes in zip(*session.shapes(variables))])


def get_lengths(shared_vars: Variables) -> list[Any]:
    """Return the length of axis 0 of each variable on each rank.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses, with at least one dimension.

    Returns
    -------
    list of int
        One length for each rank, in rank order; for a list of variables, a list of such lists.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        For a 0-dimensional variable, or if no function of the session uses a variable.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     print(synk.get_lengths(s))
    [2, 1]
    """
    session, variables = start("get_lengths", shared_vars)
    for var in variables:
        if var.ndim == 0:
            raise ValueError(f"get_lengths: {var} is 0-dimensional; expected at least one dimension")
    return like(shared_vars, [[shape[0] for shape in shapes] for shapes in zip(*session.shapes(variables))])
