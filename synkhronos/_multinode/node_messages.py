"""Messages between node leaders: orders of the controller, the answers to them, and votes on exchanges of arrays."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._memory import FilePart
from synkhronos._multinode.shipping import Shipment
from synkhronos._native import native
from synkhronos._processes import Place
from synkhronos._rank import Failure
from synkhronos._utils.interrupts import deferred_interrupts


class Options(NamedTuple):
    """Checked arguments of `fork` that do not select devices.

    Attributes
    ----------
    profile_workers : bool
        Whether workers print the backend's profiles when they stop.
    replicate_rng : bool
        Whether all ranks have the same random streams.
    timeout : float or None
        Seconds that a rank may take for a command; ``None``: no limit.
    restart_workers : bool
        Whether dead workers are replaced.
    check_replicas : int
        Number of calls between two comparisons of the replicas; 0: they are not compared.
    wire_dtype : str or None
        Wire dtype of float32 arrays between nodes; ``None``: float32.
    seed : bytes or None
        Seed from which each rank derives its global random states; ``None``: ranks keep the states that they inherit.
    heartbeat : float
        Seconds of silence after which a node is lost.
    plan : str
        Plan of exact functions that name none: ``"rows"`` or ``"controller"``.
    """

    profile_workers: bool
    replicate_rng: bool
    timeout: float | None
    restart_workers: bool
    check_replicas: int
    wire_dtype: str | None
    seed: bytes | None
    heartbeat: float
    plan: str


class Ask(NamedTuple):
    """Order to report the devices of the node, as selected by the ``arguments`` of `fork`."""

    number: int
    arguments: tuple[Any, ...]


class Start(NamedTuple):
    """Order to start a rank on each device; ``sizes`` has the number of ranks of each node."""

    number: int
    devices: list[str]
    sizes: tuple[int, ...]
    master_rank: int
    options: Options


class Bring(NamedTuple):
    """Order to store a part of the data for the next `Do`; the answer contains an exception if that fails."""

    number: int
    shipment: Shipment


class Do(NamedTuple):
    """Order to execute a message of the controller on all ranks of the node.

    Attributes
    ----------
    message : bytes
        Pickled `Envelope`.
    shipment : Shipment
        Last part of the data that the command needs.
    refusal : Exception or None
        Exception with which the node answered an earlier `Bring`; the ranks then do not execute the message.
    waited : int
        Nanoseconds from the node's last answer until all nodes had answered.
    """

    number: int
    message: bytes
    shipment: Shipment
    refusal: Exception | None
    waited: int = 0


class Look(NamedTuple):
    """Order to open the parts of files, by key, that this node has, too, and use them as the memory of their keys."""

    number: int
    parts: dict[str, FilePart]


class Report(NamedTuple):
    """Order to report the monotonic clock, in nanoseconds, and counts of each rank's part of the shared heap."""

    number: int


class Stop(NamedTuple):
    """Order to end the ranks at once."""

    number: int


class Leave(NamedTuple):
    """Order to end the leader, because the controller ends."""

    number: int


class Answer(NamedTuple):
    """Answer to an order.

    Attributes
    ----------
    replies : object
        Data that the order asked for; for `Do`, the reply of each rank.
    took : int
        Nanoseconds that the ranks took; only for `Do`.
    lacks : bool
        Whether a part of the data that came with the order could not be stored.
    large : tuple of (int, int)
        Places of the replies that follow the answer in parts, and their sizes in bytes.
    """

    number: int
    replies: Any
    took: int = 0
    lacks: bool = False
    large: tuple[tuple[int, int], ...] = ()


_LARGE_REPLY = 1 << 16  # bytes


def without_large_replies(answer: Answer, is_aborted: bool) -> tuple[Answer, dict[int, np.ndarray]]:
    """Take the large replies of ranks out of an answer.

    Parameters
    ----------
    answer : Answer
    is_aborted : bool
        Whether the command was aborted. Large results are then left out, and failures stay in the answer.

    Returns
    -------
    answer : Answer
        With ``None`` in place of these replies.
    large : dict of int to uint8 array
        The replies that follow the answer, by their places.
    """
    replies = answer.replies if isinstance(answer.replies, list) else []
    large = {
        place: np.frombuffer(reply, np.uint8)
        for place, reply in enumerate(replies)
        if isinstance(reply, bytes) and len(reply) > _LARGE_REPLY
    }
    if is_aborted:
        large = {place: one for place, one in large.items() if not isinstance(pickle.loads(one.data), Failure)}
    if not large:
        return answer, {}
    rest = [None if place in large else reply for place, reply in enumerate(replies)]
    following = {} if is_aborted else large
    return answer._replace(replies=rest, large=tuple((place, one.size) for place, one in following.items())), following


