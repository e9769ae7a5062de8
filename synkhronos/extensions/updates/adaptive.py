"""Update rules that adapt the step of each parameter to its past gradients."""

from collections import OrderedDict
from typing import Any

import numpy as np

from synkhronos._backends import T, config, shared
from synkhronos.extensions.updates.flat import Divided, FlatGradient, Updates, number

__all__ = ["adadelta", "adagrad", "adam", "adamax", "rmsprop"]


def adagrad(loss_or_grads: Any, params: Any, learning_rate: Any = 1.0, epsilon: Any = 1e-6) -> Divided:
    """Return the updates of Adagrad: divide steps by the root of the sum of all squared gradients.

    ``a := a + g**2``, ``p := p - learning_rate * g / sqrt(a + epsilon)``

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter, of the parameter's shape and dtype.
    params : iterable of shared variables
        The parameters to train; all of one floating-point dtype.
    learning_rate : float or symbolic scalar
        The step size. If it is a shared variable, change it on every rank: ``synk.broadcast(learning_rate, value)``.
    epsilon : float or symbolic scalar
        A small number that keeps the quotient finite.

    Returns
    -------
    grad_updates : OrderedDict
        The updates of the gradient function, which write each rank's gradients to ``grad_shared``.
    param_updates : OrderedDict
        The updates of the parameter function, which change the sums and the parameters on each rank.
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
    J. Duchi, E. Hazan, Y. Singer (2011), Adaptive subgradient methods for online learning and stochastic optimization,
    JMLR 12.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.adagrad(T.sqr(w).sum(), [w])
    >>> [var.name for var in param_updates]
    ['squares', 'w']
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, eps = flat.numbers(learning_rate, epsilon)
    squares = flat.zeros("squares")
    new = squares + flat.vector**2
    return flat.divided([(squares, new)], rate * flat.vector / T.sqrt(new + eps))


def rmsprop(loss_or_grads: Any, params: Any, learning_rate: Any = 1.0, rho: Any = 0.9, epsilon: Any = 1e-6) -> Divided:
    """Return the updates of RMSProp: divide steps by a moving root mean square of the gradients.

    ``a := rho * a + (1 - rho) * g**2``, ``p := p - learning_rate * g / sqrt(a + epsilon)``

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter, of the parameter's shape and dtype.
    params : iterable of shared variables
        The parameters to train; all of one floating-point dtype.
    learning_rate : float or symbolic scalar
        The step size. If it is a shared variable, change it on every rank: ``synk.broadcast(learning_rate, value)``.
    rho : float or symbolic scalar
        The fraction of the mean square a that is kept, from 0 to 1.
    epsilon : float or symbolic scalar
        A small number that keeps the quotient finite.

    Returns
    -------
    grad_updates : OrderedDict
        The updates of the gradient function, which write each rank's gradients to ``grad_shared``.
    param_updates : OrderedDict
        The updates of the parameter function, which change the mean squares and the parameters on each rank.
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
    T. Tieleman, G. Hinton (2012), Neural networks for machine learning, lecture 6.5, Coursera.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.rmsprop(T.sqr(w).sum(), [w])
    >>> [var.name for var in param_updates]
    ['squares', 'w']
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep, add, eps = flat.numbers(learning_rate, rho, 1 - rho, epsilon)
    squares = flat.zeros("squares")
    new = keep * squares + add * flat.vector**2
    return flat.divided([(squares, new)], rate * flat.vector / T.sqrt(new + eps))


