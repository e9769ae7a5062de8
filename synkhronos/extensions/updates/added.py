"""Add momentum to the updates of any rule.

Formulas and order of operations are those of Lasagne. The velocity is computed from the value u that the rule assigns
to a parameter p. For gradient descent, `momentum` computes the same from the gradient, in fewer operations.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Optional

from synkhronos.extensions.updates.flat import Updates, number, shared_list, zeros_like

__all__ = ["apply_momentum", "apply_nesterov_momentum"]


def apply_momentum(updates: Updates, params: Optional[Any] = None, momentum: Any = 0.9) -> Updates:
    """Add momentum to the updates of a rule.

    ``v := momentum * v + u - p``, ``p := p + v``

    Parameters
    ----------
    updates : OrderedDict
        The rule's ``param_updates``, which assign the value u to p; not modified.
    params : iterable of shared variables, optional
        The variables that get momentum. Default: all, including the rule's state, as in Lasagne.
    momentum : float or symbolic scalar
        The fraction of the velocity v that is kept, from 0 to 1.

    Returns
    -------
    OrderedDict
        The updates with momentum, and the updates of the velocities, which have the parameters' shapes and dtypes.

    Raises
    ------
    TypeError
        If one of ``params`` is not a shared variable.
    ValueError
        If ``params`` is empty, or one of them is not in ``updates``.

    References
    ----------
    B. T. Polyak (1964), Some methods of speeding up the convergence of iteration methods, USSR Computational
    Mathematics and Mathematical Physics 4(5).

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
    """Add Nesterov's momentum to the updates of a rule.

    ``v := momentum * v + u - p``, ``p := momentum * v + u``

    Parameters
    ----------
    updates : OrderedDict
        The rule's ``param_updates``, which assign the value u to p; not modified.
    params : iterable of shared variables, optional
        The variables that get momentum. Default: all, including the rule's state, as in Lasagne.
    momentum : float or symbolic scalar
        The fraction of the velocity v that is kept, from 0 to 1.

    Returns
    -------
    OrderedDict
        The updates with momentum, and the updates of the velocities, which have the parameters' shapes and dtypes.

    Raises
    ------
    TypeError
        If one of ``params`` is not a shared variable.
    ValueError
        If ``params`` is empty, or one of them is not in ``updates``.

    References
    ----------
    Y. Nesterov (1983), A method of solving a convex programming problem with convergence rate O(1/k**2), Soviet
    Mathematics Doklady 27.

    Y. Bengio et al. (2012), Advances in optimizing recurrent networks, arXiv:1212.0901, section 3.5.

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
    """Yield each parameter with its velocity, the velocity's new value, and the fraction that is kept."""
    for param in shared_list(updates if params is None else params):
        if param not in updates:
            raise ValueError(f"params has {param}, which is not in updates; name variables that updates changes")
        velocity = zeros_like(param, "velocity")
        keep = number(momentum, param.dtype)
        yield param, velocity, keep * velocity + updates[param] - param, keep
