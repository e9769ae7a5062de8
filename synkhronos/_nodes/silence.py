"""Detect silent nodes: what one node concludes from the heartbeats that it receives, and from those that it misses.

Invariants
----------
* A node that was never heard from is not watched, because a firewall may drop its datagrams. Neither is one that left.
* Time counts only while this process runs. A process that was frozen, or a machine that was suspended, therefore does
  not take its own absence for the silence of others.
* A node that hears nobody, of two or more, or cannot send, is cut off itself: it blames no other node.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["NOBODY", "WARNING_SECONDS", "Loss", "Message", "Reason", "Silence"]

#: A warning is printed after so many seconds of silence.
WARNING_SECONDS = 2.0
#: In place of the number of a node.
NOBODY = 0xFFFF

_MOST_SECONDS = 0.5  # between two looks at the clock; any more, this process did not run
_RECENT_SECONDS = 1.0
_REFUSED_SECONDS = 0.5  # of silence with which a refused message means that a node has ended, and is no firewall's


class State(enum.IntEnum):
    """What is known about a node."""

    UNKNOWN = 0
    HEARD = 1
    LEFT = 2


class Reason(enum.IntEnum):
    """Why a node is lost."""

    SILENT = 0
    ENDED = 1  # none of its processes holds its socket
    CUT_OFF = 2  # this node itself: it hears nobody


class Loss(NamedTuple):
    """A lost node.

    Attributes
    ----------
    node : int
    reason : Reason
    observer : int
        The node that detected it.
    """

    node: int
    reason: Reason
    observer: int


class Message(NamedTuple):
    """One heartbeat.

    Attributes
    ----------
    sender : int
    leaves : bool
        Whether the sender sends no more, because its program ends.
    silent : int
        The node that the sender has heard nothing from for the longest time, if that is time to warn; or `NOBODY`.
    is_lost : bool
        Whether that node was silent for so long that it is lost.
    """

    sender: int
    leaves: bool = False
    silent: int = NOBODY
    is_lost: bool = False


class Silence:
    """What one node knows about the silence of others.

    Parameters
    ----------
    own : int
        The number of this node.
    states : memoryview of bytes
        The `State` of each node, in memory that outlives this process. A new process starts to count at 0.
    """

    def __init__(self, own: int, states: memoryview) -> None:
        self._own, self._states = own, states
        self._seconds = {node: 0.0 for node, state in enumerate(states) if state == State.HEARD}
        self._ended: set[int] = set()
        self._reports: dict[int, Message] = {}  # by sender, those that name a silent node
        self._warned: set[int] = set()
        self._can_send = True

    def advance(self, seconds: float) -> None:
        """Count time that has passed since the last look at the clock."""
        for node in self._seconds:
            self._seconds[node] += min(seconds, _MOST_SECONDS)

    def receive(self, messages: Iterable[Message]) -> None:
        """Evaluate heartbeats."""
        for message in messages:
            sender = message.sender
            if sender >= len(self._states):
                continue
            if message.leaves:
                self._states[sender] = State.LEFT
                self._seconds.pop(sender, None)
            elif self._states[sender] != State.LEFT:
                self._states[sender] = State.HEARD
                self._seconds[sender] = 0.0
                self._ended.discard(sender)
            self._reports.pop(sender, None)
            if not message.leaves and message.silent < len(self._states):
                self._reports[sender] = message

    def sent(self, refused: Iterable[int], can_send: bool) -> None:
        """Record which nodes refused a message, because nobody holds their sockets, and whether any could be sent."""
        self._ended.update(refused)
        self._can_send = can_send

    def report(self, limit: float) -> Message:
        """Return the next heartbeat of this node."""
        silent = max(self._quiet(), key=self._seconds.__getitem__, default=NOBODY)
        if silent == NOBODY or self._is_cut_off():
            return Message(self._own)
        return Message(self._own, silent=silent, is_lost=self._seconds[silent] > limit)

    def warnings(self) -> dict[int, int]:
        """Return the nodes that fell silent since the last call, each with the node that noticed it.

        Of the nodes that hear each other only the first warns, so that a user reads one warning.
        """
        observers: Mapping[int, int] = {}
        quiet = self._quiet()
        if self._is_cut_off():
            observers = {} if self._own else {self._own: self._own}
        elif all(node in quiet for node in self._seconds if node < self._own):
            reports = {
                report.silent: sender for sender, report in self._reports.items() if self._is_watched(report.silent)
            }
            observers = {**reports, **dict.fromkeys(quiet, self._own)}
        new = {node: observer for node, observer in observers.items() if node not in self._warned}
        self._warned = set(observers)
        return new

    def losses(self, limit: float) -> dict[int, Loss]:
        """Return the lost nodes, by number; node 0 also counts those that other nodes have lost.

        Parameters
        ----------
        limit : float
            The seconds of silence after which a node is lost.
        """
        if any(seconds > limit for seconds in self._seconds.values()) and self._is_cut_off():
            return {node: Loss(self._own, Reason.CUT_OFF, self._own) for node in (0, self._own)}
        found = {}
        if not self._own:
            for sender, report in self._reports.items():
                if report.is_lost and self._states[report.silent] != State.LEFT:
                    found[report.silent] = Loss(report.silent, Reason.SILENT, sender)
        for node, seconds in self._seconds.items():
            if node in self._ended and seconds > _REFUSED_SECONDS:
                found[node] = Loss(node, Reason.ENDED, self._own)
            elif seconds > limit:
                found[node] = Loss(node, Reason.SILENT, self._own)
        return found

    def _quiet(self) -> list[int]:
        return [node for node, seconds in self._seconds.items() if seconds > WARNING_SECONDS]

    def _is_watched(self, node: int) -> bool:
        return node in self._seconds

    def _is_cut_off(self) -> bool:
        """Whether it is this node that is cut off, rather than others that are silent."""
        is_alone = len(self._seconds) > 1 or not self._can_send
        return is_alone and bool(self._quiet()) and min(self._seconds.values()) > _RECENT_SECONDS
