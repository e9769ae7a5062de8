"""Learning rate schedules: linear scaling and warm-up, for minibatches that grow with the number of ranks.

If a minibatch has k times as many rows, the learning rate is multiplied by k. In the first steps it rises from the
original value to the new one (P. Goyal et al. (2017), Accurate, large minibatch SGD: training ImageNet in 1 hour,
arXiv:1706.02677).
"""

from typing import Any, Callable

import numpy as np

import synkhronos as synk
from synkhronos._backends import shared

__all__ = ["Schedule", "linear_scaling", "warm_up"]


def linear_scaling(rate: float, factor: float) -> float:
    """Return the learning rate for a minibatch that is ``factor`` times as large: ``rate * factor``.

    Parameters
    ----------
    rate : float
        The learning rate of the original minibatch.
    factor : float
        The new number of rows divided by the original one.

    Returns
    -------
    float
        The learning rate of the larger minibatch.

    Raises
    ------
    ValueError
        If the rate or the factor is not a positive number.

    References
    ----------
    P. Goyal et al. (2017), Accurate, large minibatch SGD: training ImageNet in 1 hour, arXiv:1706.02677, section 2.1.

    Examples
    --------
    >>> schedules.linear_scaling(0.125, 4)
    0.5
    """
    for name, value in (("rate", rate), ("factor", factor)):
        if isinstance(value, bool) or not np.isreal(value) or not 0 < value < np.inf:
            raise ValueError(f"{name} is {value!r}; expected a positive number")
    return rate * factor


def warm_up(rate: float, factor: float, n_steps: int) -> Callable[[int], float]:
    """Make a schedule that raises a learning rate linearly to ``rate * factor`` in the first ``n_steps`` steps.

    Parameters
    ----------
    rate : float
        The learning rate of the first step, which is that of the original minibatch.
    factor : float
        The new number of rows divided by the original one. If each rank has as many rows as the serial program, this is
        the number of ranks.
    n_steps : int
        The number of steps in which the rate rises. Goyal et al. use the number of steps in five epochs.

    Returns
    -------
    callable
        ``f(step)`` returns the rate of a step, counted from 0: ``rate * (1 + (factor - 1) * min(1, step / n_steps))``.

    Raises
    ------
    ValueError
        If the rate or the factor is not a positive number, or ``n_steps`` is not a positive int.

    References
    ----------
    P. Goyal et al. (2017), Accurate, large minibatch SGD: training ImageNet in 1 hour, arXiv:1706.02677, section 2.2.

    Examples
    --------
    >>> rate = schedules.warm_up(0.125, factor=3, n_steps=2)
    >>> [rate(step) for step in range(4)]
    [0.125, 0.25, 0.375, 0.375]
    """
    linear_scaling(rate, factor)
    if isinstance(n_steps, bool) or not hasattr(n_steps, "__index__") or n_steps < 1:
        raise ValueError(f"n_steps is {n_steps!r}; expected an int of at least 1")
    return lambda step: rate * (1 + (factor - 1) * min(1.0, step / n_steps))


class Schedule:
    """Learning rate in a shared variable, which changes from step to step and is the same on every rank.

    Parameters
    ----------
    rate : callable
        ``rate(step)`` returns the learning rate of a step, as the result of `warm_up` does.
    step : int
        The number of the first step; more than 0 if a training is continued.
    dtype : str
        The dtype of the parameters.

    Attributes
    ----------
    variable : shared variable, shape ``()``
        The learning rate, for an update rule.
    step : int
        The number of the next training step.

    Examples
    --------
    >>> x, t, w = T.dmatrix("x"), T.dvector("t"), theano.shared(np.zeros(2), "w")
    >>> with synk.session(2) as n_ranks:
    ...     rate = schedules.Schedule(schedules.warm_up(0.125, n_ranks, 2))
    ...     step = train.make_train_function(T.sqr(x.dot(w) - t).mean(), [w], x, t, updates.sgd, rate.variable)
    ...     for batch in (slice(0, 2), slice(2, 4)):
    ...         loss = step(np.eye(4)[:, :2], np.ones(4), batch=batch)
    ...         rate.advance()
    >>> rate
    <synkhronos Schedule: 0.25 in step 2>
    """

    def __init__(self, rate: Callable[[int], float], step: int = 0, dtype: str = "float64") -> None:
        self.step = step
        self._rate = rate
        self.variable: Any = shared(np.asarray(rate(step), dtype), "learning_rate")

    def __repr__(self) -> str:
        return f"<synkhronos Schedule: {self._rate(self.step):g} in step {self.step}>"

    def advance(self) -> None:
        """Advance to the next step, and set the learning rate on every rank if it changes.

        Raises
        ------
        SessionError
            If the learning rate changes and there is no session; then the step stays the same.
        WorkerError
            If a rank fails.

        Examples
        --------
        >>> with synk.session(2):
        ...     rate = schedules.Schedule(schedules.warm_up(0.125, factor=2, n_steps=1))
        ...     rate.advance()
        ...     print(synk.get_value(1, rate.variable))
        0.25
        """
        before, after = self._rate(self.step), self._rate(self.step + 1)
        if after != before:
            synk.broadcast(self.variable, np.asarray(after, self.variable.dtype))
        self.step += 1
