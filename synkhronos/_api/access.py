"""`check_replicas`: the same variable on all ranks, compared.

One rank at a time: reading, writing and measuring the replicas of shared variables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos._api.variables import as_list, check_rank, like, match, put, start
from synkhronos._processes import TRANSFERS
from synkhronos._rank import Get
from synkhronos._session import current
from synkhronos._utils.display import checks_keywords
from synkhronos.typing import Variables

__all__ = ["check_replicas", "get_lengths", "get_shapes", "get_value", "set_value"]


def check_replicas(shared_vars: Variables | None = None) -> dict[Any, float]:
    """Which shared variables differ between ranks, and by how much; nothing changes.

    Each rank computes a digest of each value; the values themselves travel only where digests differ.

    Parameters
    ----------
    shared_vars : shared variable or list, optional
        Default: all that ought to be equal, which are those that functions use but for the states of random streams,
        ``sliceable_shareds``, and what was scattered and not broadcast since.

    Returns
    -------
    dict
        By variable, the largest absolute difference of any element from the master's value: infinite where shapes
        differ, or one of the two is NaN. Empty if all replicas are equal.

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
        return session.replicas.compare(session.replicas.all() if variables is None else variables)


@checks_keywords
def set_value(rank: int, shared_vars: Variables, values: Any, batch: Any = None) -> None:
    """Set one rank's copy of each variable.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable or list
    values : array_like or Data, or list
    batch : int, slice, list or array, optional
        Which rows of the values to use.

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


@checks_keywords
def get_value(rank: int, shared_vars: Variables) -> Any:
    """One rank's value of each variable, copied.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable or list

    Returns
    -------
    array, or list of array

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


@checks_keywords
def get_shapes(shared_vars: Variables) -> list[Any]:
    """The shape of each variable on each rank.

    Parameters
    ----------
    shared_vars : shared variable or list

    Returns
    -------
    list
        One shape for each rank; for a list of variables, a list of these.

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


@checks_keywords
def get_lengths(shared_vars: Variables) -> list[Any]:
    """The length of axis 0 of each variable on each rank.

    Parameters
    ----------
    shared_vars : shared variable or list

    Returns
    -------
    list
        One length for each rank; for a list of variables, a list of these.

    Raises
    ------
    ValueError
        For a 0-dimensional variable.

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
            raise ValueError(f"get_lengths: {var} is 0-dimensional")
    return like(shared_vars, [[shape[0] for shape in shapes] for shapes in zip(*session.shapes(variables))])
