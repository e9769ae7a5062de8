"""Training rules that merge means: local SGD, outer optimizers, averages of groups, and DASO's schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from synkhronos.rules.base import Average, Rule

__all__ = ["BMUF", "DASO", "DiLoCo", "Hierarchical", "LocalSGD", "Outer", "SlowMo"]


@dataclass(frozen=True)
class LocalSGD(Average):
    """Local SGD and post-local SGD: ``x <- mean of x`` after every H-th step, and after each of the first steps.

    Lin, Stich, Patel, Jaggi (2020), "Don't use large mini-batches, use local SGD", arXiv:1808.07217. The sum of x is
    conserved.

    Parameters
    ----------
    every : int
        H, counted from the end of the first steps.
    start : int
        The number of first steps, each of which is followed by an average: post-local SGD.

    Raises
    ------
    ValueError
        If a setting is not an int of its range.

    Examples
    --------
    >>> rule = synk.rules.LocalSGD(every=3, start=2)
    >>> [step for step in range(1, 10) if rule.exchanges_at(step)]
    [1, 2, 5, 8]
    """

    delay: int = field(default=0, init=False, repr=False)
    start: int = 0


@dataclass(frozen=True)
class Outer(Average):
    """An outer optimizer on the mean of the members, with a delay if wanted.

    With the snapshots s that were sent, their mean s̄, and the outer iterate c, which is equal on all members::

        D = c - s̄;  v <- momentum v + D
        c <- c - lr (D + momentum v)  if nesterov, else  c - lr v

    Then the parameters continue by ``merge``. With the rate 1 and no momentum, c is s̄.

    Parameters
    ----------
    every, delay : int
        As in `Average`.
    lr : float
        The rate of the outer optimizer, above 0.
    momentum : float
        Its momentum, in [0, 1).
    nesterov : bool
        Whether it has Nesterov momentum, in the form of ``torch.optim.SGD``.
    merge : str
        ``"average"`` or ``"keep"``, two names of one formula: ``x <- c`` without a delay, and ``x <- c + (x - s)`` with
        one, which keeps the steps made since sending. ``"delta"``: ``x <- x + (s̄ - s)``, which conserves the sum of x.
        ``"pull"``: ``x <- (1 - alpha) x + alpha s̄``, for a delay close to ``every``, and for members with different
        data. The last two take no lr or momentum.
    alpha : float
        The share of s̄ for ``"pull"``, in (0, 1].
    start : int
        The number of first steps, each of which is followed by ``x <- mean of x``.

    Raises
    ------
    ValueError
        If a setting is out of range, or the settings exclude each other.

    Examples
    --------
    >>> rule = synk.rules.Outer(every=4, delay=1, merge="delta")
    >>> rule.after(np.array([5.0]), np.array([4.0]), np.array([2.0]), 1, rule.begin(np.array([0.0]), 2))
    array([3.])
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    merge: Literal["average", "delta", "pull", "keep"] = "average"
    alpha: float = 0.5
    start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("lr", "(0, inf)")
        self._check_number("momentum", "[0, 1)")
        self._check_number("alpha", "(0, 1]")
        where = type(self).__name__
        if self.merge not in ("average", "delta", "pull", "keep"):
            raise ValueError(f"{where}: merge is {self.merge!r}; expected 'average', 'delta', 'pull' or 'keep'")
        if self._optimizes and self.merge in ("delta", "pull"):
            raise ValueError(
                f"{where}: merge is {self.merge!r}, lr is {self.lr} and momentum is {self.momentum}; expected lr=1 and "
                f"momentum=0, which this merge does not use: leave them out, or use merge='keep'"
            )

    @property
    def _optimizes(self) -> bool:
        """Whether there is an outer optimizer, and c differs from the mean."""
        return (self.lr, self.momentum) != (1.0, 0.0)

    def begin(self, x: np.ndarray, n_members: int) -> dict[str, Any]:
        """Return the number of first averages that are left, and for an outer optimizer c and v."""
        state: dict[str, Any] = {"starting": float(self.start)}
        return {**state, "c": x.copy(), "v": np.zeros_like(x)} if self._optimizes else state

    def resume(self, state: dict[str, Any], x: np.ndarray, n_members: int, step: int) -> dict[str, Any]:
        """Return the saved state, with the number of first averages that are left after this step."""
        return {**state, "starting": float(max(0, self.start - step))}

    def after(
        self, x: np.ndarray, sent: np.ndarray, received: np.ndarray, age: int, state: dict[str, Any]
    ) -> np.ndarray:
        """Update the outer iterate, and merge."""
        if state["starting"]:
            state["starting"] -= 1
            if self._optimizes:
                state["c"] = received.copy()
            return received.copy()
        if self.merge == "delta":
            return x + (received - sent)
        if self.merge == "pull":
            return (1 - self.alpha) * x + self.alpha * received
        new = received
        if self._optimizes:
            change = state["c"] - received
            state["v"] = self.momentum * state["v"] + change
            new = state["c"] - self.lr * (change + self.momentum * state["v"] if self.nesterov else state["v"])
            state["c"] = new
        return new + (x - sent) if age else new.copy()


