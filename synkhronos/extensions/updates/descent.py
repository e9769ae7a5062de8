"""Update rules: gradient descent, without and with momentum, and momentum for the updates of any rule.

For any rule, the velocity is computed from the value u that the rule assigns to a parameter p. For gradient descent,
`momentum` computes the same from the gradient, in fewer operations.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Optional

from synkhronos._backends import reshaped_like
from synkhronos.extensions.updates.flat import (
    Divided,
    FlatGradient,
    Updates,
    gradients,
    number,
    shared_list,
    zeros_like,
)

__all__ = ["apply_momentum", "apply_nesterov_momentum", "momentum", "nesterov_momentum", "sgd", "sgd_nonflat"]


def sgd(loss_or_grads: Any, params: Any, learning_rate: Any) -> Divided:
    """Return the updates of stochastic gradient descent.

    ``p := p - learning_rate * g``

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter, of the parameter's shape and dtype.
    params : iterable of shared variables
        The parameters to train; all of one floating-point dtype.
    learning_rate : float or symbolic scalar
        The step size. If it is a shared variable, change it on every rank: ``synk.broadcast(learning_rate, value)``.

    Returns
    -------
    grad_updates : OrderedDict
        The updates of the gradient function, which write each rank's gradients to ``grad_shared``.
    param_updates : OrderedDict
        The updates of the parameter function, which change the parameters on each rank.
    grad_shared : shared variable, shape ``(n,)``
        The gradients of all n elements of the parameters, one after the other in C order.

    Raises
    ------
    TypeError
        If the parameters differ in dtype, a gradient's dtype differs from its parameter's, or a parameter is not a
        shared variable.
    ValueError
        If ``params`` is empty, or the number of gradients differs from the number of parameters.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.sgd(T.sqr(w).sum(), [w], 0.1)
    >>> [var.name for var in param_updates]
    ['w']
    """
    flat = FlatGradient(loss_or_grads, params)
    rate = number(learning_rate, flat.dtype)
    pieces = flat.pieces(flat.vector)
    updates = OrderedDict((param, param - rate * g) for param, g in zip(flat.params, pieces))
    return flat.updates, updates, flat.vector


def sgd_nonflat(loss_or_grads: Any, params: Any, learning_rate: Any) -> Divided:
    """Return the updates of stochastic gradient descent, with a gradient variable for each parameter.

    ``p := p - learning_rate * g``

    Use it for parameters of several dtypes, or to measure what the flat vector of `sgd` saves.

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter.
    params : iterable of shared variables
        The parameters to train; the dtypes may differ.
    learning_rate : float or symbolic scalar
        The step size. If it is a shared variable, change it on every rank: ``synk.broadcast(learning_rate, value)``.

    Returns
    -------
    grad_updates : OrderedDict
        The updates of the gradient function, which write each rank's gradients to ``grad_shared``.
    param_updates : OrderedDict
        The updates of the parameter function, which change the parameters on each rank.
    grad_shared : list of shared variables
        One for each parameter, of its shape and dtype.

    Raises
    ------
    TypeError
        If a parameter is not a shared variable.
    ValueError
        If ``params`` is empty, or the number of gradients differs from the number of parameters.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.sgd_nonflat(T.sqr(w).sum(), [w], 0.1)
    >>> [var.name for var in param_updates]
    ['w']
    """
    params = shared_list(params)
    grad_shared = [zeros_like(param, "grad_shared") for param in params]
    updates = OrderedDict(
        (param, param - number(learning_rate, param.dtype) * g) for param, g in zip(params, grad_shared)
    )
    return OrderedDict(zip(grad_shared, gradients(loss_or_grads, params))), updates, grad_shared


def momentum(loss_or_grads: Any, params: Any, learning_rate: Any, momentum: Any = 0.9) -> Divided:
    """Return the updates of gradient descent with momentum.

    ``v := momentum * v - learning_rate * g``, ``p := p + v``

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter, of the parameter's shape and dtype.
    params : iterable of shared variables
        The parameters to train; all of one floating-point dtype.
    learning_rate : float or symbolic scalar
        The step size. If it is a shared variable, change it on every rank: ``synk.broadcast(learning_rate, value)``.
    momentum : float or symbolic scalar
        The fraction of the velocity v that is kept, from 0 to 1.

    Returns
    -------
    grad_updates : OrderedDict
        The updates of the gradient function, which write each rank's gradients to ``grad_shared``.
    param_updates : OrderedDict
        The updates of the parameter function, which change the velocity and the parameters on each rank.
    grad_shared : shared variable, shape ``(n,)``
        The gradients of all n elements of the parameters, one after the other in C order.

    Raises
    ------
    TypeError
        If the parameters differ in dtype, a gradient's dtype differs from its parameter's, or a parameter is not a
        shared variable.
    ValueError
        If ``params`` is empty, or the number of gradients differs from the number of parameters.

    References
    ----------
    B. T. Polyak (1964), Some methods of speeding up the convergence of iteration methods, USSR Computational
    Mathematics and Mathematical Physics 4(5).

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.momentum(T.sqr(w).sum(), [w], 0.1)
    >>> [var.name for var in param_updates]
    ['velocity', 'w']
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep = flat.numbers(learning_rate, momentum)
    velocity = flat.zeros("velocity")
    new = keep * velocity - rate * flat.vector
    return flat.divided([(velocity, new)], -new)


