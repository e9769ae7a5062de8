"""Gradient descent, and gradient descent with momentum."""

from collections import OrderedDict
from typing import Any

from synkhronos._backends import reshaped_like
from synkhronos.extensions.updates.flat import Divided, FlatGradient, gradients, number, shared_list, zeros_like

__all__ = ["momentum", "nesterov_momentum", "sgd", "sgd_nonflat"]


def sgd(loss_or_grads: Any, params: Any, learning_rate: Any) -> Divided:
    """Stochastic gradient descent: ``p := p - learning_rate * g``.

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter.
    params : iterable of shared variables
        What to train; all of one dtype.
    learning_rate : float or symbolic scalar
        A shared variable must be changed on every rank: ``synk.broadcast(learning_rate, value)``.

    Returns
    -------
    grad_updates, param_updates : OrderedDict
        The updates of the gradient function and of the parameter function.
    grad_shared : shared variable, shape ``(n,)``
        The gradients of all parameters, one after the other in C order.

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
    """Stochastic gradient descent with a gradient variable for each parameter.

    For parameters of several dtypes, and to measure what the flat vector gains.

    Parameters
    ----------
    loss_or_grads, params, learning_rate
        As in `sgd`; here the dtypes may differ.

    Returns
    -------
    grad_updates, param_updates : OrderedDict
        As in `sgd`.
    grad_shared : list of shared variables
        One for each parameter, with its shape and dtype.

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
    """Gradient descent with momentum: ``v := momentum * v - learning_rate * g``, ``p := p + v``.

    Parameters and returns as in `sgd`, and `momentum`, the part of the velocity v that is kept.
    Source: B. T. Polyak (1964), Some methods of speeding up the convergence of iteration methods,
    USSR Computational Mathematics and Mathematical Physics 4(5).

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
    return flat.updates, OrderedDict([(velocity, new), *flat.descend(-new).items()]), flat.vector


def nesterov_momentum(loss_or_grads: Any, params: Any, learning_rate: Any, momentum: Any = 0.9) -> Divided:
    """Gradient descent with Nesterov's momentum, evaluated at the present parameters.

    ``v := momentum * v - learning_rate * g``, ``p := p + momentum * v - learning_rate * g``.
    Parameters and returns as in `momentum`.
    Sources: Y. Nesterov (1983), Soviet Mathematics Doklady 27; Y. Bengio et al. (2012), Advances in
    optimizing recurrent networks, arXiv:1212.0901, section 3.5.

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
        # A loop over three arrays becomes vector code, one over five does not: two reshapes keep
        # Theano from making one loop of two.
        descended = reshaped_like((param - rate * g).flatten(), shape, param)
        updates[param] = descended + keep * v
    return flat.updates, updates, flat.vector
