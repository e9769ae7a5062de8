"""A whole training step in one call, on all ranks or in plain Theano.

A step on all ranks is three commands: the gradient function on scattered data, one all-reduce of
the gradients, and the update function. Weighting the all-reduce by the number of data points that
each rank computed makes the step equal to a serial one on any split of the data.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Callable

import theano

import synkhronos as synk


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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a TrainFunction belongs to its session and can be neither copied nor pickled: make it anew, by "
            "make_train_function, where it is wanted; what it has trained can be saved by "
            "synkhronos.extensions.checkpoint"
        )

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
    update_rule: Callable[..., Any],
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
    update_rule : callable
        One of `synkhronos.extensions.updates`, called with ``(loss, params, *args, **kwargs)``.
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
    """
    grad_updates, param_updates, grad_shared = update_rule(loss, params, *args, **kwargs)
    inputs = _flatten((x, y), (x, y))
    gradient = synk.function(inputs, outputs=loss, updates=grad_updates, givens=givens, mode=mode, name="gradient")
    update = synk.function([], updates=param_updates, mode=mode, name="update")
    return TrainFunction(gradient, update, grad_shared, (x, y))


def make_train_function_theano(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Callable[..., Any],
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
    grad_updates, param_updates, _ = update_rule(loss, params, *args, **kwargs)
    # The gradients need no variable between two functions here: the rule reads the expressions.
    replaced = [*dict(givens or ()).items(), *grad_updates.items()]
    inputs = _flatten((x, y), (x, y))
    step = theano.function(inputs, loss, updates=param_updates, givens=replaced, mode=mode, name="train")

    def train(x_data: Any, y_data: Any, batch: Any = None) -> Any:
        arrays = _flatten((x_data, y_data), (x, y))
        return step(*(data if batch is None else data[_rows(batch)] for data in arrays))

    return train


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
