"""Training steps as callables, and helpers for their inputs and for weighted losses.

In a weighted loss such as ``(m * l).sum() / m.sum()``, the weight of a rank is its sum of weights, but averages weight
ranks by their numbers of data points. So loss and gradients are multiplied by the mean weight of a data point on the
rank, or in the slice. This mean weight is averaged, too, and divides the results in the end. Where it is 0, values are
replaced by 0 instead of multiplied, because 0 · NaN is NaN. Where it is invalid, the update function leaves everything
unchanged, because it runs before the controller can check the weights.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

import synkhronos as synk
from synkhronos._backends import Constant, SharedVariable, T, leaves_of
from synkhronos._utils.rendezvous import is_spread


def free(expressions: Any, inputs: Sequence[Any], givens: Any) -> list[Any]:
    """Return the symbolic variables in expressions that are neither inputs nor replaced; each must have a unique name.

    Raises
    ------
    TypeError
        If a variable has no name, if a name is not unique, or if it is the name of a parameter of the call.
    """
    replaced = dict(givens or ())
    found = [var for var in leaves_of([*expressions, *replaced.values()], list(replaced)) if var.owner is None]
    known = {*inputs, *replaced}
    free = [var for var in dict.fromkeys(found) if var not in known and not isinstance(var, (SharedVariable, Constant))]
    names = [var.name for var in free]
    for name in names:
        if name is None or names.count(name) > 1 or name in ("x_data", "y_data", "batch", "num_slices"):
            raise TypeError(
                f"the loss or the rule has the symbolic variables {free} in addition to x and y; expected a name "
                "for each, all different, and none of a parameter of the call. Values are passed by these names"
            )
    return free


def check_names(given: dict[str, Any], names: Any) -> None:
    """Raise `TypeError` unless the given names are those of the hyperparameters."""
    if set(given) != set(names):
        raise TypeError(
            f"got the keyword arguments {sorted(given)}; expected {sorted(names)}, the names of the symbolic "
            "variables of the loss and of the rule"
        )


def listed(one_or_more: Any) -> list[Any]:
    """Return one or more variables as a list."""
    return list(one_or_more) if isinstance(one_or_more, (list, tuple)) else [one_or_more]


def rows(batch: Any) -> Any:
    """Return the index of a batch: for an int, a slice of the first rows; anything else is an index already."""
    return slice(batch) if isinstance(batch, Integral) else batch


def flatten(pair: Any, structure: Any) -> list[Any]:
    """Return the inputs in ``pair`` as a flat list; where ``structure`` has a list, ``pair`` must have one as long."""
    inputs: list[Any] = []
    for item, pattern, name in zip(pair, structure, ("x_data", "y_data")):
        if not isinstance(pattern, (list, tuple)):
            inputs.append(item)
        elif isinstance(item, (list, tuple)) and len(item) == len(pattern):
            inputs.extend(item)
        else:
            raise TypeError(f"got one value for {name}; expected a list of {len(pattern)}, one for each variable")
    return inputs


def nested(inputs: Sequence[Any], structure: Any) -> list[Any]:
    """Return a flat list of inputs as `flatten` takes them: as a list where ``structure`` has one."""
    rest = iter(inputs)
    return [[next(rest) for _ in one] if isinstance(one, (list, tuple)) else next(rest) for one in structure]


# -- weighted losses


def per_point(weights: Any, data: Any) -> Any:
    """Return the mean weight of a data point on a rank or in a slice."""
    weights = T.as_tensor_variable(weights)
    if weights.ndim:
        raise TypeError(f"weights has {weights.ndim} dimensions; expected a scalar expression, such as mask.sum()")
    return weights.astype("float64") / data.shape[0]


def times(weight: Any, value: Any, dtype: str) -> Any:
    """Multiply a value by a weight; the result is 0 where the weight is 0, even if the value is NaN or infinite."""
    return T.switch(T.eq(weight, 0), np.zeros((), dtype), weight.astype(dtype) * value)


def not_negative(weight: Any) -> Any:
    """Return a weight, or NaN where it is negative, because an average of NaN is always NaN."""
    return T.switch(T.lt(weight, 0), np.nan, weight)


def where_valid(weight: Any, new: Any, old: Any) -> Any:
    """Return a new value where the weight is positive and finite, otherwise the old value."""
    return T.switch(T.gt(weight, 0) & T.lt(weight, np.inf), new, old)


def weighted(loss: Any, weight: Any, lowest: Any) -> Any:
    """Divide the loss by the mean weight of a data point.

    Raises
    ------
    ValueError
        If the mean weight is not positive and finite, or the lowest weight is negative or NaN.
    """
    if not np.isfinite(weight) or not lowest >= 0 or not weight > 0:
        raise ValueError(
            f"weights have the mean {weight:g} for each data point, and the lowest is {lowest:g}; expected finite "
            "weights of at least 0, not all 0. The parameters did not change"
        )
    return np.asarray(loss / weight, loss.dtype)


# -- steps


def _check_counts(function: Any) -> None:
    """Raise `ValueError` if the last call of a function had no data points."""
    if not any(function.counts or ()):
        raise ValueError("got a step with no data points; expected at least one. The parameters did not change")


class Loops:
    """Mixin of training steps: train in a loop that each rank runs by itself, or by a call for each step."""

    _structure: Any
    _params: Sequence[Any] = ()

    def get_shared(self) -> list[Any]:
        """Return all shared variables of the step: parameters, the state of the rule, random states and others.

        Returns
        -------
        list of shared variables
            Save them, as `synkhronos.extensions.checkpoint` does, to resume the training.

        Examples
        --------
        >>> w, x, t = theano.shared(np.zeros(2), "w"), T.dmatrix("x"), T.dvector("t")
        >>> loss = T.sqr(x.dot(w) - t).mean()
        >>> with synk.session(2):
        ...     step = train.make_train_function(loss, [w], x, t, "momentum", 0.1, 0.9, exact=True)
        ...     print(len(step.get_shared()))
        2
        """
        functions = getattr(self, "_functions", None) or [self.function]  # type: ignore[attr-defined]
        return list(dict.fromkeys(var for one in functions for var in one.get_shared()))

    def loop(self, x_data: Any, y_data: Any = None, **options: Any) -> synk.Run:
        """Train for a number of epochs or steps.

        Parameters
        ----------
        x_data, y_data : Data or array_like, of shape ``(n, ...)``
            The data of all ranks. Lists if the variables were lists. A callable as `x_data` makes the batches; see
            `synkhronos.loop`.
        **options
            ``batch_size``, ``epochs`` or ``steps``, ``schedule``, ``on_epoch``, ``seed``, ``others``, ``resume`` and
            ``progress`` of `synkhronos.loop`. The hyperparameters are values of ``schedule``, by name.

        Returns
        -------
        Run
            The records of the training.

        Raises
        ------
        SessionError, TypeError, ValueError, WorkerError
            As `synkhronos.loop`.

        Examples
        --------
        >>> w, x, t = theano.shared(np.zeros(2), "w"), T.dmatrix("x"), T.dvector("t")
        >>> loss = T.sqr(x.dot(w) - t).mean()
        >>> with synk.session(2):
        ...     step = train.make_train_function(loss, [w], x, t, "sgd", learning_rate=0.5, rule=synk.rules.DiLoCo(5))
        ...     run = step.loop(np.eye(2), [1, 2], batch_size=1, steps=100)
        >>> print(run.exchanges, w.get_value().round(1))
        [20, 20] [1. 2.]
        """
        inputs = x_data if callable(x_data) else flatten((x_data, y_data), self._structure)
        return self._loop(inputs, options)

    def _loop(self, inputs: Any, options: dict[str, Any]) -> synk.Run:
        def step(*inputs: Any, **keywords: Any) -> Any:
            return self(*nested(inputs, self._structure), **keywords)  # type: ignore[operator]

        return synk.loop(step, inputs, params=self._params, **options)


class LocalTrainFunction(Loops):
    """Training step with a training rule, as `make_train_function` returns it.

    It has only `loop`, because not all ranks take part in a single step.

    Attributes
    ----------
    function : Function
        Computes the loss and changes the parameters of a rank, or of the ranks of a node.
    rule : Rule or "local"

    Examples
    --------
    >>> w, x, t = theano.shared(np.zeros(2), "w"), T.dmatrix("x"), T.dvector("t")
    >>> loss = T.sqr(x.dot(w) - t).mean()
    >>> with synk.session(2):
    ...     step = train.make_train_function(loss, [w], x, t, "sgd", learning_rate=0.5, rule=synk.rules.EASGD(every=2))
    ...     print(type(step).__name__, step.rule.every)
    LocalTrainFunction 2
    """

    def __init__(self, function: Any, params: Sequence[Any], rule: Any, structure: Any) -> None:
        self.function, self.rule = function, rule
        self._params, self._structure = list(params), structure

    def __repr__(self) -> str:
        return f"<synkhronos LocalTrainFunction: {self.function!r}, {self.rule!r}>"

    def _loop(self, inputs: Any, options: dict[str, Any]) -> synk.Run:
        return synk.loop(self.function, inputs, params=self._params, rule=self.rule, **options)


class ExactTrainFunction(Loops):
    """Training step on all ranks as one exact function, as `make_train_function` returns it.

    Attributes
    ----------
    function : Function
        Computes the loss and changes the parameters. Symbolic hyperparameters are further inputs of it.

    Examples
    --------
    >>> w = theano.shared(np.zeros(2), "w")
    >>> x, t = T.dmatrix("x"), T.dvector("t")
    >>> loss = T.sqr(x.dot(w) - t).mean()
    >>> with synk.session(2):
    ...     step = train.make_train_function(loss, [w], x, t, "sgd", learning_rate=0.3, exact=True)
    ...     first = step([[1, 0], [0, 1], [1, 1]], [1, 1, 2])
    ...     print(type(step).__name__, float(first), len(step.function.partition))
    ExactTrainFunction 2.0 2
    """

    def __init__(self, loss: Any, updates: Any, inputs: Any, structure: Any, *, givens: Any, mode: Any) -> None:
        others = free([loss, *updates.values()], inputs, givens)
        self._names, self._structure = [var.name for var in others], structure
        there = inputs[0].shape[0] > 0
        kept = OrderedDict((var, T.switch(there, new, var)) for var, new in updates.items())
        self.function = synk.function(
            inputs, loss, bcast_inputs=others, updates=kept, givens=givens, mode=mode, name="train", exact=True
        )

    def __repr__(self) -> str:
        return f"<synkhronos ExactTrainFunction: {self.function!r}>"

    def _loop(self, inputs: Any, options: dict[str, Any]) -> synk.Run:
        return synk.loop(self.function, inputs, params=self._params, **options)

    def __call__(self, x_data: Any, y_data: Any, batch: Any = None, num_slices: int = 1, **hyperparameters: Any) -> Any:
        """Make one training step.

        Parameters
        ----------
        x_data, y_data : Data or array_like, of shape ``(n, ...)``
            The data, scattered over the ranks along axis 0. Lists if the variables were lists.
        batch : int, slice, or list / 1-d array of integers or booleans, optional
            The rows of the minibatch: the number of first rows, a range, or an index list. Default: all rows.
        num_slices : int
            The number of slices in which each rank computes its shard, to save memory.
        **hyperparameters
            The values of the other symbolic variables in the loss or in the rule, by name.

        Returns
        -------
        numpy.ndarray, shape ``()``
            The loss of the minibatch before the step.

        Raises
        ------
        SessionError
            If there is no session.
        TypeError
            If a hyperparameter is missing, or a keyword argument is not the name of one.
        ValueError
            If there are no data points; the parameters are not changed.
        WorkerError
            If a rank fails.

        Examples
        --------
        >>> w, x, t = theano.shared(np.zeros(2), "w"), T.dmatrix("x"), T.dvector("t")
        >>> with synk.session(2):
        ...     loss = T.sqr(x.dot(w) - t).mean()
        ...     step = train.make_train_function(loss, [w], x, t, "sgd", T.dscalar("rate"), exact=True)
        ...     print(float(step(np.eye(2), [1, 1], rate=0.5)), w.get_value())
        1.0 [0.5 0.5]
        """
        inputs = flatten((x_data, y_data), self._structure)
        check_names(hyperparameters, self._names)
        loss = self.function(*inputs, batch=batch, num_slices=num_slices, **hyperparameters)
        _check_counts(self.function)
        return loss


class TrainFunction(Loops):
    """Step of synchronous gradient descent on all ranks, as `make_train_function` returns it.

    Attributes
    ----------
    grad_shared : shared variable, or list of them
        After a call, the gradient of the full minibatch on every rank.

    Examples
    --------
    >>> w = theano.shared(np.zeros(2), "w")
    >>> x, t = T.dmatrix("x"), T.dvector("t")
    >>> loss = T.sqr(x.dot(w) - t).mean()
    >>> with synk.session(2):
    ...     step = train.make_train_function(loss, [w], x, t, "sgd", learning_rate=0.3)
    ...     first = step([[1, 0], [0, 1], [1, 1]], [1, 1, 2])
    ...     print("%.1f" % first, synk.gather(step.grad_shared).round(1).tolist())
    2.0 [[-2.0, -2.0], [-2.0, -2.0]]
    """

    def __init__(
        self, in_two: Any, in_one: Any, grad_shared: Any, structure: Any, *, names: Any = ((), ()), weight: Any = None
    ) -> None:
        self.grad_shared = grad_shared
        self._structure = structure
        self._names = names  # of the hyperparameters of the two functions
        self._weight = weight  # of one data point, as a shared variable; None: 1
        self._reduced = [*listed(grad_shared), *([] if weight is None else [weight])]
        self._in_two, self._in_one = in_two, in_one
        self._make_step = in_one if weight is None else None  # makes one function of the step, for `loop`
        self._step: Any = None
        self._one = in_one(keeps=True) if is_spread() else None
        self._functions = [self.gradient, self.update] if self._one is None else [self._one]  # of a call without slices

    @functools.cached_property
    def _two(self) -> tuple[Any, Any]:
        found: tuple[Any, Any] = self._in_two()
        return found

    @property
    def gradient(self) -> Any:
        """The function that computes the loss, and writes each rank's gradients to `grad_shared`.

        On several nodes, one function also averages the gradients and makes the update in calls without slices. This
        one and `update` are compiled when they are needed.
        """
        return self._two[0]

    @property
    def update(self) -> Any:
        """The function that changes the parameters on every rank; its inputs are the rule's hyperparameters."""
        return self._two[1]

    def __repr__(self) -> str:
        if self._one is not None:
            return f"<synkhronos TrainFunction: {self._one!r}>"
        return f"<synkhronos TrainFunction: {self.gradient!r}, all-reduce of {self.grad_shared}, {self.update!r}>"

    def _loop(self, inputs: Any, options: dict[str, Any]) -> synk.Run:
        if self._make_step is None:
            return super()._loop(inputs, options)
        self._step = self._step or self._make_step()
        return synk.loop(self._step, inputs, params=self._params, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a TrainFunction cannot be copied or pickled, because it belongs to its session; call make_train_function "
            "again. synkhronos.extensions.checkpoint saves the trained parameters"
        )

    def __call__(self, x_data: Any, y_data: Any, batch: Any = None, num_slices: int = 1, **hyperparameters: Any) -> Any:
        """Make one training step.

        Parameters
        ----------
        x_data, y_data : Data or array_like, of shape ``(n, ...)``
            The data, scattered over the ranks along axis 0. Lists if the variables were lists.
        batch : int, slice, or list / 1-d array of integers or booleans, optional
            The rows of the minibatch: the number of first rows, a range, or an index list. Default: all rows.
        num_slices : int
            The number of slices in which each rank computes its shard, to save memory.
        **hyperparameters
            The values of the other symbolic variables in the loss or in the rule, by name, such as that of a learning
            rate ``T.scalar("rate")``.

        Returns
        -------
        numpy.ndarray, shape ``()``
            The loss of the minibatch before the step.

        Raises
        ------
        SessionError
            If there is no session.
        TypeError
            If a hyperparameter is missing, or a keyword argument is not the name of one.
        ValueError
            If there are no data points, or the weights are not finite, negative, or all 0; the parameters are not
            changed.
        WorkerError
            If a rank fails.

        Examples
        --------
        >>> w, x, t = theano.shared(np.zeros(2), "w"), T.dmatrix("x"), T.dvector("t")
        >>> with synk.session(2):
        ...     loss = T.sqr(x.dot(w) - t).mean()
        ...     step = train.make_train_function(loss, [w], x, t, "sgd", T.dscalar("rate"))
        ...     print(float(step(np.eye(2), [1, 1], rate=0.5)), w.get_value())
        1.0 [0.5 0.5]
        """
        inputs = flatten((x_data, y_data), self._structure)
        check_names(hyperparameters, {*self._names[0], *self._names[1]})
        with synk.sequence():
            if self._one is not None and num_slices == 1:
                loss = self._one(*inputs, batch=batch, **hyperparameters)
                _check_counts(self._one)
            else:
                of_gradient, of_update = ({name: hyperparameters[name] for name in names} for names in self._names)
                loss = self.gradient(*inputs, batch=batch, num_slices=num_slices, **of_gradient)
                _check_counts(self.gradient)
                synk.all_reduce(self._reduced, op="avg", weights=self.gradient.counts)
                self.update(**of_update)
        return loss.result() if self._weight is None else weighted(*loss.result())
