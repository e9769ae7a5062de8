"""What the master notes for its workers: the memory to map, and what to forget, with the next command."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from synkhronos._arena import Arena
from synkhronos._protocol import Arrays, Command, Envelope, Release
from synkhronos._segments import FileRef, Segment, SegmentRef, SegmentTable

__all__ = ["Ledger"]


class Ledger:
    """The shared memory of one session, seen from the master.

    Parameters
    ----------
    table : SegmentTable
        The master's.

    Attributes
    ----------
    segments, functions, variables : deque
        Keys of what was dropped. Finalizers append to them, at any moment; nothing else happens there.
    """

    def __init__(self, table: SegmentTable) -> None:
        self.segments: deque[str] = deque()
        self.functions: deque[int] = deque()
        self.variables: deque[int] = deque()
        self._table = table
        self._attach: list[SegmentRef | FileRef] = []
        self._open: list[Segment] = []  # their descriptors are needed until the workers have attached them
        self._staging = Arena(table)
        self._outboxes: dict[int, SegmentRef] = {}

    def add(self, made: Segment | FileRef) -> int:
        """Take in new memory; returns how much is waiting for the workers."""
        if isinstance(made, FileRef):
            self._table.attach(made)
            self._attach.append(made)
        else:
            self._table.add(made)
            self._attach.append(made.ref)
            self._open.append(made)
        return len(self._attach)

    def reserve(self, n_bytes: int) -> Arena:
        """The staging arena, emptied and with room for ``n_bytes``."""
        old = self._staging.ref
        self._staging.reserve(n_bytes)
        if old is not None and self._staging.ref != old:
            self.segments.append(old.key)
        return self._staging

    def envelope(self, command: Command | None) -> Envelope:
        """A command, with what the workers must map and may forget first."""
        staging = () if self._staging.ref is None else (self._staging.ref,)
        release = Release(_take_all(self.segments), _take_all(self.functions), _take_all(self.variables))
        return Envelope((*self._attach, *staging), release, command)

    def delivered(self) -> None:
        """The workers have answered: all memory is mapped where it is needed."""
        self._attach.clear()
        while self._open:
            self._open.pop().close_fd()

    def see_outboxes(self, results: Sequence[Any], workers: Sequence[int]) -> None:
        """Map the segments in which workers published their results, where they are new."""
        for rank in workers:
            segment = results[rank].segment if isinstance(results[rank], Arrays) else None
            known = self._outboxes.get(rank)
            if segment is None or (known is not None and known.key == segment.key):
                continue
            if known is not None:
                self._table.release(known.key)
            self._table.attach(segment)
            self._outboxes[rank] = segment

    def close(self) -> None:
        """Free what only the session needed."""
        self.delivered()
        self._staging.free()
        for ref in self._outboxes.values():
            self._table.release(ref.key)
        for key in self.segments:
            self._table.release(key)


def _take_all(queue: deque[Any]) -> tuple[Any, ...]:
    return tuple(queue.popleft() for _ in range(len(queue)))
