"""Make training steps: on all ranks, or in this process alone as a plain function of Theano or PyTensor.

A step on all ranks consists of three commands in one message: the gradient function on scattered data, an all-reduce of
the gradients, and the update function. The all-reduce weights each rank by its number of data points. So the step is
the same as in the serial program, however the data are divided.

On several nodes, a step is one function instead. The gradients are averaged in its graph, so that the exchange of a
gradient between nodes begins when it has been computed, before those of the layers below.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Callable, Literal, Optional, Union, overload

import numpy as np

import synkhronos as synk
from synkhronos._backends import clone, compile_function, shared
from synkhronos.extensions import steps
from synkhronos.extensions.steps import (
    ExactTrainFunction,
    LocalTrainFunction,
    TrainFunction,
    check_names,
    flatten,
    free,
    listed,
)
from synkhronos.extensions.updates.flat import divide

__all__ = [
    "ExactTrainFunction",
    "LocalTrainFunction",
    "TrainFunction",
    "make_train_function",
    "make_train_function_theano",
]


@overload
def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Union[str, Callable[..., Any]],
    *args: Any,
    rule: Union[synk.rules.Rule, Literal["local"]],
    **kwargs: Any,
) -> LocalTrainFunction: ...


@overload
def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Union[str, Callable[..., Any]],
    *args: Any,
    rule: None = None,
    **kwargs: Any,
) -> Union[TrainFunction, ExactTrainFunction]: ...


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
    rule: Union[synk.rules.Rule, Literal["local"], None] = None,
    **kwargs: Any,
) -> Union[TrainFunction, ExactTrainFunction, LocalTrainFunction]:
    """Make a training step on all ranks, equal to a step of one process on the full minibatch.

    The step is synchronous data-parallel gradient descent. Each rank computes the gradients of its shard. An all-reduce
    averages them by ``sum(n_k * g_k) / sum(n_k)``, where ``n_k`` is the number of data points of rank k. Then every
    rank makes the same update of its copy of the parameters. Call the step in the controller; it runs on all ranks.

    Parameters
    ----------
    loss : scalar expression
        A mean over the data points, plus terms that depend only on the parameters. It must not be a sum, because the
        ranks' losses and gradients are averaged.
    params : list of shared variables
        The parameters to train. They must be equal on all ranks at the start, as they are after
        `synkhronos.distribute`.
    x, y : variable or list of variables
        The inputs of the loss, all scattered along axis 0.
    update_rule : str or callable
        A rule of `synkhronos.extensions.updates`, or its name, or a rule of Lasagne, or another callable that takes
        ``(loss or gradients, params, *args, **kwargs)`` and returns updates. Its symbolic variables, such as a learning
        rate, become keyword arguments of the step, by their names.
    *args
        Further arguments of the rule.
    givens : dict or list of pairs, optional
        Replacements in the loss and the gradients, as for `theano.function`.
    mode : str or Mode, optional
        As for `theano.function`.
    weights : scalar expression, optional
        The divisor of the loss, if it is not the number of data points: ``m.sum()`` for ``(m * l).sum() / m.sum()``.
        If it is 0 on a rank or in a slice, loss and gradients from there are ignored, even if they are NaN.
    exact : bool
        Make the step one exact function (docs/exact.md). It equals the serial step for any loss, such as one with batch
        normalization over the full minibatch, sums, or masks. It takes no `weights`, and draws the random numbers of
        the serial program.
    rule : Rule or "local", optional
        A training rule of `synkhronos.rules`, by which ranks train without a collective in every step. It cannot be
        combined with ``weights``. With ``exact``, the ranks of a node make equal steps, and the rule averages between
        nodes. ``"local"`` does so, too, with a delay that the loop chooses. ``None`` or ``BSP()``: all ranks make equal
        steps.
    **kwargs
        Further keyword arguments of the update rule.

    Returns
    -------
    TrainFunction; ExactTrainFunction if ``exact``; or LocalTrainFunction if there is a training rule
        ``f(x_data, y_data, batch=None, num_slices=1)`` makes a step and returns the loss. ``f.loop(x_data, y_data,
        batch_size=..., epochs=...)`` trains; a `LocalTrainFunction` has only this.

    Raises
    ------
    SessionError
        If there is no session.
    TypeError, ValueError
        If there is no such rule, it does not take these arguments or cannot be split into two parts, a symbolic
        variable has no name, or `weights` are given with ``exact`` or a training rule.

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
    has_rule = rule is not None and not isinstance(rule, synk.rules.BSP)
    if has_rule and weights is not None:
        raise ValueError(f"{rule!r} cannot be combined with weights: leave these out, or the rule")
    if exact:
        if weights is not None:
            raise ValueError("exact=True: the step is the serial one by itself; leave out weights")
        # Replace the variables between two functions by the gradients themselves, because there is only one function.
        replaced = [*dict(givens or ()).items(), *grad_updates.items()]
        exact_step = ExactTrainFunction(loss, param_updates, inputs, (x, y), givens=replaced, mode=mode)
        exact_step._params = list(params)
        return LocalTrainFunction(exact_step.function, params, rule, (x, y)) if has_rule else exact_step
    outputs, weight = loss, None

    def in_one(averages: bool = True, keeps: bool = False) -> Any:
        """Make one function of the step, if wanted with averages of the gradients, which the step keeps if wanted."""
        others = free([loss, *grad_updates.values(), *param_updates.values()], inputs, givens)
        grads = [(var, synk.averaged(grad) if averages else grad) for var, grad in grad_updates.items()]
        replaced = [*dict(givens or ()).items(), *grads]
        updates = OrderedDict([*(grads if keeps else ()), *param_updates.items()])
        return synk.function(
            inputs, outputs, bcast_inputs=others, updates=updates, givens=replaced, mode=mode, name="train"
        )

    if has_rule:
        return LocalTrainFunction(in_one(averages=rule == "local"), params, rule, (x, y))
    if weights is not None:
        weight = shared(np.zeros((), "float64"), "weight")
        one = steps.per_point(weights, inputs[0])
        for var, grad in grad_updates.items():
            grad_updates[var] = steps.times(one, grad, var.dtype)
        grad_updates[weight] = steps.not_negative(one)
        outputs = [steps.times(one, loss, loss.dtype), one, (one, "min")]
        divided = {var: var / weight.astype(var.dtype) for var in listed(grad_shared)}
        news = clone(list(param_updates.values()), replace=divided)
        every = OrderedDict([*zip(param_updates, news), *divided.items()])
        param_updates = OrderedDict((var, steps.where_valid(weight, new, var)) for var, new in every.items())
    of_gradient = free([loss, *grad_updates.values()], inputs, givens)
    of_update = free(param_updates.values(), (), None)

    def in_two() -> tuple[Any, Any]:
        """Make the functions of the gradients and of the update."""
        gradient = synk.function(
            inputs, outputs, bcast_inputs=of_gradient, updates=grad_updates, givens=givens, mode=mode, name="gradient"
        )
        return gradient, synk.function([], bcast_inputs=of_update, updates=param_updates, mode=mode, name="update")

    names = [var.name for var in of_gradient], [var.name for var in of_update]
    step = TrainFunction(in_two, in_one, grad_shared, (x, y), names=names, weight=weight)
    step._params = list(params)
    return step


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
    """Make a training step for this process alone, as a plain function of Theano or PyTensor.

    The step is that of `make_train_function`, and needs no session.

    Parameters
    ----------
    loss : scalar expression
        As in `make_train_function`.
    params : list of shared variables
        The parameters to train.
    x, y : variable or list of variables
        The inputs of the loss.
    update_rule : str or callable
        As in `make_train_function`.
    *args
        Further arguments of the rule.
    givens : dict or list of pairs, optional
        Replacements in the loss and the gradients, as for `theano.function`.
    mode : str or Mode, optional
        As for `theano.function`.
    weights : scalar expression, optional
        No effect, because the loss is already divided by them.
    **kwargs
        Further keyword arguments of the rule.

    Returns
    -------
    callable
        ``f(x_data, y_data, batch=None, **hyperparameters)`` makes a step and returns the loss. `x_data` and `y_data`
        are arrays of shape ``(n, ...)``, or lists of them, and `batch` is an int, a slice or an index list.

    Raises
    ------
    TypeError, ValueError
        If there is no such rule, it does not take these arguments or cannot be split into two parts, or a symbolic
        variable has no name.

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
    # Replace the variables between two functions by the gradients themselves, because there is only one function.
    replaced = [*dict(givens or ()).items(), *grad_updates.items()]
    inputs = flatten((x, y), (x, y))
    others = free([loss, *grad_updates.values(), *param_updates.values()], inputs, givens)
    names = [var.name for var in others]
    step = compile_function([*inputs, *others], loss, updates=param_updates, givens=replaced, mode=mode, name="train")

    def train(x_data: Any, y_data: Any, batch: Any = None, **hyperparameters: Any) -> Any:
        arrays = flatten((x_data, y_data), (x, y))
        check_names(hyperparameters, names)
        chosen = (data if batch is None else data[steps.rows(batch)] for data in arrays)
        return step(*chosen, *(hyperparameters[name] for name in names))

    return train
