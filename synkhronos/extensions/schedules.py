"""Learning rates that change, as shared scalars: linear scaling and warm-up, for minibatches that grow with the ranks.

P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677 (2017): with k times the
rows in a minibatch, k times the learning rate; in the first steps it rises to that from what it was.
"""

from typing import Any, Callable

import numpy as np

import synkhronos as synk
from synkhronos._backends import shared

__all__ = ["Schedule", "linear_scaling", "warm_up"]


def linear_scaling(rate: float, factor: float) -> float:
    """Scale a learning rate for a minibatch that is ``factor`` times as large: ``rate * factor``.

    Raises
    ------
    ValueError
        If the rate or the factor is not a positive number.

    Examples
    --------
    >>> schedules.linear_scaling(0.125, 4)
    0.5
    """
    for name, value in (("rate", rate), ("factor", factor)):
        if isinstance(value, bool) or not np.isreal(value) or not 0 < value < np.inf:
            raise ValueError(f"{name} must be a positive number; got {value!r}")
    return rate * factor


def warm_up(rate: float, factor: float, n_steps: int) -> Callable[[int], float]:
    """Let a learning rate rise to ``rate * factor``, by the same amount in each of the first ``n_steps`` steps.

    Parameters
    ----------
    rate : float
        Of the first step: the learning rate of the minibatch before it grew.
    factor : float
        By how much the minibatch has grown: the number of ranks, where each has as many rows as the serial program.
    n_steps : int
        In how many steps. Goyal et al. take those of five epochs.

    Returns
    -------
    callable
        Gives the rate of each step, of which the first is 0: ``rate * (1 + (factor - 1) * min(1, step / n_steps))``.

    Raises
    ------
    ValueError
        If the rate or the factor is not a positive number, or there are no steps.

    Examples
    --------
    >>> rate = schedules.warm_up(0.125, factor=3, n_steps=2)
    >>> [rate(step) for step in range(4)]
    [0.125, 0.25, 0.375, 0.375]
    """
    linear_scaling(rate, factor)
    if isinstance(n_steps, bool) or not hasattr(n_steps, "__index__") or n_steps < 1:
        raise ValueError(f"n_steps must be a number of steps, at least 1; got {n_steps!r}")
    return lambda step: rate * (1 + (factor - 1) * min(1.0, step / n_steps))


class Schedule:
    """A learning rate that changes from step to step, the same on every rank.

    Parameters
    ----------
    rate : callable
        ``rate(step)`` is the learning rate of each step, such as `warm_up` makes.
    step : int
        The first one: more than 0 where a training goes on.
    dtype : str
        That of the parameters.

    Attributes
    ----------
    variable : shared variable
        A scalar: the learning rate, for an update rule.
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
        """Go to the next step, and give every rank its learning rate, if that is another.

        Raises
        ------
        SessionError
            Without a session; then the step is as it was.
        """
        before, after = self._rate(self.step), self._rate(self.step + 1)
        if after != before:
            synk.broadcast(self.variable, np.asarray(after, self.variable.dtype))
        self.step += 1