def nesterov_momentum(loss_or_grads: Any, params: Any, learning_rate: Any, momentum: Any = 0.9) -> Divided:
    """Return the updates of gradient descent with Nesterov's momentum.

    ``v := momentum * v - learning_rate * g``, ``p := p + momentum * v - learning_rate * g``

    In this form the gradient is that at the present parameters.

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter, of the parameter's shape and dtype.
    params : iterable of shared variables
        The parameters to train; all of one floating-point dtype.
    learning_rate : float or symbolic scalar
        The step size. If it is a shared variable, change it on every rank: ``synk.broadcast(learning_rate, value)``.
    momentum : float or symbolic scalar
        The fraction of the velocity v that is kept, from 0 to 1.

    Returns
    -------
    grad_updates : OrderedDict
        The updates of the gradient function, which write each rank's gradients to ``grad_shared``.
    param_updates : OrderedDict
        The updates of the parameter function, which change the velocity and the parameters on each rank.
    grad_shared : shared variable, shape ``(n,)``
        The gradients of all n elements of the parameters, one after the other in C order.

    Raises
    ------
    TypeError
        If the parameters differ in dtype, a gradient's dtype differs from its parameter's, or a parameter is not a
        shared variable.
    ValueError
        If ``params`` is empty, or the number of gradients differs from the number of parameters.

    References
    ----------
    Y. Nesterov (1983), A method of solving a convex programming problem with convergence rate O(1/k**2), Soviet
    Mathematics Doklady 27.

    Y. Bengio et al. (2012), Advances in optimizing recurrent networks, arXiv:1212.0901, section 3.5.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.nesterov_momentum(T.sqr(w).sum(), [w], 0.1)
    >>> [var.name for var in param_updates]
    ['velocity', 'w']
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep = flat.numbers(learning_rate, momentum)
    velocity = flat.zeros("velocity")
    new = keep * velocity - rate * flat.vector
    updates = OrderedDict([(velocity, new)])
    for param, shape, g, v in zip(flat.params, flat.shapes, flat.pieces(flat.vector), flat.pieces(new)):
        # The two reshapes keep Theano from fusing both loops: the compiler vectorizes a loop over three arrays, but not
        # one over five.
        descended = reshaped_like((param - rate * g).flatten(), shape, param)
        updates[param] = descended + keep * v
    return flat.updates, updates, flat.vector


# -- momentum for any rule


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
