"""Training rules by which a rank exchanges with one other party: a centre in shared memory, or a random rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.rules.base import Rule

__all__ = ["ASGD", "EAMSGD", "EASGD", "Centre", "GoSGD", "Gossip"]


@dataclass(frozen=True)
class Centre(Rule, ABC):
    """Base class of rules by which each rank exchanges with a centre in shared memory, at its own pace.

    Exchanges are elementwise, so that they can take place chunk by chunk. Ranks and the centre start with equal
    parameters.

    On several nodes, each node has a centre, with which its ranks exchange. The node leaders average the centres each
    time that their nodes have begun ``nodes_every`` steps for each of their ranks, whichever ranks make these steps. A
    leader waits for the others; the other ranks go on, and what they add to their centre meanwhile is kept::

        s = c;  c <- c + (mean of s over the nodes - s)

    Conserved: the sum of c over the nodes. The result of the training is its mean, on all nodes. This is the tree of
    Zhang (2016), "Distributed stochastic optimization for deep learning", arXiv:1605.02216, with averages on its upper
    level.

    Parameters
    ----------
    every : int
        The number of steps of a rank from one of its exchanges to the next.

    Attributes
    ----------
    nodes_every : int
        The number of steps of each rank from one average of the nodes' centres to the next; not used on one node.

    Raises
    ------
    ValueError
        If a number is not a positive int.

    Examples
    --------
    >>> class Swap(synk.rules.Centre):
    ...     def meet(self, x, centre, state):
    ...         return centre.copy(), x.copy()
    >>> Swap(every=5).meet(np.array([1.0]), np.array([2.0]), {})
    (array([2.]), array([1.]))
    """

    engine = "centre"
    nodes_every = 100

    every: int = 10

    def __post_init__(self) -> None:
        self._check_int("every", 1)
        self._check_int("nodes_every", 1)

    def begin(self, x: np.ndarray, n_members: int) -> dict[str, Any]:
        """Return the state of a rank at the beginning of the training.

        Parameters
        ----------
        x : numpy.ndarray, shape (n,)
            The parameters, which are those of the centre.
        n_members : int
            The number of ranks that share the centre: those of the node.

        Returns
        -------
        dict of str to numpy.ndarray or float
            The state: vectors of the shape and dtype of x, and numbers.
        """
        return {}

    @abstractmethod
    def meet(self, x: np.ndarray, centre: np.ndarray, state: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the parameters of a rank and of the centre after an exchange.

        Parameters
        ----------
        x : numpy.ndarray, shape (m,)
            The parameters of the rank, or a slice of them.
        centre : numpy.ndarray, shape (m,)
            The same slice of the centre.
        state : dict
            The numbers of the state, and the same slice of each of its vectors, into which `meet` writes.

        Returns
        -------
        x, centre : numpy.ndarray, shape (m,)
            New vectors.
        """