class Lost(NamedTuple):
    """Answer of a node that has failed, because a rank is dead or silent or because ranks could not be started.

    Attributes
    ----------
    text : str
        Description of the failure; the full error message if ``rank`` is ``None``.
    rank : int or None
        Number of the failed rank on its node; ``None`` if no particular rank has failed.
    pid, exitcode, is_dead
        Process id of the failed rank, its exit code, and whether it is dead instead of silent.
    replaced : tuple of int
        Ranks on that node that were replaced by new processes; the other ranks still run. Empty: all ranks of the node
        have been ended.
    """

    number: int
    text: str
    rank: int | None = None
    pid: int = 0
    exitcode: int | None = None
    is_dead: bool = False
    replaced: tuple[int, ...] = ()


# -- large replies

_PART_BYTES = 1 << 20  # the time-out limits each part


class LargeReplies:
    """Large replies of ranks, which follow the answer of their leader in parts: pieces of the exchange of arrays.

    Parameters
    ----------
    exchange : Exchange
        Exchange of this leader with the others.
    first_tag, n_tags : int
        Tags of the parts are ``first_tag + 4 * i``, where ``i`` counts to ``n_tags`` again and again.
    is_receiver : bool
        Whether this leader receives, as the controller, or sends.
    """

    def __init__(self, exchange: native.Exchange, first_tag: int, n_tags: int, is_receiver: bool) -> None:
        self._exchange, self._first_tag, self._n_tags, self._is_receiver = exchange, first_tag, n_tags, is_receiver
        self._n_begun: Counter[int] = Counter()  # number of parts, by the other leader's node
        # place, content (or why there is no memory for it) and parts of each reply, by the other leader's node
        self._replies: dict[int, list[tuple[int, np.ndarray | MemoryError, list[native.Piece]]]] = {}

    def send(self, large: dict[int, np.ndarray]) -> None:
        """Begin to send replies, by their places, to the controller."""
        self._replies[0] = [(place, content, self._begin(0, _parts_of(content))) for place, content in large.items()]

    def receive(self, node: int, large: Sequence[tuple[int, int]]) -> None:
        """Begin to receive replies with these places and sizes from another leader.

        If there is no memory for one, its parts are received one over the other, and `filled_in` raises the error.
        """
        self._replies[node] = []
        for place, n_bytes in large:
            content: np.ndarray | MemoryError
            try:
                content = np.empty(n_bytes, np.uint8)
                parts = _parts_of(content)
            except MemoryError as error:
                content, scratch = error, np.empty(_PART_BYTES, np.uint8)
                parts = [scratch[: min(_PART_BYTES, n_bytes - start)] for start in range(0, n_bytes, _PART_BYTES)]
            self._replies[node].append((place, content, self._begin(node, parts)))

    def _begin(self, node: int, parts: Sequence[np.ndarray]) -> list[native.Piece]:
        """Begin to exchange parts of a reply with another leader."""
        begun = []
        for part in parts:
            tag = self._first_tag + 4 * (self._n_begun[node] % self._n_tags)
            self._n_begun[node] += 1
            message = [(node, part)]
            sent, received = ([], message) if self._is_receiver else (message, [])
            begun.append(self._exchange.begin(tag, sent, received, [], [], None, None, False))
        return begun

    def cancel(self) -> None:
        """Send the rest as empty messages, because the controller does not read it."""
        if not self._is_receiver:
            for part in self._parts():
                part.fail()

    def drop(self) -> None:
        """Forget the replies; parts that are still in transfer are completed."""
        self.cancel()
        self._replies.clear()

    def n_missing(self) -> int:
        """Return the number of parts that are not complete."""
        return sum(not part.is_complete for part in self._parts())

    def _parts(self) -> list[native.Piece]:
        return [part for replies in self._replies.values() for _, _, parts in replies for part in parts]

    def filled_in(self, node: int, replies: Sequence[bytes | None]) -> list[bytes | None]:
        """Return the replies of an answer with the large ones in their places, unless these were cancelled.

        Raises
        ------
        MemoryError
            If there was no memory for a reply.
        """
        full = list(replies)
        for place, content, parts in self._replies.get(node, ()):
            if isinstance(content, MemoryError):
                raise content
            full[place] = None if any(part.has_failed for part in parts) else content.tobytes()
        return full


def _parts_of(content: np.ndarray) -> list[np.ndarray]:
    return [content[start : start + _PART_BYTES] for start in range(0, content.size, _PART_BYTES)]


# -- votes

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
