"""Record how a rank spends its time, by category, for profiles and traces.

A rank is in exactly one category at any moment, so the times of all categories add up to the elapsed time. A `Timeline`
is off until it is started; until then each change of category costs one attribute test. Code that each command runs
makes this test itself, because a method call takes longer. While it is on, it adds up the nanoseconds of each category.
On request it also keeps the times of the last changes, for a trace.

Each rank writes to shared memory the time at which it finished a command. When a rank waits for the next command, it
can therefore split its wait: the part until the slowest rank had finished counts as straggling.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

#: Names of the categories, by number.
CATEGORIES = ("function", "shuffle", "straggling", "collectives", "transfers", "control", "outside")
FUNCTION, SHUFFLE, STRAGGLING, COLLECTIVES, TRANSFERS, CONTROL, OUTSIDE = range(len(CATEGORIES))

# Codes of marks in a trace, in addition to the categories: a command begins or ends. Codes from _FIRST_NAME on name a
# command.
_BEGIN, _END, _FIRST_NAME = 100, 101, 102

_NAMELESS = "command"


class Notes(NamedTuple):
    """Record of one rank from `Timeline.start` to `Timeline.stop`.

    All times are nanoseconds of the monotonic clock, which all processes of a node share.

    Attributes
    ----------
    pid : int
        Process id of the rank.
    start, stop : int
        Times at which the record starts and stops.
    totals : tuple of int
        Nanoseconds in each of `CATEGORIES`; the sum is ``stop - start``.
    marks : int64 array of shape (2 * n_marks,)
        Code and time of each change, alternately.
    names : tuple of str
        Names of commands, in the order of their codes.
    lost : int
        Number of older marks that were overwritten.
    hidden, exposed : int
        Nanoseconds of exchanges with other nodes while this rank, a node leader, computed, and while it waited.
    exchanges : int64 array of shape (n, 2)
        Start and end of each piece of these exchanges; only of a trace.
    """

    pid: int
    start: int
    stop: int
    totals: tuple[int, ...]
    marks: np.ndarray
    names: tuple[str, ...]
    lost: int
    hidden: int
    exposed: int
    exchanges: np.ndarray


class Span(NamedTuple):
    """Interval that a rank spent in a category, or in a command, for which ``category`` is ``None``."""

    name: str
    category: int | None
    start: int
    stop: int


class Timeline:
    """Timeline of one rank.

    Parameters
    ----------
    finished : int64 array of shape (2, n_ranks)
        Memory shared by all ranks of the node: the times at which each rank finished its last command with an even, and
        with an odd number.
    rank : int

    Attributes
    ----------
    on : bool
        Whether time is recorded.
    tracing : bool
        Whether the times of changes are kept, too.
    """

    def __init__(self, finished: np.ndarray, rank: int) -> None:
        self.on = False
        self.tracing = False
        self._finished = [row.data for row in finished]  # memoryviews are faster to index than arrays
        self._category = OUTSIDE
        self.reset(rank)

    def reset(self, rank: int) -> None:
        """Clear the record, and use the timeline for ``rank``; a new worker calls this after the fork."""
        self._rank = rank
        self.start(self._room if self.tracing else 0, self.on)

    def start(self, room: int, on: bool = True) -> None:
        """Clear the record, and start to record; keep the times of the last ``room`` changes (0: only the totals)."""
        self.tracing = room > 0
        self._room = room
        self._marks = np.zeros(2 * room, np.int64).data
        self._n_marks = 0
        self._names: dict[str, int] = {}
        self._outer: list[int] = []
        self._totals = [0] * len(CATEGORIES)
        self._hidden = self._exposed = 0
        self._exchanges: deque[tuple[int, int]] = deque(maxlen=room)
        self._pid = os.getpid()
        self._start = self._since = monotonic_ns()
        self._category = CONTROL if on else OUTSIDE
        self.on = on
        if on:
            self._enter(CONTROL, self._start)

    def stop(self) -> Notes:
        """Stop recording, and return the record."""
        self._enter(OUTSIDE, monotonic_ns())
        lost = max(0, self._n_marks - self._room)
        marks = np.array(self._marks[: 2 * self._n_marks], np.int64)
        if lost:
            marks = np.roll(marks, -2 * (self._n_marks % self._room))
        notes = Notes(
            self._pid,
            self._start,
            self._since,
            tuple(self._totals),
            marks,
            tuple(self._names),
            lost,
            self._hidden,
            self._exposed,
            np.array(self._exchanges, np.int64).reshape(-1, 2),
        )
        self.start(0, on=False)
        return notes

    def switch(self, category: int) -> int:
        """Enter a category, and return the previous one."""
        before = self._category
        if self.on:
            now = monotonic_ns()
            self._totals[before] += now - self._since
            self._since = now
            self._category = category
            if self.tracing:
                self._mark(category, now)
        return before

    def begin(self) -> None:
        """Begin a command, or a user's call that may send several commands; it may be nested."""
        if self.on:
            self._outer.append(self._category)
            now = monotonic_ns()
            if self.tracing:
                self._mark(_BEGIN, now)
            self._enter(CONTROL, now)

    def end(self) -> None:
        """End the command that began last."""
        if self.on:
            now = monotonic_ns()
            self._enter(self._outer.pop() if self._outer else OUTSIDE, now)
            if self.tracing:
                self._mark(_END, now)

    def call(self, name: str) -> Timeline:
        """Begin a command with a name; use it in a ``with`` statement, which ends the command."""
        if self.on:
            self.begin()
            self.name(name)
        return self

    def __enter__(self) -> None:
        pass  # `call` has begun the command

    def __exit__(self, *_: Any) -> None:
        if self.on:
            self.end()

    def name(self, name: str) -> None:
        """Name the command that began last."""
        if self.tracing:
            self._mark(self._names.setdefault(name, _FIRST_NAME + len(self._names)), monotonic_ns())

    def rest(self, number: int) -> None:
        """Record that this rank has finished command ``number`` and now waits."""
        if self.on:
            self._enter(STRAGGLING, monotonic_ns())
            self._finished[number & 1][self._rank] = self._since

    def resume(self, number: int, otherwise: int) -> None:
        """End the wait after command ``number``.

        The wait counts as straggling until the slowest rank has finished, and from then on as ``otherwise``.
        """
        if self.on:
            slowest = max(self._finished[number & 1])
            self._enter(otherwise, min(max(slowest, self._since), monotonic_ns()))

    def exchange(self, pieces: Sequence[tuple[int, int]], computing: Sequence[tuple[int, int]]) -> None:
        """Record an exchange with other nodes.

        Parameters
        ----------
        pieces : sequence of tuple
            Start and end of each piece.
        computing : sequence of tuple
            Start and end of each interval in which this rank computed, and did not wait for the exchange.
        """
        if self.on:
            whole = _union(pieces)
            hidden = sum(
                max(0, min(end, until) - max(start, since)) for start, end in whole for since, until in computing
            )
            self._hidden += hidden
            self._exposed += sum(end - start for start, end in whole) - hidden
            self._exchanges.extend(pieces)

    def put_off(self, number: int, until: int) -> None:
        """Extend straggling after command ``number`` to the time ``until``, for all waiting ranks of this node.

        Node leaders call this, because other nodes may finish later.
        """
        self._finished[number & 1][self._rank] = until

    def _enter(self, category: int, now: int) -> None:
        """Enter a category at the time ``now``."""
        self._totals[self._category] += now - self._since
        self._since = now
        self._category = category
        if self.tracing:
            self._mark(category, now)

    def _mark(self, code: int, when: int) -> None:
        """Store a mark in the ring buffer; it overwrites the oldest one if the buffer is full."""
        place = 2 * (self._n_marks % self._room)
        self._marks[place] = code
        self._marks[place + 1] = when
        self._n_marks += 1


