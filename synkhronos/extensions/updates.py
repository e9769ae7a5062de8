"""Update rules of gradient descent, divided so that an all-reduce fits in between.

Each rule gives ``(grad_updates, param_updates, grad_shared)``. A first function with `grad_updates`
writes each rank's raw gradients to `grad_shared`; ``all_reduce(grad_shared, weights=f.counts)``
makes of them the gradient of the whole minibatch, on every rank; a second function with
`param_updates` changes the parameters. Ranks that start from equal parameters stay equal, whatever
a rule remembers between steps. `grad_shared` is one flat vector (`sgd_nonflat`: a list).

Names, order and defaults of the arguments are Lasagne's, and so are the numbers; Lasagne itself is
not needed. In the formulas p is a parameter, g its gradient, everything is elementwise, and ``:=``
is an update, of which the later ones see the earlier ones' results. The rules (not `sgd_nonflat`)
raise ``TypeError`` for parameters of several dtypes, all raise ``ValueError`` for no parameters.
"""

from collections import OrderedDict
from typing import Any

import numpy as np
import theano
import theano.tensor as T

from synkhronos.extensions._flat import FlatGradient, gradients, number, shared_list, zeros_like
from synkhronos.extensions._momentum import apply_momentum, apply_nesterov_momentum

__all__ = ["adadelta", "adagrad", "adam", "adamax", "apply_momentum", "apply_nesterov_momentum",
           "momentum", "nesterov_momentum", "rmsprop", "sgd", "sgd_nonflat"]  # fmt: skip

Updates = dict[Any, Any]
Divided = tuple[Updates, Updates, Any]


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
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep = flat.numbers(learning_rate, momentum)
    velocity = flat.zeros("velocity")
    new = keep * velocity - rate * flat.vector
    updates = OrderedDict([(velocity, new)])
    for param, shape, g, v in zip(flat.params, flat.shapes, flat.pieces(flat.vector), flat.pieces(new)):
        # A loop over three arrays becomes vector code, one over five does not: two reshapes keep
        # Theano from making one loop of two.
        descended = T.patternbroadcast((param - rate * g).flatten().reshape(shape), param.broadcastable)
        updates[param] = descended + keep * v
    return flat.updates, updates, flat.vector


def adagrad(loss_or_grads: Any, params: Any, learning_rate: Any = 1.0, epsilon: Any = 1e-6) -> Divided:
    """Adagrad: ``a := a + g**2``, ``p := p - learning_rate * g / sqrt(a + epsilon)``.

    Parameters and returns as in `sgd`, and `epsilon`, which keeps the quotient finite. Source:
    J. Duchi, E. Hazan, Y. Singer (2011), Adaptive subgradient methods for online learning and
    stochastic optimization, JMLR 12.
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, eps = flat.numbers(learning_rate, epsilon)
    squares = flat.zeros("squares")
    new = squares + flat.vector**2
    steps = flat.descend(rate * flat.vector / T.sqrt(new + eps))
    return flat.updates, OrderedDict([(squares, new), *steps.items()]), flat.vector


def rmsprop(
    loss_or_grads: Any,
    params: Any,
    learning_rate: Any = 1.0,
    rho: Any = 0.9,
    epsilon: Any = 1e-6,
) -> Divided:
    """RMSProp: steps divided by a moving root mean square of the gradients.

    ``a := rho * a + (1 - rho) * g**2``, ``p := p - learning_rate * g / sqrt(a + epsilon)``.
    Parameters and returns as in `adagrad`, and `rho` in [0, 1], the part of the mean square a that
    is kept. Source: T. Tieleman, G. Hinton (2012), Neural networks for machine learning, lecture
    6.5, Coursera.
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep, add, eps = flat.numbers(learning_rate, rho, 1 - rho, epsilon)
    squares = flat.zeros("squares")
    new = keep * squares + add * flat.vector**2
    steps = flat.descend(rate * flat.vector / T.sqrt(new + eps))
    return flat.updates, OrderedDict([(squares, new), *steps.items()]), flat.vector


