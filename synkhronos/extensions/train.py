"""A whole training step in one call, on all ranks or in plain Theano.

A step on all ranks is three commands: the gradient function on scattered data, one all-reduce of
the gradients, and the update function. Weighting the all-reduce by the number of data points that
each rank computed makes the step equal to a serial one on any split of the data.
"""

import contextlib
import inspect
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Callable, Union

import theano

import synkhronos as synk
from synkhronos.extensions import updates


class TrainFunction:
    """One step of synchronous gradient descent on all ranks; made by `make_train_function`.

    Attributes
    ----------
    gradient : Function
        Computes the loss, and each rank's gradients into `grad_shared`.
    update : Function
        Changes the parameters on every rank. It has no inputs and no outputs.
    grad_shared : shared variable, or list of them
        After a call: the gradient of the whole minibatch, on every rank.
    """

    def __init__(self, gradient: Any, update: Any, grad_shared: Any, structure: Any) -> None:
        self.gradient = gradient
        self.update = update
        self.grad_shared = grad_shared
        self._structure = structure

    def __repr__(self) -> str:
        return f"<synkhronos TrainFunction: {self.gradient!r}, all-reduce of {self.grad_shared}, {self.update!r}>"

    def __call__(self, x_data: Any, y_data: Any, batch: Any = None, num_slices: int = 1) -> Any:
        """Make one training step.

        Parameters
        ----------
        x_data, y_data : Data, or what `numpy.asarray` takes, of shape ``(n, ...)``
            Scattered over the ranks along axis 0. Lists where the variables were lists.
        batch : int, slice or 1-d integer array, optional
            Which rows make the minibatch: the first ones, a range, or an index list.
        num_slices : int
            In how many pieces each rank computes its share, to save memory.

        Returns
        -------
        numpy.ndarray, shape ``()``
            The loss of the minibatch before the step.
        """
        inputs = _flatten((x_data, y_data), self._structure)
        loss = self.gradient(*inputs, batch=batch, num_slices=num_slices)
        synk.all_reduce(self.grad_shared, op="avg", weights=self.gradient.counts)
        self.update()
        return loss


def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Union[str, Callable[..., Any]],
    *args: Any,
    givens: Any = None,
    mode: Any = None,
    **kwargs: Any,
) -> TrainFunction:
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
        One of `synkhronos.extensions.updates`, or its name, called with ``(loss, params, *args, **kwargs)``.
    givens, mode
        As for `theano.function`: `givens` for the loss and the gradients, `mode` for both functions.

    Returns
    -------
    TrainFunction
        ``f(x_data, y_data, batch=None, num_slices=1)`` makes a step and returns the loss.

    Raises
    ------
    RuntimeError
        Before `synk.fork`.
    TypeError, ValueError
        If there is no such rule, or it does not take these arguments.
    """
    grad_updates, param_updates, grad_shared = _divide(update_rule, loss, params, args, kwargs)
    inputs = _flatten((x, y), (x, y))
    gradient = synk.function(inputs, outputs=loss, updates=grad_updates, givens=givens, mode=mode, name="gradient")
    update = synk.function([], updates=param_updates, mode=mode, name="update")
    return TrainFunction(gradient, update, grad_shared, (x, y))


def make_train_function_theano(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Union[str, Callable[..., Any]],
    *args: Any,
    givens: Any = None,
    mode: Any = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Make the same training step for this process alone, in one plain Theano function.

    It needs no `synk.fork`. Parameters as in `make_train_function`.

    Returns
    -------
    callable
        ``f(x_data, y_data, batch=None)`` makes a step and returns the loss; `x_data` and `y_data`
        are arrays (or lists of them) and `batch` is an int, a slice or an index list.
    """
    grad_updates, param_updates, _ = _divide(update_rule, loss, params, args, kwargs)
    # The gradients need no variable between two functions here: the rule reads the expressions.
    replaced = [*dict(givens or ()).items(), *grad_updates.items()]
    inputs = _flatten((x, y), (x, y))
    step = theano.function(inputs, loss, updates=param_updates, givens=replaced, mode=mode, name="train")

    def train(x_data: Any, y_data: Any, batch: Any = None) -> Any:
        arrays = _flatten((x_data, y_data), (x, y))
        return step(*(data if batch is None else data[_rows(batch)] for data in arrays))

    return train


def _divide(update_rule: Any, loss: Any, params: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply an update rule, which may be given by its name."""
    rules = [name for name in updates.__all__ if not name.startswith("apply_")]
    if isinstance(update_rule, str):
        if update_rule not in rules:
            raise ValueError(f"update_rule: there is no rule {update_rule!r}; expected one of {', '.join(rules)}")
        update_rule = getattr(updates, update_rule)
    if not callable(update_rule):
        raise TypeError(f"update_rule must be a rule, or the name of one: {', '.join(rules)}; got {update_rule!r}")
    with contextlib.suppress(ValueError):  # a callable whose arguments Python does not know
        signature = inspect.signature(update_rule)
        try:
            signature.bind(loss, params, *args, **kwargs)
        except TypeError as error:
            name = getattr(update_rule, "__name__", "update_rule")
            raise TypeError(f"{name}: {error}; it takes ({', '.join(signature.parameters)})") from None
    return update_rule(loss, params, *args, **kwargs)


def _rows(batch: Any) -> Any:
    """Give the index that picks a batch: an int counts rows, everything else indexes already."""
    return slice(batch) if isinstance(batch, Integral) else batch


def _flatten(pair: Any, structure: Any) -> list[Any]:
    """List the inputs in `pair`; where `structure` has a list, `pair` must have one as long."""
    inputs: list[Any] = []
    for item, pattern, name in zip(pair, structure, ("x_data", "y_data")):
        if not isinstance(pattern, (list, tuple)):
            inputs.append(item)
        elif isinstance(item, (list, tuple)) and len(item) == len(pattern):
            inputs.extend(item)
        else:
            raise TypeError(f"{name} must be a list of {len(pattern)}, one for each variable")
    return inputs