@dataclass(frozen=True)
class ASGD(Centre):
    """Asynchronous SGD: each rank adds the change of its parameters to the centre, and continues from the centre.

    ``d = x - last; c <- c + scale d; x <- c; last <- c``. Dean et al. (2012), "Large scale distributed deep networks"
    (Downpour SGD), NIPS; as in Theano-MPI, arXiv:1605.08325. Conserved: the centre is x0 +
    scale times the sum of all d. On several nodes, see `Centre`.

    Parameters
    ----------
    every : int
        The number of steps of a rank between its exchanges.
    scale : float or None
        The share of the change that the centre adds, in (0, 1]. ``None``: 1/n for n ranks of a node. Downpour SGD has
        1, which often diverges with many ranks or many steps between exchanges.
    nodes_every : int
        The number of steps of each rank between two averages of the nodes' centres.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Examples
    --------
    >>> rule = synk.rules.ASGD(every=10)
    >>> state = rule.begin(np.array([0.0]), n_members=2)
    >>> rule.meet(np.array([4.0]), np.array([1.0]), state)
    (array([3.]), array([3.]))
    """

    scale: float | None = None
    nodes_every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None:
            self._check_number("scale", "(0, 1]")

    def begin(self, x: np.ndarray, n_members: int) -> dict[str, Any]:
        """Return the parameters after the last exchange, and the scale."""
        return {"last": x.copy(), "scale": 1 / int(n_members) if self.scale is None else self.scale}

    def meet(self, x: np.ndarray, centre: np.ndarray, state: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Add the scaled change to the centre, and copy the centre."""
        new = centre + float(state["scale"]) * (x - state["last"])
        state["last"][...] = new
        return new.copy(), new


@dataclass(frozen=True)
class EASGD(Centre):
    """Elastic averaging SGD: a rank and the centre attract each other.

    ``d = alpha (x - c); x <- x - d; c <- c + d``. Zhang, Choromanska, LeCun (2015), "Deep learning with elastic
    averaging SGD", arXiv:1412.6651. Each exchange conserves x + c. On several nodes, see `Centre`.

    Parameters
    ----------
    every : int
        The number of steps of a rank between its exchanges.
    alpha : float or None
        The share of the distance, in (0, 1]. ``None``: beta/n for n ranks of a node.
    beta : float
        The paper's beta, above 0 and at most the number of ranks of a node; not used where alpha is given.
    nodes_every : int
        The number of steps of each rank between two averages of the nodes' centres.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Examples
    --------
    >>> rule = synk.rules.EASGD(every=10, beta=0.5)
    >>> rule.meet(np.array([4.0]), np.array([0.0]), rule.begin(np.array([0.0]), n_members=2))
    (array([3.]), array([1.]))
    """

    alpha: float | None = None
    beta: float = 0.9
    nodes_every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            self._check_number("alpha", "(0, 1]")
        self._check_number("beta", "(0, inf)")

    def check(self, n_ranks: int) -> None:
        """Check that the share of the distance is at most 1."""
        super().check(n_ranks)
        if self.alpha is None and self.beta > n_ranks:
            raise ValueError(
                f"{self.name}: beta is {self.beta} with {n_ranks} ranks; expected at most the number of ranks, because "
                "alpha = beta / n_ranks is at most 1: reduce beta, or set alpha"
            )

    def begin(self, x: np.ndarray, n_members: int) -> dict[str, Any]:
        """Return alpha."""
        return {"alpha": self.beta / int(n_members) if self.alpha is None else self.alpha}

    def meet(self, x: np.ndarray, centre: np.ndarray, state: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Move both by the same distance."""
        distance = float(state["alpha"]) * (x - centre)
        return x - distance, centre + distance


@dataclass(frozen=True)
class EAMSGD(EASGD):
    """Elastic averaging SGD whose ranks use Nesterov momentum.

    The exchange is that of `EASGD`, and conserves x + c. The momentum is part of the step that a rank makes: build the
    step with ``synkhronos.extensions.updates.nesterov_momentum`` and this ``momentum``. The rule does not see the step,
    and cannot check that it does so; it checks the range alone. Zhang, Choromanska, LeCun (2015), arXiv:1412.6651.

    Parameters
    ----------
    every, alpha, beta, nodes_every : int, float or None, float, int
        As in `EASGD`.
    momentum : float
        The momentum of the step, in [0, 1), for the program and for messages; the exchange does not use it.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Examples
    --------
    >>> synk.rules.EAMSGD(every=10, momentum=0.5).name
    'EAMSGD(every=10, alpha=None, beta=0.9, nodes_every=100, momentum=0.5)'
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("momentum", "[0, 1)")


@dataclass(frozen=True)
class Gossip(Rule, ABC):
    """Base class of rules by which ranks send parameters and weights to random other ranks.

    After each step a rank sends, with some probability, its parameters and the second weight of `split` to one of the
    others, and keeps the first weight. If this rank has not yet received an earlier message of the sender, nothing is
    sent, and the weight is not split. Before each step a rank merges all messages that have arrived. At the end of the
    training all messages are merged. The weights are 1/n for n ranks at the beginning.

    On several nodes, ranks send to others of their node. Each time that their nodes have begun ``nodes_every`` steps
    for each of their ranks, whichever ranks make these steps, the node leaders wait for each other, and exchange for
    their nodes: each keeps the first weight of `split`, sends the second one, w', and all leaders merge one message::

        w_nodes = mean of w' over the nodes;  x_nodes = mean of w' x over the nodes / w_nodes

    Conserved, as by messages between two ranks: the sums of w and of w x.

    Parameters
    ----------
    probability : float
        The probability to send after a step, in (0, 1].

    Attributes
    ----------
    nodes_every : int
        The number of steps of each rank from one exchange between nodes to the next; not used on one node.

    Raises
    ------
    ValueError
        If a setting is not in its range.

    Examples
    --------
    >>> class Replace(synk.rules.Gossip):
    ...     def merge(self, x, weight, other, other_weight):
    ...         return other.copy(), weight + other_weight
    >>> Replace(probability=0.5).split(0.5)
    (0.25, 0.25)
    """

    engine = "gossip"
    nodes_every = 100

    probability: float = 0.01

    def __post_init__(self) -> None:
        self._check_number("probability", "(0, 1]")
        self._check_int("nodes_every", 1)

    def split(self, weight: float) -> tuple[float, float]:
        """Return the weights that a sender keeps and sends: two halves.

        Parameters
        ----------
        weight : float
            The weight of the sender.

        Returns
        -------
        kept, sent : float
            Their sum is the weight.
        """
        return float(weight) / 2, float(weight) / 2

    @abstractmethod
    def merge(self, x: np.ndarray, weight: float, other: np.ndarray, other_weight: float) -> tuple[np.ndarray, float]:
        """Return the parameters and the weight of a receiver.

        Parameters
        ----------
        x : numpy.ndarray, shape (n,)
            The parameters of the receiver.
        weight : float
            Its weight.
        other : numpy.ndarray, shape (n,)
            The parameters in the message.
        other_weight : float
            The weight in the message.

        Returns
        -------
        x : numpy.ndarray, shape (n,)
            A new vector.
        weight : float
            The new weight.
        """


@dataclass(frozen=True)
class GoSGD(Gossip):
    """Gossip SGD: weighted averages with messages of random ranks.

    A message of the weight w' changes the parameters and the weight of its receiver::

        x <- (w x + w' x') / (w + w');  w <- w + w'

    Blot, Picard, Cord, Thome (2016), "Gossip training for deep learning", arXiv:1611.09726. Conserved, messages on
    their way included: the sum of w, which is 1, and the sum of w x. On several nodes, see `Gossip`.

    Parameters
    ----------
    probability : float
        The probability to send after a step, in (0, 1].
    nodes_every : int
        The number of steps of each rank between two exchanges of the node leaders.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Examples
    --------
    >>> synk.rules.GoSGD(probability=0.1).merge(np.array([1.0]), 0.25, np.array([4.0]), 0.5)
    (array([3.]), 0.75)
    """

    nodes_every: int = 100

    def merge(self, x: np.ndarray, weight: float, other: np.ndarray, other_weight: float) -> tuple[np.ndarray, float]:
        """Return the average with the message, weighted by the weights, and the sum of the weights."""
        own, others = float(weight), float(other_weight)
        return (own * x + others * other) / (own + others), own + others