def _union(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals, as intervals that do not overlap."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def convert_clock(notes: Notes, before: int, after: int) -> Notes:
    """Return a record with its times converted to another clock.

    The offset of the clocks is interpolated linearly, because clocks of two nodes drift apart.

    Parameters
    ----------
    notes : Notes
    before, after : int
        Nanoseconds by which the clock of the record was ahead of the other clock, at ``notes.start`` and
        ``notes.stop``.
    """
    drift = (after - before) / max(1, notes.stop - notes.start)

    def moved(when: Any) -> Any:
        return when - before - np.rint(drift * (when - notes.start)).astype(np.int64)

    marks = notes.marks.copy()
    marks[1::2] = moved(marks[1::2])
    return notes._replace(
        start=int(moved(notes.start)), stop=int(moved(notes.stop)), marks=marks, exchanges=moved(notes.exchanges)
    )


def spans(notes: Notes) -> list[Span]:
    """Return the spans of a record, sorted by start: categories without gaps, and the commands that contain them.

    Time outside of commands is left out. Commands whose begin or end was not recorded are left out, too.
    """
    found: list[Span] = []
    begun: list[tuple[int, str]] = []
    category, since = OUTSIDE, notes.start
    for code, when in notes.marks.reshape(-1, 2).tolist():
        if code < _FIRST_NAME and code != category:
            if category != OUTSIDE and when > since:
                found.append(Span(CATEGORIES[category], category, since, when))
            since = when
        if code < len(CATEGORIES):
            category = code
        elif code == _BEGIN:
            begun.append((when, _NAMELESS))
        elif begun and code == _END:
            start, name = begun.pop()
            found.append(Span(name, None, start, when))
        elif begun:
            begun[-1] = (begun[-1][0], notes.names[code - _FIRST_NAME])
    return sorted(found, key=lambda span: (span.start, -span.stop, span.category is not None))