def adadelta(
    loss_or_grads: Any, params: Any, learning_rate: Any = 1.0, rho: Any = 0.95, epsilon: Any = 1e-6
) -> Divided:
    """Return the updates of Adadelta: scale steps by the ratio of moving root mean squares of steps and gradients.

    ``a := rho * a + (1 - rho) * g**2``, ``s := g * sqrt(d + epsilon) / sqrt(a + epsilon)``,
    ``d := rho * d + (1 - rho) * s**2``, ``p := p - learning_rate * s``

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter, of the parameter's shape and dtype.
    params : iterable of shared variables
        The parameters to train; all of one floating-point dtype.
    learning_rate : float or symbolic scalar
        The factor of all steps; 1 in the paper. If it is a shared variable, change it on every rank:
        ``synk.broadcast(learning_rate, value)``.
    rho : float or symbolic scalar
        The fraction of the mean squares a and d that is kept, from 0 to 1.
    epsilon : float or symbolic scalar
        A small number that keeps the quotient finite.

    Returns
    -------
    grad_updates : OrderedDict
        The updates of the gradient function, which write each rank's gradients to ``grad_shared``.
    param_updates : OrderedDict
        The updates of the parameter function, which change the mean squares and the parameters on each rank.
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
    M. D. Zeiler (2012), ADADELTA: an adaptive learning rate method, arXiv:1212.5701.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.adadelta(T.sqr(w).sum(), [w])
    >>> [var.name for var in param_updates]
    ['squares', 'step_squares', 'w']
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep, add, eps = flat.numbers(learning_rate, rho, 1 - rho, epsilon)
    squares, step_squares = flat.zeros("squares"), flat.zeros("step_squares")
    new = keep * squares + add * flat.vector**2
    step = flat.vector * T.sqrt(step_squares + eps) / T.sqrt(new + eps)
    return flat.divided([(squares, new), (step_squares, keep * step_squares + add * step**2)], rate * step)


def adam(
    loss_or_grads: Any,
    params: Any,
    learning_rate: Any = 0.001,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
) -> Divided:
    """Return the updates of Adam: use moving first and second moments of the gradients, corrected for their start at 0.

    ``t := t + 1``, ``m := beta1 * m + (1 - beta1) * g``, ``v := beta2 * v + (1 - beta2) * g**2``,
    ``p := p - learning_rate * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)``

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter, of the parameter's shape and dtype.
    params : iterable of shared variables
        The parameters to train; all of one floating-point dtype.
    learning_rate : float or symbolic scalar
        The step size. If it is a shared variable, change it on every rank: ``synk.broadcast(learning_rate, value)``.
    beta1 : float or symbolic scalar
        The fraction of the first moment m that is kept, from 0 to 1.
    beta2 : float or symbolic scalar
        The fraction of the second moment v that is kept, from 0 to 1.
    epsilon : float or symbolic scalar
        A small number that keeps the quotient finite.

    Returns
    -------
    grad_updates : OrderedDict
        The updates of the gradient function, which write each rank's gradients to ``grad_shared``.
    param_updates : OrderedDict
        The updates of the parameter function, which change the step number, the moments and the parameters on each
        rank.
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
    D. P. Kingma, J. Ba (2014), Adam: a method for stochastic optimization, arXiv:1412.6980; the efficient form at the
    end of section 2.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.adam(T.sqr(w).sum(), [w])
    >>> [var.name for var in param_updates]
    ['steps', 'first_moment', 'second_moment', 'w']
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep, add, eps = flat.numbers(learning_rate, beta2, 1 - beta2, epsilon)
    updates, t, m = _first_moment(flat, beta1)
    second = flat.zeros("second_moment")
    updates[second] = v = keep * second + add * flat.vector**2
    scale = rate * T.sqrt(1 - keep**t) / (1 - number(beta1, flat.dtype) ** t)
    return flat.divided(updates, scale * m / (T.sqrt(v) + eps))


def adamax(
    loss_or_grads: Any,
    params: Any,
    learning_rate: Any = 0.002,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
) -> Divided:
    """Return the updates of Adamax: Adam with the infinity norm in place of the second moment.

    ``t := t + 1``, ``m := beta1 * m + (1 - beta1) * g``, ``u := max(beta2 * u, abs(g))``,
    ``p := p - learning_rate / (1 - beta1**t) * m / (u + epsilon)``

    Parameters
    ----------
    loss_or_grads : scalar expression, or list of expressions
        The loss, or one gradient for each parameter, of the parameter's shape and dtype.
    params : iterable of shared variables
        The parameters to train; all of one floating-point dtype.
    learning_rate : float or symbolic scalar
        The step size. If it is a shared variable, change it on every rank: ``synk.broadcast(learning_rate, value)``.
    beta1 : float or symbolic scalar
        The fraction of the first moment m that is kept, from 0 to 1.
    beta2 : float or symbolic scalar
        The fraction of the norm u that is kept, from 0 to 1.
    epsilon : float or symbolic scalar
        A small number that keeps the quotient finite.

    Returns
    -------
    grad_updates : OrderedDict
        The updates of the gradient function, which write each rank's gradients to ``grad_shared``.
    param_updates : OrderedDict
        The updates of the parameter function, which change the step number, the moment, the norm and the parameters on
        each rank.
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
    D. P. Kingma, J. Ba (2014), Adam: a method for stochastic optimization, arXiv:1412.6980, section 7.1.

    Examples
    --------
    >>> w = theano.shared(np.ones(2), "w")
    >>> _, param_updates, _ = updates.adamax(T.sqr(w).sum(), [w])
    >>> [var.name for var in param_updates]
    ['steps', 'first_moment', 'infinity_norm', 'w']
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep, eps = flat.numbers(learning_rate, beta2, epsilon)
    updates, t, m = _first_moment(flat, beta1)
    norm = flat.zeros("infinity_norm")
    updates[norm] = u = T.maximum(keep * norm, abs(flat.vector))
    return flat.divided(updates, rate / (1 - number(beta1, flat.dtype) ** t) * m / (u + eps))


def _first_moment(flat: FlatGradient, beta1: Any) -> tuple[Updates, Any, Any]:
    """Return the updates of step number and first moment for Adam and Adamax, and the new values of both."""
    steps = shared(np.asarray(0, config.floatX), name="steps")
    moment = flat.zeros("first_moment")
    keep, add = flat.numbers(beta1, 1 - beta1)
    new_steps, new_moment = steps + number(1, steps.dtype), keep * moment + add * flat.vector
    updates = OrderedDict([(steps, new_steps), (moment, new_moment)])
    return updates, number(new_steps, flat.dtype), new_moment
