"""Momentum added to the updates of any rule.

As in Lasagne, and in its order of operations: the velocity is computed from the value u that the
rule gives to a parameter p. `momentum` gets the same from the gradient, in fewer steps.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Optional

from synkhronos.extensions.updates.flat import Updates, number, shared_list, zeros_like

__all__ = ["apply_momentum", "apply_nesterov_momentum"]


def apply_momentum(updates: Updates, params: Optional[Any] = None, momentum: Any = 0.9) -> Updates:
    """Add momentum to another rule: ``v := momentum * v + u - p``, ``p := p + v``.

    Parameters
    ----------
    updates : OrderedDict
        The rule's `param_updates`, which give the value u to p; it is not changed.
    params : iterable of shared variables, optional
        Which of its variables get momentum. Left out: all, the rule's own memory among them, as in
        Lasagne.
    momentum : float or symbolic scalar
        The part of the velocity v that is kept.

    Returns
    -------
    OrderedDict
        The updates with momentum, and those of the velocities.

    Raises
    ------
    TypeError
        If one of `params` is not a shared variable.
    ValueError
        If one of `params` is not in `updates`, or there is none.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.sgd(T.sqr(w).sum(), [w], 0.1)
    >>> [var.name for var in updates.apply_momentum(param_updates)]
    ['w', 'velocity']
    """
    result = OrderedDict(updates)
    for param, velocity, new, _ in _velocities(updates, params, momentum):
        result[velocity] = new
        result[param] = param + new
    return result


def apply_nesterov_momentum(updates: Updates, params: Optional[Any] = None, momentum: Any = 0.9) -> Updates:
    """Add Nesterov's momentum to a rule: ``v := momentum * v + u - p``, ``p := momentum * v + u``.

    Parameters, returns and errors as in `apply_momentum`. Sources as in
    `nesterov_momentum`.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.sgd(T.sqr(w).sum(), [w], 0.1)
    >>> [var.name for var in updates.apply_nesterov_momentum(param_updates)]
    ['w', 'velocity']
    """
    result = OrderedDict(updates)
    for param, velocity, new, keep in _velocities(updates, params, momentum):
        result[velocity] = new
        result[param] = keep * new + updates[param]
    return result


def _velocities(updates: Updates, params: Optional[Any], momentum: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Give each parameter, its velocity, the velocity's new value and the part that is kept."""
    for param in shared_list(updates if params is None else params):
        if param not in updates:
            raise ValueError(f"params has {param}, which updates does not change")
        velocity = zeros_like(param, "velocity")
        keep = number(momentum, param.dtype)
        yield param, velocity, keep * velocity + updates[param] - param, keep
