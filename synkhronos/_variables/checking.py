"""`check_replicas`: the same variable on all ranks, compared."""

from __future__ import annotations

from typing import Any

from synkhronos._session import current
from synkhronos._variables.replicated import start
from synkhronos.typing import Variables

__all__ = ["check_replicas"]


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
