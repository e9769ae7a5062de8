"""What the master notes for its workers: the memory to map, and what to forget, with the next command."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, TypeVar, Union

import numpy as np

from synkhronos._interrupts import deferred_interrupts
from synkhronos._memory import Arena, ArrayRef, FileRef, OpenFile, Segment, SegmentRef, SegmentTable, aligned
from synkhronos._rank import Arrays, Command, Envelope, Release

__all__ = ["Ledger", "Staged"]


#: Descriptors that may be open, and bytes that may wait to be unmapped, before the workers are told.
_MAX_WAITING = 64
_MAX_DROPPED_BYTES = 64 * 1024 * 1024
_LARGE_BYTES = 4 * 1024 * 1024

_NOTHING = Release()

_Memory = TypeVar("_Memory")

#: What can be staged: an array, or an array and the numbers of the rows of it that are wanted.
Staged = Union[np.ndarray, "tuple[np.ndarray, np.ndarray]"]


class Ledger:
    """The shared memory of one session, seen from the master.

    Parameters
    ----------
    table : SegmentTable
        The master's.
    make_room : callable
        Has every rank forget what was dropped; called when memory cannot be had, before it is tried again.

    Attributes
    ----------
    segments, functions, variables : deque
        Keys of what was dropped. Finalizers append to them, at any moment; nothing else happens there.
    """

    def __init__(self, table: SegmentTable, make_room: Callable[[], None]) -> None:
        self.segments: deque[str] = deque()
        self.functions: deque[int] = deque()
        self.variables: deque[int] = deque()
        self._table = table
        self._make_room = make_room
        self._attach: list[SegmentRef | FileRef] = []
        self._open: list[Segment | OpenFile] = []  # their descriptors are needed until the workers have attached them
        self._staging = Arena(table)
        self._outboxes: dict[int, SegmentRef] = {}
        self._dropped_bytes = 0
        self._sent = _NOTHING
        self._n_sent = 0

    def add(self, made: Segment | OpenFile) -> None:
        """Take in new memory."""
        self._table.add(made.ref.key, made.bytes)
        self._attach.append(made.ref)
        self._open.append(made)

    def drop(self, key: str) -> None:
        """Forget memory, which the workers hold until their next command."""
        self._dropped_bytes += self._table.release(key)
        self.segments.append(key)

    @property
    def is_full(self) -> bool:
        """Whether so much has gathered that the workers should be told without waiting for the next command."""
        return len(self._attach) >= _MAX_WAITING or self._dropped_bytes > _MAX_DROPPED_BYTES

    def allocate(self, n_bytes: int) -> Segment:
        """New shared memory, still to be taken in."""
        return self._with_room(lambda: Segment.create(n_bytes))

    def stage(self, items: Sequence[Staged]) -> list[ArrayRef]:
        """Copy arrays, or rows of arrays, to the staging arena; what was there before is overwritten."""
        n_bytes = sum(aligned(_n_bytes(item)) for item in items)
        self._with_room(lambda: self._reserve(n_bytes))
        place, place_rows = self._staging.place, self._staging.place_rows
        return [place_rows(*item) if isinstance(item, tuple) else place(item) for item in items]

    def _reserve(self, n_bytes: int) -> None:
        """Empty the staging arena, and make sure that it has room for ``n_bytes``."""
        old = self._staging.ref
        try:
            self._staging.reserve(n_bytes)
        finally:
            if old is not None and self._staging.ref != old:
                self.segments.append(old.key)

    def _with_room(self, allocate: Callable[[], _Memory]) -> _Memory:
        try:
            return allocate()
        except MemoryError:
            self._make_room()
            return allocate()

    def trim(self) -> None:
        """Give the staging arena back if it is large, after something that is not done often."""
        if self._staging.ref is not None and self._staging.ref.size > _LARGE_BYTES:
            self.segments.append(self._staging.ref.key)
            self._staging.free()

    def envelope(self, command: Command | None) -> Envelope:
        """A command, with what the workers must map and may forget first: all that is not yet `delivered`."""
        wanted: list[SegmentRef | FileRef] = [] if self._staging.ref is None else [self._staging.ref]
        self._sent = Release(tuple(self.segments), tuple(self.functions), tuple(self.variables))
        self._n_sent = len(self._attach)
        if self._attach:
            dropped = set(self._sent.segments)
            wanted += [ref for ref in self._attach if ref.key not in dropped]
        return Envelope(tuple(wanted), self._sent, command)

    def delivered(self) -> None:
        """Every worker has done what the last envelope said."""
        if self._sent == _NOTHING and not self._n_sent:
            return
        queues: tuple[deque[Any], ...] = (self.segments, self.functions, self.variables)
        with deferred_interrupts():
            for queue, sent in zip(queues, self._sent):
                for _ in sent:
                    queue.popleft()
            self._sent = _NOTHING
            self._dropped_bytes = 0
            for made in self._open[: self._n_sent]:
                made.close_fd()
            del self._attach[: self._n_sent], self._open[: self._n_sent]
            self._n_sent = 0

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

    def forget_outboxes(self, ranks: Sequence[int]) -> None:
        """Unmap the segments in which workers published that are gone."""
        for rank in ranks:
            known = self._outboxes.pop(rank, None)
            if known is not None:
                self._table.release(known.key)

    def close(self) -> None:
        """Free what only the session needed."""
        for made in self._open:
            made.close_fd()
        self._staging.free()
        self.forget_outboxes(list(self._outboxes))

    def abandon(self, outbox: Arena) -> None:
        """In a worker that was forked late: let go of what it inherited and the master alone needs."""
        for made in self._open:
            os.close(made.ref.fd)
        self._open.clear()
        for arena in (self._staging, outbox):
            arena.abandon()
        self.forget_outboxes(list(self._outboxes))


def _n_bytes(item: Staged) -> int:
    if not isinstance(item, tuple):
        return item.nbytes
    array, rows = item
    return len(rows) * (array.nbytes // max(1, len(array)))