@dataclass(frozen=True)
class DiLoCo(Outer):
    """DiLoCo: Nesterov momentum on the mean change of many local steps; the inner optimizer's state stays local.

    In the notation of `Outer`, ``D = c - s̄; v <- momentum v + D; c <- c - lr (D + momentum v)``. Then ``x <- c``, or
    with a delay ``x <- c + (x - s)``. Nothing is conserved. Douillard et al. (2023), arXiv:2311.08105; with a delay,
    compare Douillard et al. (2025), arXiv:2501.18512.

    Parameters
    ----------
    every : int
        The number of local steps; the paper uses 50 to 500.
    delay : int
        The number of steps during which the messages are on their way, less than ``every``.
    lr : float
        The outer rate, above 0.
    momentum : float
        The outer momentum, in [0, 1).

    Raises
    ------
    ValueError
        If a setting is out of range.

    Examples
    --------
    >>> rule = synk.rules.DiLoCo(every=50, lr=0.5, momentum=0.5)
    >>> state = rule.begin(np.array([4.0]), 2)
    >>> rule.after(np.array([2.0]), np.array([2.0]), np.array([0.0]), 0, state)
    array([1.])
    """

    every: int = 50
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = field(default=True, init=False, repr=False)
    merge: Literal["average", "delta", "pull", "keep"] = field(default="keep", init=False, repr=False)
    alpha: float = field(default=0.5, init=False, repr=False)
    start: int = field(default=0, init=False, repr=False)


@dataclass(frozen=True)
class SlowMo(Average):
    """Slow momentum on top of local SGD.

    ``u <- beta u + (c - x̄) / learning_rate; c <- c - alpha learning_rate u; x <- c``. Wang, Tantia, Ballas,
    Rabbat (2020), arXiv:1910.00643. With ``beta=0`` and ``alpha=1`` it is local SGD; else nothing is conserved.

    Parameters
    ----------
    every : int
        The number of local steps.
    learning_rate : float
        The learning rate of the local steps, above 0.
    beta : float
        The slow momentum, in [0, 1).
    alpha : float
        The slow learning rate, above 0.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Examples
    --------
    >>> rule = synk.rules.SlowMo(every=10, learning_rate=0.5)
    >>> state = rule.begin(np.array([4.0]), 2)
    >>> [rule.after(state["c"], state["c"], state["c"] - 1, 0, state) for merge in range(2)]
    [array([3.]), array([1.5])]
    """

    delay: int = field(default=0, init=False, repr=False)
    learning_rate: float = field()
    beta: float = 0.5
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("learning_rate", "(0, inf)")
        self._check_number("beta", "[0, 1)")
        self._check_number("alpha", "(0, inf)")

    def begin(self, x: np.ndarray, n_members: int) -> dict[str, Any]:
        """Return the outer iterate c and the slow momentum u."""
        return {"c": x.copy(), "u": np.zeros_like(x)}

    def after(
        self, x: np.ndarray, sent: np.ndarray, received: np.ndarray, age: int, state: dict[str, Any]
    ) -> np.ndarray:
        """Return the new outer iterate."""
        state["u"] = self.beta * state["u"] + (state["c"] - received) / self.learning_rate
        state["c"] = state["c"] - self.alpha * self.learning_rate * state["u"]
        return state["c"].copy()


