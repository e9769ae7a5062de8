"""Base classes of training rules, and the rule without local updates."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal

import numpy as np

__all__ = ["BSP", "Average", "Rule"]

#: Intervals of settings, with their tests.
_INTERVALS = {
    "(0, inf)": lambda value: 0 < value < np.inf,
    "(0, 1]": lambda value: 0 < value <= 1,
    "[0, 1)": lambda value: 0 <= value < 1,
}


def _is_int(value: Any, least: int) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, (bool, np.bool_)) and value >= least


@dataclass(frozen=True)
class Rule:
    """Base class of all training rules.

    Attributes
    ----------
    engine : str
        How ranks exchange vectors: ``"average"``, ``"centre"``, ``"gossip"`` or ``"none"``.

    Examples
    --------
    >>> synk.rules.LocalSGD(every=10).name
    'LocalSGD(every=10, start=0)'
    """

    engine: ClassVar[Literal["average", "centre", "gossip", "none"]] = "none"

    @property
    def name(self) -> str:
        """The class and its settings."""
        return repr(self)

    def check(self, n_ranks: int) -> None:
        """Check that the settings are valid for this number of ranks.

        Parameters
        ----------
        n_ranks : int
            The number of ranks that take part.

        Raises
        ------
        ValueError
            If they are not.
        """
        if not _is_int(n_ranks, 1):
            raise ValueError(f"{self.name}: n_ranks is {n_ranks!r}; expected an int of at least 1")

    def plan(self, steps_per_epoch: int, epochs: int) -> Rule:
        """Return a copy of the rule for a training of known length, or the rule itself if it does not depend on it.

        Parameters
        ----------
        steps_per_epoch : int
            The number of steps that each rank makes in an epoch.
        epochs : int
            The number of epochs.

        Returns
        -------
        Rule
            The rule to use in this training.

        Raises
        ------
        ValueError
            If a number is not a positive int.
        """
        for name, value in (("steps_per_epoch", steps_per_epoch), ("epochs", epochs)):
            if not _is_int(value, 1):
                raise ValueError(f"{self.name}: {name} is {value!r}; expected an int of at least 1")
        return self

    def _check_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not _is_int(value, least):
            raise ValueError(f"{type(self).__name__}: {name} is {value!r}; expected an int of at least {least}")
        object.__setattr__(self, name, int(value))

    def _check_number(self, name: str, interval: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Real) or not _INTERVALS[interval](value):
            raise ValueError(f"{type(self).__name__}: {name} is {value!r}; expected a number in {interval}")
        object.__setattr__(self, name, float(value))  # a NumPy float64 would change the dtype of float32 vectors


@dataclass(frozen=True)
class BSP(Rule):
    """Bulk-synchronous training: a collective in every step, and no local updates.

    The step is an exact function, or has collectives, so that all ranks have the same parameters after it (Valiant
    1990, "A bridging model for parallel computation").

    Examples
    --------
    >>> synk.rules.BSP().engine
    'none'
    """


@dataclass(frozen=True)
class Average(Rule):
    """Rules by which all members of a group merge at the same step numbers; itself, the plain average.

    The message that a rank sends after step t is merged at the start of step t + W + 1, with the delay W, or at the end
    of the training. A message that is still pending when the next one is due to be sent is merged first.

    ``x <- mean of x over the members``; without a delay, this conserves the sum of x. The parameters are equal on all
    ranks at the beginning.

    Parameters
    ----------
    every : int
        The number of steps from one merge to the next.
    delay : int
        W, less than ``every``. `Average` itself drops the W steps made since a message was sent; `Outer` keeps them.

    Attributes
    ----------
    start : int
        The number of first steps, each of which is followed by an average without a delay.

    Raises
    ------
    ValueError
        If a setting is not an int of its range.

    Examples
    --------
    >>> rule = synk.rules.Average(every=4)
    >>> [rule.exchanges_at(step) for step in (3, 4)]
    [None, 'all']
    >>> rule.after(np.array([1.0]), np.array([1.0]), np.array([2.0]), 0, rule.begin(np.array([0.0]), 2))
    array([2.])
    """

    engine = "average"
    start = 0

    every: int
    delay: int = 0

    def __post_init__(self) -> None:
        self._check_int("every", 1)
        self._check_int("delay", 0)
        self._check_int("start", 0)
        if self.delay >= self.every:
            raise ValueError(
                f"{type(self).__name__}: delay is {self.delay} and every is {self.every}; expected a delay "
                "of less than every, so that a message is merged before the next one is sent: reduce delay"
            )

    def begin(self, x: np.ndarray, n_members: int) -> dict[str, Any]:
        """Return the state of a rank at the beginning of the training.

        Parameters
        ----------
        x : numpy.ndarray, shape (n,)
            The parameters, which are equal on all ranks.
        n_members : int
            The number of members of the group.

        Returns
        -------
        dict of str to numpy.ndarray or float
            The state: vectors of the shape and dtype of x, and numbers.
        """
        return {}

    def resume(self, state: dict[str, Any], x: np.ndarray, n_members: int, step: int) -> dict[str, Any]:
        """Return the state of a rank that continues from a checkpoint.

        The number of members may have changed. A rule whose state depends on it must override this.

        Parameters
        ----------
        state : dict
            The saved state of the rank. If the number of members has changed, the mean of all states.
        x : numpy.ndarray, shape (n,)
            The parameters of the rank.
        n_members : int
            The number of members of the group.
        step : int
            The number of steps that the rank has made.

        Returns
        -------
        dict of str to numpy.ndarray or float
            The state.
        """
        return dict(state)

    def exchanges_at(self, step: int) -> Literal["all", "node"] | None:
        """Return which ranks exchange messages after a step.

        Parameters
        ----------
        step : int
            The number of the step, from 1.

        Returns
        -------
        str or None
            ``"all"``: all ranks. ``"node"``: the ranks of each node. ``None``: there is no exchange.
        """
        return "all" if step <= self.start or (step - self.start) % self.every == 0 else None

    def delay_at(self, step: int) -> int:
        """Return the delay of the messages sent after a step.

        Parameters
        ----------
        step : int
            The number of the step, from 1.

        Returns
        -------
        int
            The number of steps that a rank makes between sending and merging.
        """
        return 0 if step <= self.start else self.delay

    def before(self, x: np.ndarray, state: dict[str, Any]) -> np.ndarray:
        """Return the message of a rank.

        Parameters
        ----------
        x : numpy.ndarray, shape (n,)
            The parameters of the rank.
        state : dict
            The state of the rank, of which entries may be replaced.

        Returns
        -------
        numpy.ndarray, shape (n,)
            A new vector.
        """
        return x.copy()

    def after(
        self, x: np.ndarray, sent: np.ndarray, received: np.ndarray, age: int, state: dict[str, Any]
    ) -> np.ndarray:
        """Return the parameters of a rank after a merge.

        Parameters
        ----------
        x : numpy.ndarray, shape (n,)
            The parameters of the rank.
        sent : numpy.ndarray, shape (n,)
            The message that the rank sent.
        received : numpy.ndarray, shape (n,)
            The mean of the messages of all members.
        age : int
            The number of steps that the rank made since it sent the message.
        state : dict
            The state of the rank, of which entries may be replaced.

        Returns
        -------
        numpy.ndarray, shape (n,)
            A new vector.
        """
        return received.copy()

    def on_epoch(self, mean_loss: float, state: dict[str, Any]) -> None:
        """Record the loss of an epoch; by default, do nothing.

        Parameters
        ----------
        mean_loss : float
            The mean loss of the epoch over all ranks.
        state : dict
            The state of the rank, of which entries may be replaced.
        """
