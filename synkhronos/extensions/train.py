"""A whole training step in one call, on all ranks or in plain Theano.

A step on all ranks is three commands, which go to them as one message: the gradient function on
scattered data, one all-reduce of the gradients, and the update function. Weighting the all-reduce
by the number of data points that each rank computed makes the step equal to a serial one on any
split of the data.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Callable, Optional, Union

import numpy as np

import synkhronos as synk
from synkhronos._backends import clone, compile_function, shared
from synkhronos.extensions.steps import ExactTrainFunction, TrainFunction, check_names, flatten, free, listed, rows
from synkhronos.extensions.updates.divide import divide
from synkhronos.extensions.weighting import not_negative, per_point, times, where_valid

__all__ = ["ExactTrainFunction", "TrainFunction", "make_train_function", "make_train_function_theano"]


def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Union[str, Callable[..., Any]],
    *args: Any,
    givens: Any = None,
    mode: Any = None,
    weights: Optional[Any] = None,
    exact: bool = False,
    **kwargs: Any,
) -> Union[TrainFunction, ExactTrainFunction]:
    """Make a function that trains on all ranks as if one process trained on the whole minibatch.

    Parameters
    ----------
    loss : scalar expression
        A mean over the data points, plus terms of the parameters alone if any. Not a sum: the
        ranks' losses and gradients are averaged.
    params : list of shared variables
        What to train. Ranks must start from equal values, which `synk.distribute` sees to.
    x, y : variable or list of variables
        The inputs of the loss, all scattered along axis 0.
    update_rule : str or callable
        One of `synkhronos.extensions.updates`, or its name, or one of Lasagne, or another that is called
        with ``(loss or gradients, params, *args, **kwargs)`` and gives updates. Symbolic variables in it,
        such as a learning rate, become inputs of the function that is made, by their names.
    givens, mode
        As for `theano.function`: `givens` for the loss and the gradients, `mode` for both functions.
    weights : scalar expression, optional
        By what the loss divides, if that is not the number of data points: ``m.sum()`` for
        ``(m * l).sum() / m.sum()``. Where it is 0, neither loss nor gradients count, NaNs among them.
    exact : bool
        The step is one exact function (docs/exact.md), the serial step whatever the loss is: batch normalisation over
        the whole minibatch, sums, masks. It takes no `weights`, and draws random numbers as the serial program.

    Returns
    -------
    TrainFunction, or ExactTrainFunction if ``exact``
        ``f(x_data, y_data, batch=None, num_slices=1)`` makes a step and returns the loss.

    Raises
    ------
    RuntimeError
        Before `synk.fork`.
    TypeError, ValueError
        If there is no such rule, it does not take these arguments or cannot be divided, or a symbolic
        variable has no name.

    Examples
    --------
    >>> w = theano.shared(np.zeros(2), "w")
    >>> x, t = T.dmatrix("x"), T.dvector("t")
    >>> loss = T.sqr(x.dot(w) - t).mean()
    >>> rows, targets = [[1, 0], [0, 1], [1, 1]], [1, 1, 2]
    >>> with synk.session(2):
    ...     step = train.make_train_function(loss, [w], x, t, "sgd", learning_rate=0.3)
    ...     losses = [step(rows, targets) for _ in range(2)]
    >>> print("%.2f %.2f" % tuple(losses))
    2.00 0.32
    """
    grad_updates, param_updates, grad_shared = divide(update_rule, loss, params, *args, **kwargs)
    inputs = flatten((x, y), (x, y))
    if exact:
        if weights is not None:
            raise ValueError("exact=True: the step is the serial one by itself; leave out weights")
        # The gradients need no variable between two functions: the rule reads the expressions.
        replaced = [*dict(givens or ()).items(), *grad_updates.items()]
        return ExactTrainFunction(loss, param_updates, inputs, (x, y), givens=replaced, mode=mode)
    outputs, weight = loss, None
    if weights is not None:
        weight = shared(np.zeros((), "float64"), "weight")
        one = per_point(weights, inputs[0])
        for var, grad in grad_updates.items():
            grad_updates[var] = times(one, grad, var.dtype)
        grad_updates[weight] = not_negative(one)
        outputs = [times(one, loss, loss.dtype), one, (one, "min")]
        divided = {var: var / weight.astype(var.dtype) for var in listed(grad_shared)}
        news = clone(list(param_updates.values()), replace=divided)
        every = OrderedDict([*zip(param_updates, news), *divided.items()])
        param_updates = OrderedDict((var, where_valid(weight, new, var)) for var, new in every.items())
    of_gradient = free([loss, *grad_updates.values()], inputs, givens)
    of_update = free(param_updates.values(), (), None)
    gradient = synk.function(
        inputs, outputs, bcast_inputs=of_gradient, updates=grad_updates, givens=givens, mode=mode, name="gradient"
    )
    update = synk.function([], bcast_inputs=of_update, updates=param_updates, mode=mode, name="update")
    names = [var.name for var in of_gradient], [var.name for var in of_update]
    return TrainFunction(gradient, update, grad_shared, (x, y), names=names, weight=weight)


def make_train_function_theano(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Union[str, Callable[..., Any]],
    *args: Any,
    givens: Any = None,
    mode: Any = None,
    weights: Optional[Any] = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Make the same training step for this process alone, in one plain function.

    It needs no `synk.fork`. Parameters as in `make_train_function`; `weights` change nothing here.

    Returns
    -------
    callable
        ``f(x_data, y_data, batch=None, **hyperparameters)`` makes a step and returns the loss; `x_data`
        and `y_data` are arrays (or lists of them) and `batch` is an int, a slice or an index list.

    Examples
    --------
    >>> w = theano.shared(np.zeros(2), "w")
    >>> x, t = T.dmatrix("x"), T.dvector("t")
    >>> loss = T.sqr(x.dot(w) - t).mean()
    >>> step = train.make_train_function_theano(loss, [w], x, t, "sgd", learning_rate=0.3)
    >>> rows, targets = np.array([[1.0, 0], [0, 1], [1, 1]]), np.array([1.0, 1, 2])
    >>> print("%.2f %.2f" % tuple(step(rows, targets) for _ in range(2)))
    2.00 0.32
    """
    grad_updates, param_updates, _ = divide(update_rule, loss, params, *args, **kwargs)
    # The gradients need no variable between two functions here: the rule reads the expressions.
    replaced = [*dict(givens or ()).items(), *grad_updates.items()]
    inputs = flatten((x, y), (x, y))
    others = free([loss, *grad_updates.values(), *param_updates.values()], inputs, givens)
    names = [var.name for var in others]
    step = compile_function([*inputs, *others], loss, updates=param_updates, givens=replaced, mode=mode, name="train")

    def train(x_data: Any, y_data: Any, batch: Any = None, **hyperparameters: Any) -> Any:
        arrays = flatten((x_data, y_data), (x, y))
        check_names(hyperparameters, names)
        chosen = (data if batch is None else data[rows(batch)] for data in arrays)
        return step(*chosen, *(hyperparameters[name] for name in names))

    return train