@dataclass(frozen=True)
class BMUF(Average):
    """Blockwise model-update filtering.

    With the point c from which the members started: ``G = c - x̄; v <- eta v + zeta G; x <- c - v``, or with Nesterov
    momentum ``x <- c - (zeta G + eta v)``; then c is the new x. Chen, Huo (2016), "Scalable training of deep learning
    machines by incremental block training with intra-block parallel optimization and blockwise model-update filtering",
    ICASSP. With ``zeta=1`` and ``eta=0`` it is local SGD; else nothing is conserved.

    Parameters
    ----------
    every : int
        The number of local steps.
    zeta : float
        The block learning rate, above 0.
    eta : float or None
        The block momentum, in [0, 1). ``None``: 1 - 1/n for n members.
    nesterov : bool
        Whether to use Nesterov block momentum.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Examples
    --------
    >>> rule = synk.rules.BMUF(every=10)
    >>> state = rule.begin(np.array([4.0]), 2)
    >>> [rule.after(state["c"], state["c"], state["c"] - 1, 0, state) for merge in range(2)]
    [array([3.]), array([1.5])]
    """

    delay: int = field(default=0, init=False, repr=False)
    zeta: float = 1.0
    eta: float | None = None
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("zeta", "(0, inf)")
        if self.eta is not None:
            self._check_number("eta", "[0, 1)")

    def begin(self, x: np.ndarray, n_members: int) -> dict[str, Any]:
        """Return the starting point c, the filtered change v, and the block momentum."""
        eta = 1 - 1 / int(n_members) if self.eta is None else self.eta
        return {"c": x.copy(), "v": np.zeros_like(x), "eta": eta}

    def resume(self, state: dict[str, Any], x: np.ndarray, n_members: int, step: int) -> dict[str, Any]:
        """Return the saved state, with the block momentum for this number of members."""
        return {**state, "eta": self.begin(x, n_members)["eta"]}

    def after(
        self, x: np.ndarray, sent: np.ndarray, received: np.ndarray, age: int, state: dict[str, Any]
    ) -> np.ndarray:
        """Return the new starting point."""
        change, eta = self.zeta * (state["c"] - received), float(state["eta"])
        state["v"] = eta * state["v"] + change
        state["c"] = state["c"] - (change + eta * state["v"] if self.nesterov else state["v"])
        return state["c"].copy()


# -- groups, and DASO


def _default_periods() -> dict[int, Literal["all", "node"]]:
    return {4: "node", 16: "all"}


@dataclass(frozen=True)
class Hierarchical(Average):
    """Averages within each node, and less often over all ranks.

    ``x <- mean of x over the group`` of the largest period that divides the step; the other periods do not act in this
    step. The scheme is that of PyTorch's ``HierarchicalModelAverager`` and the hierarchical local SGD of Lin et al.
    (2020), arXiv:1808.07217. The sum of x is conserved.

    Parameters
    ----------
    periods : dict of int to str
        The group of each period in steps: ``"node"``, the ranks of each node, or ``"all"``. ``"all"`` occurs at least
        once.

    Attributes
    ----------
    every : int
        The smallest period.

    Raises
    ------
    ValueError
        If a period or a group is not valid, or no period averages over all ranks.

    Examples
    --------
    >>> rule = synk.rules.Hierarchical(periods={2: "node", 4: "all"})
    >>> [rule.exchanges_at(step) for step in range(1, 5)]
    [None, 'node', None, 'all']
    """

    every: int = field(default=1, init=False, repr=False)
    delay: int = field(default=0, init=False, repr=False)
    periods: Mapping[int, Literal["all", "node"]] = field(default_factory=_default_periods, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.periods, Mapping) or "all" not in self.periods.values():
            raise ValueError(
                f"Hierarchical: periods is {self.periods!r}; expected a dict with a period of the group 'all', without "
                "which ranks of different nodes never combine: add one"
            )
        for period, group in self.periods.items():
            if (
                isinstance(period, bool)
                or not hasattr(period, "__index__")
                or period < 1
                or group not in ("all", "node")
            ):
                raise ValueError(
                    f"Hierarchical: periods has {period!r}: {group!r}; expected an int of at least 1, "
                    "and 'node' or 'all'"
                )
        object.__setattr__(self, "every", min(self.periods))
        super().__post_init__()

    def exchanges_at(self, step: int) -> Literal["all", "node"] | None:
        """Return the group of the largest period that divides the step."""
        period = max((period for period in self.periods if step % period == 0), default=None)
        return None if period is None else self.periods[period]


