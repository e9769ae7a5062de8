"""Votes of node leaders, by which they agree on exchanges of arrays."""

from __future__ import annotations

from typing import Any, Callable

from synkhronos._processes import Place
from synkhronos._utils.interrupts import deferred_interrupts

_MOST_DIRECT = 3  # leaders that send their votes to all others; with as many, a tree would not send fewer messages


class Votes:
    """Votes of all leaders, which pass them on.

    Up to three leaders send their votes to all others. More leaders form a binomial tree: the parent of a leader has
    its number without the lowest bit that is set. Each sends its parent the votes of its subtree, and, when it has all
    votes, sends these to its children. So a leader sends at most ⌈log2(n)⌉ messages, and the leader that is the root
    has all votes before any other.

    Parameters
    ----------
    node, n_nodes : int
        Number of this leader, and number of leaders.
    send : callable
        ``send(node, message)`` sends ``(place, votes)`` to another leader, for its method `take`.
    """

    def __init__(self, node: int, n_nodes: int, send: Callable[[int, Any], None]) -> None:
        self._node, self._n_nodes, self._send = node, n_nodes, send
        lowest = node & -node or 1 << n_nodes.bit_length()
        self._below = range(node, min(n_nodes, node + lowest))  # this leader, and those below it in the tree
        self._children = [child for i in range(lowest.bit_length() - 1) if (child := node + (1 << i)) < n_nodes]
        self._of: dict[Place, dict[int, Any]] = {}
        self._n_sent: dict[Place, tuple[int, int]] = {}  # numbers of votes that were sent to the parent and children

    def of(self, place: Place) -> dict[int, Any]:
        """Return the votes that have arrived, by leader."""
        return self._of.setdefault(place, {})

    def take(self, place: Place, votes: dict[int, Any]) -> None:
        """Add votes that another leader has sent."""
        self.of(place).update(votes)

    def cast(self, place: Place, vote: Any) -> None:
        """Vote, and pass the votes on that have arrived before."""
        self.take(place, {self._node: vote})
        if self._n_nodes <= _MOST_DIRECT:
            for other in range(self._n_nodes):
                if other != self._node:
                    self._send(other, (place, {self._node: vote}))
        self.pass_on(place)

    def pass_on(self, place: Place, is_late: bool = False) -> None:
        """Pass on the votes of this leader's subtree if it has voted and they are complete, or if ``is_late``."""
        votes = self.of(place)
        if self._n_nodes <= _MOST_DIRECT or self._node not in votes:
            return
        up, down = self._n_sent.get(place, (0, 0))
        own = {node: votes[node] for node in self._below if node in votes}
        is_due = up < len(own) and (is_late or len(own) == len(self._below))
        is_complete = down < len(votes) == self._n_nodes
        if not is_due and not is_complete:
            return
        with deferred_interrupts():
            self._n_sent[place] = len(own), len(votes) if is_complete else down
            if is_due and self._node:
                self._send(self._node & (self._node - 1), (place, own))
            if is_complete:
                for child in self._children:
                    self._send(child, (place, votes))

    def drop(self, place: Place) -> None:
        """Drop the votes of a place."""
        self._of.pop(place, None)
        self._n_sent.pop(place, None)

    def drop_before(self, number: int, kept: Place | None) -> None:
        """Drop the votes of commands with lower numbers, except those of one place."""
        for place in [one for one in (*self._of, *self._n_sent) if one[0] < number and one != kept]:
            self.drop(place)