def adadelta(
    loss_or_grads: Any,
    params: Any,
    learning_rate: Any = 1.0,
    rho: Any = 0.95,
    epsilon: Any = 1e-6,
) -> Divided:
    """Adadelta: steps in the ratio of moving root mean squares of steps and of gradients.

    ``a := rho * a + (1 - rho) * g**2``, ``s := g * sqrt(d + epsilon) / sqrt(a + epsilon)``,
    ``d := rho * d + (1 - rho) * s**2``, ``p := p - learning_rate * s``.
    Parameters and returns as in `rmsprop`. Source, with a learning rate of 1: M. D. Zeiler (2012),
    ADADELTA: an adaptive learning rate method, arXiv:1212.5701.
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep, add, eps = flat.numbers(learning_rate, rho, 1 - rho, epsilon)
    squares, step_squares = flat.zeros("squares"), flat.zeros("step_squares")
    new = keep * squares + add * flat.vector**2
    step = flat.vector * T.sqrt(step_squares + eps) / T.sqrt(new + eps)
    updates = OrderedDict([(squares, new), (step_squares, keep * step_squares + add * step**2)])
    updates.update(flat.descend(rate * step))
    return flat.updates, updates, flat.vector


def adam(
    loss_or_grads: Any,
    params: Any,
    learning_rate: Any = 0.001,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
) -> Divided:
    """Adam: moving first and second moments of the gradients, corrected for their start at 0.

    ``t := t + 1``, ``m := beta1 * m + (1 - beta1) * g``, ``v := beta2 * v + (1 - beta2) * g**2``,
    ``p := p - learning_rate * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)``.
    Parameters and returns as in `adagrad`, and `beta1`, `beta2`, the parts of the moments m and v
    that are kept. Source: D. P. Kingma, J. Ba (2014), Adam: a method for stochastic optimization,
    arXiv:1412.6980; the efficient form at the end of its section 2.
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep, add, eps = flat.numbers(learning_rate, beta2, 1 - beta2, epsilon)
    updates, t, m = _first_moment(flat, beta1)
    second = flat.zeros("second_moment")
    updates[second] = v = keep * second + add * flat.vector**2
    scale = rate * T.sqrt(1 - keep**t) / (1 - number(beta1, flat.dtype) ** t)
    updates.update(flat.descend(scale * m / (T.sqrt(v) + eps)))
    return flat.updates, updates, flat.vector


def adamax(
    loss_or_grads: Any,
    params: Any,
    learning_rate: Any = 0.002,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
) -> Divided:
    """Adamax: Adam with the infinity norm in place of the second moment.

    ``t := t + 1``, ``m := beta1 * m + (1 - beta1) * g``, ``u := max(beta2 * u, abs(g))``,
    ``p := p - learning_rate / (1 - beta1**t) * m / (u + epsilon)``.
    Parameters and returns as in `adam`. Source: section 7.1 of the same paper.
    """
    flat = FlatGradient(loss_or_grads, params)
    rate, keep, eps = flat.numbers(learning_rate, beta2, epsilon)
    updates, t, m = _first_moment(flat, beta1)
    norm = flat.zeros("infinity_norm")
    updates[norm] = u = T.maximum(keep * norm, abs(flat.vector))
    updates.update(flat.descend(rate / (1 - number(beta1, flat.dtype) ** t) * m / (u + eps)))
    return flat.updates, updates, flat.vector


def _first_moment(flat: FlatGradient, beta1: Any) -> tuple[Updates, Any, Any]:
    """Begin Adam's and Adamax's updates: the new step number and the new first moment."""
    steps = theano.shared(np.asarray(0, theano.config.floatX), name="steps")
    moment = flat.zeros("first_moment")
    keep, add = flat.numbers(beta1, 1 - beta1)
    new_steps, new_moment = steps + number(1, steps.dtype), keep * moment + add * flat.vector
    updates = OrderedDict([(steps, new_steps), (moment, new_moment)])
    return updates, number(new_steps, flat.dtype), new_moment