@dataclass(frozen=True)
class DASO(Average):
    """Distributed asynchronous and selective optimization: delayed averages, whose periods follow the loss.

    Between P members, with the snapshots s, and W the number of steps made since they were sent::

        x <- (2 W x + sum of s) / (2 W + P)

    In the paper, the members are nodes, inside of which gradients are exact: on several nodes, use exact functions, or
    those with collectives. With other functions, the members are the ranks. Coquelin et al. (2021), arXiv:2104.05588.
    The schedule needs the lengths of `plan`:

    - In the first ``warmup`` and the last ``cooldown`` epochs, every batch is followed by an average without a
      delay: W is 0.
    - In the epochs between, messages are sent after every B-th batch of the epoch, and merged W batches later.
    - The last batch of each epoch merges the pending messages, and then averages x without a delay.
    - After an epoch between, a loss below 0.95 times the best one is good, and becomes the best. The third bad epoch in
      a row changes B and W: if B is more than 1, to B // 2 and to W - 1, or 1; else to 8 and 2.

    The sum of x is conserved where W is 0. HeAT, the authors' program, differs: it merges later than its weight says if
    W is at least B - 1, and it skips exchanges inside nodes. Here the delay is at most B - 1, so that at most one
    message is pending. The authors send bfloat16 in the blocking epochs; that is an option of the transport.

    Parameters
    ----------
    every, delay : int
        The first B and W.
    warmup, cooldown : int
        The numbers of first and last epochs in which every batch is averaged; these may be all epochs.
    steps_per_epoch, epochs : int or None
        The length of the training, which `plan` sets.

    Raises
    ------
    ValueError
        If a setting is out of range, or a method needs the length of the training and `plan` was not called.

    Notes
    -----
    `on_epoch` computes the next B and W from the state, and records them in this rule, which uses them in later epochs.
    Call it for each state; equal losses give equal periods. Each `plan` starts a new record; pickling keeps it.

    Examples
    --------
    >>> rule = synk.rules.DASO(warmup=1, cooldown=0, every=2).plan(steps_per_epoch=3, epochs=2)
    >>> [(step, rule.delay_at(step)) for step in range(1, 7) if rule.exchanges_at(step)]
    [(1, 0), (2, 0), (3, 0), (5, 1), (6, 0)]
    >>> rule.after(np.array([1.0]), np.array([0.0]), np.array([2.0]), 1, rule.begin(np.array([0.0]), 2))
    array([1.5])
    """

    every: int = 4
    delay: int = 1
    warmup: int = 4
    cooldown: int = 4
    steps_per_epoch: int | None = None
    epochs: int | None = None
    #: B and W of the epochs, counted from 0, from which on they apply.
    _cycles: dict[int, tuple[int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("warmup", 0)
        self._check_int("cooldown", 0)

    def plan(self, steps_per_epoch: int, epochs: int) -> Rule:
        """Return a copy with the schedule of a training of this length."""
        super().plan(steps_per_epoch, epochs)
        return dataclasses.replace(self, steps_per_epoch=int(steps_per_epoch), epochs=int(epochs))

    def _cycling(self, epoch: int) -> bool:
        if self.epochs is None:
            raise ValueError(f"{self.name}: epochs is None; expected the length of the training: call plan() first")
        return self.warmup <= epoch < self.epochs - self.cooldown

    def _batch(self, step: int) -> tuple[int, int, int, int]:
        """Return a step's batch in its epoch, from 1, the number of batches that follow, B and W."""
        if self.steps_per_epoch is None:
            raise ValueError(f"{self.name}: steps_per_epoch is None; expected an int: call plan() first")
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        latest = max((first for first in self._cycles if first <= epoch), default=None)
        every, delay = (self.every, self.delay) if latest is None else self._cycles[latest]
        if not self._cycling(epoch):
            every, delay = 1, 0
        return batch + 1, self.steps_per_epoch - batch - 1, every, delay

    def begin(self, x: np.ndarray, n_members: int) -> dict[str, Any]:
        """Return the number of members, and the plateau detector's state."""
        numbers = {
            "n_members": n_members,
            "epoch": 0,
            "best": np.inf,
            "bad": 0,
            "every": self.every,
            "delay": self.delay,
        }
        return {name: float(value) for name, value in numbers.items()}

    def resume(self, state: dict[str, Any], x: np.ndarray, n_members: int, step: int) -> dict[str, Any]:
        """Return the saved state with this number of members, and record B and W."""
        self._cycles[int(state["epoch"])] = (int(state["every"]), int(state["delay"]))
        return {**state, "n_members": float(n_members)}

    def exchanges_at(self, step: int) -> Literal["all", "node"] | None:
        """Return ``"all"`` after every B-th batch, and after the last one, of an epoch."""
        batch, left, every, _ = self._batch(step)
        return "all" if left == 0 or batch % every == 0 else None

    def delay_at(self, step: int) -> int:
        """Return W, or less where the next exchange comes earlier."""
        _, left, every, delay = self._batch(step)
        return min(delay, every - 1, left)

    def after(
        self, x: np.ndarray, sent: np.ndarray, received: np.ndarray, age: int, state: dict[str, Any]
    ) -> np.ndarray:
        """Return the mean of x and of the snapshots, weighted by the age."""
        if age == 0:
            return received.copy()
        members = float(state["n_members"])
        return (2 * int(age) * x + members * received) / (2 * int(age) + members)

    def on_epoch(self, mean_loss: float, state: dict[str, Any]) -> None:
        """Update the plateau detector, and record B and W of the next epoch."""
        epoch = int(state["epoch"])
        state["epoch"] = epoch + 1.0
        if self._cycling(epoch):
            good = mean_loss < state["best"] * 0.95
            state["best"] = float(mean_loss) if good else state["best"]
            state["bad"] = 0.0 if good else state["bad"] + 1
            if state["bad"] == 3:
                every, delay = int(state["every"]), int(state["delay"])
                every, delay = (every // 2, max(delay - 1, 1)) if every > 1 else (8, 2)
                state.update(bad=0.0, every=float(every), delay=float(delay))
        self._cycles[epoch + 1] = (int(state["every"]), int(state["delay"]))
