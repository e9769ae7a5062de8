"""Ledger of new shared memory and dropped objects, which is sent to the workers with the next command.

Each entry is sent with every command until all workers have applied it. So a failed or interrupted command loses no
entry.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, TypeVar, Union

import numpy as np

from synkhronos._memory import Arena, ArrayRef, Segment, SegmentTable, aligned, copy_around
from synkhronos._rank import Command, Envelope, Release
from synkhronos._utils.interrupts import FinalizerQueue, deferred_interrupts
from synkhronos._utils.rows import Rows, Selection

#: Above either limit, `Ledger.is_full` is true, and the entries are sent without waiting for the next command.
_MAX_WAITING = 64  # new segments that workers have not mapped
_MAX_DROPPED_BYTES = 64 * 1024 * 1024  # dropped memory that workers have not unmapped
_LARGE_BYTES = 4 * 1024 * 1024

_NOTHING = Release()

_Memory = TypeVar("_Memory")

#: An item to stage: an array; or an array with the indices of its rows to stage, or with the range of rows that only
#: the controller needs, which are not staged.
Staged = Union[np.ndarray, "tuple[np.ndarray, Selection]"]


class Place(NamedTuple):
    """Place of a staged array, and the rows that were not staged because only the controller needs them."""

    ref: ArrayRef
    own: Rows | None = None


class Ledger:
    """The controller's record of one session's shared memory.

    Parameters
    ----------
    table : SegmentTable
        The controller's table.
    make_room : callable
        ``make_room(collect)`` has every rank free dropped memory and cached blocks. It is called when an allocation
        fails, before the allocation is tried again: first with ``False``, then with ``True``, which means to collect
        garbage first. That comes second because it makes the kernel copy pages that forked processes share.
    n_workers : int

    Attributes
    ----------
    functions, variables : deque
        Keys of functions and variables that the workers have still to drop.
    ended_variables : FinalizerQueue
        Keys of variables that the program has dropped.
    sent : Release
        The dropped objects that the last envelope listed.
    """

    def __init__(self, table: SegmentTable, make_room: Callable[[bool], None], n_workers: int) -> None:
        self._segments: deque[str] = deque()
        self.functions: deque[int] = deque()
        self.variables: deque[int] = deque()
        self.ended_variables: FinalizerQueue[int] = FinalizerQueue()
        # the kernel limits the descriptors that all programs of a user have in flight to RLIMIT_NOFILE
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_waiting = max(1, min(_MAX_WAITING, open_files // (8 * max(1, n_workers))))
        self._table = table
        self._make_room = make_room
        self._new: list[Segment] = []  # segments that not all workers have mapped
        self._staging: list[Arena] = []
        self._dropped_bytes = 0
        self.sent = _NOTHING
        self._n_sent = 0
        # the last envelope without entries, used again if its command is sent again
        self._bare = Envelope((), _NOTHING, None)
        self.n_failures = 0

    def share(self, segment: Segment, content: np.ndarray) -> None:
        """Register new memory, which stays shared as long as the array ``content`` exists."""
        self._table.lend(segment.ref.key, content)
        if segment.path is not None:
            self._table.files[segment.ref.key] = segment.path, segment.ref.offset
        self._new.append(segment)

    def _drop_ended(self) -> None:
        """Move the keys of garbage-collected objects to the queues that the next envelope sends."""
        if self._table.ended.waiting:
            for key, n_bytes in self._table.ended.take():
                self._segments.append(key)
                self._dropped_bytes += n_bytes
        if self.ended_variables.waiting:
            self.variables.extend(self.ended_variables.take())

    @property
    def is_full(self) -> bool:
        """Whether there are so many entries that they should be sent without waiting for the next command."""
        self._drop_ended()
        return len(self._new) >= self._most_waiting or self._dropped_bytes > _MAX_DROPPED_BYTES

    def allocate(self, n_bytes: int) -> Segment:
        """Allocate shared memory; `share` registers it."""
        return self._with_room(lambda: Segment.create(n_bytes))

    def stage(self, items: Sequence[Staged], place: int = 0) -> list[ArrayRef]:
        """Copy arrays, or rows of arrays, to the staging arena ``place``, whose previous contents are discarded."""
        while len(self._staging) <= place:
            self._staging.append(Arena(self._table, self._new.append, self._segments.append))
        arena = self._staging[place]
        n_bytes = sum(aligned(_n_bytes(item)) for item in items)
        self._with_room(lambda: arena.reserve(n_bytes))
        self._table.own.clear()
        refs = []
        for item in items:
            if not isinstance(item, tuple):
                refs.append(arena.place(item))
            elif isinstance(item[1], Rows):
                refs.append(arena.place_around(item[0], item[1]))
                self._table.own[refs[-1]] = item[0]
            else:
                refs.append(arena.place_rows(item[0], item[1]))
        return refs

    def restage(self, places: Sequence[Place], arrays: Sequence[np.ndarray]) -> bool:
        """Overwrite staged arrays by arrays of the same shapes; return whether their memory still exists."""
        own = self._table.own
        if own:
            own.clear()
        for (ref, rows), array in zip(places, arrays):
            try:
                view = self._table.shared(ref)
            except KeyError:
                return False
            if rows is None or not can_be_read(array, view.dtype):
                view[...] = array
            else:
                copy_around(view, array, rows)
                own[ref] = array
        return True

    def _with_room(self, allocate: Callable[[], _Memory]) -> _Memory:
        for collect in (False, True):
            try:
                return allocate()
            except MemoryError:
                self._make_room(collect)
        return allocate()

    def trim(self) -> None:
        """Free the first staging arena if it is large; called after rare operations."""
        arena = self._staging[0]
        if arena.ref is not None and arena.ref.size > _LARGE_BYTES:
            arena.free()

    def envelope(self, command: Command) -> tuple[Envelope, list[Segment]]:
        """Return a command with all entries that are not yet `delivered`, and the segments to send with it."""
        self._drop_ended()
        if not (self._new or self._segments or self.functions or self.variables):
            self.sent, self._n_sent = _NOTHING, 0
            if command is not self._bare.command or self.n_failures != self._bare.n_failures:
                self._bare = Envelope((), _NOTHING, command, self.n_failures)
            return self._bare, []
        self.sent = Release(tuple(self._segments), tuple(self.functions), tuple(self.variables))
        if self._new and self.sent.segments:
            self._let_go(set(self.sent.segments))
        self._n_sent = len(self._new)
        attach = tuple(segment.ref for segment in self._new)
        return Envelope(attach, self.sent, command, self.n_failures), self._new[:]

    def _let_go(self, dropped: set[str]) -> None:
        """Remove new memory that was dropped before it was delivered, because no worker needs to map it."""
        with deferred_interrupts():
            for segment in self._new:
                if segment.ref.key in dropped:
                    segment.close_fd()
            self._new[:] = [segment for segment in self._new if segment.ref.key not in dropped]

    def delivered(self) -> None:
        """Record that every worker has applied the entries of the last envelope."""
        if self.sent is _NOTHING and not self._n_sent:
            return
        queues: tuple[deque[Any], ...] = (self._segments, self.functions, self.variables)
        with deferred_interrupts():
            for queue, sent in zip(queues, self.sent):
                for _ in sent:
                    queue.popleft()
            self.sent = _NOTHING
            self._dropped_bytes = 0
            for segment in self._new[: self._n_sent]:
                segment.close_fd()
            del self._new[: self._n_sent]
            self._n_sent = 0

    def close(self) -> None:
        """Free the staging arenas, and close the descriptors of new segments."""
        for arena in self._staging:
            arena.free()
        for segment in self._new:
            segment.close_fd()

    def abandon(self) -> None:
        """Release, in a worker that replaces a dead one, inherited memory that only the controller needs."""
        for segment in self._new:
            segment.abandon()
        self._new.clear()
        for arena in self._staging:
            arena.abandon()


def _n_bytes(item: Staged) -> int:
    if not isinstance(item, tuple):
        return item.nbytes
    array, rows = item
    return array.nbytes if isinstance(rows, Rows) else len(rows) * (array.nbytes // max(1, len(array)))


def can_be_read(array: Any, dtype: np.dtype) -> bool:
    """Return whether a function can read the program's array itself, as it reads staged ones.

    For another layout, and for read-only arrays, numba would compile the function again.
    """
    return type(array) is np.ndarray and array.dtype == dtype and bool(array.flags.carray)
