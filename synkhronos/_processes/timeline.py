"""How one rank spends its time: at every moment in one category, so that the times add up to what the clock says.

A `Timeline` is off until it is started, and then costs a look at one attribute wherever the rank's work changes. While
it is on it adds up the nanoseconds of each category; if asked to, it also keeps the moments of the last changes.

Each rank notes in shared memory when it had finished a command. So every rank can tell, once its wait is over, how much
of it was waiting for the slowest rank: all until the last one had finished.
"""

from __future__ import annotations

import os
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "CATEGORIES",
    "COLLECTIVES",
    "CONTROL",
    "FUNCTION",
    "OUTSIDE",
    "SHUFFLE",
    "STRAGGLING",
    "TRANSFERS",
    "Notes",
    "Span",
    "Timeline",
    "by_other_clock",
    "spans",
]

#: What a rank can be at, by number.
CATEGORIES = ("function", "shuffle", "straggling", "collectives", "transfers", "control", "outside")
FUNCTION, SHUFFLE, STRAGGLING, COLLECTIVES, TRANSFERS, CONTROL, OUTSIDE = range(len(CATEGORIES))

# Marks that are no categories: a command begins or ends; codes from _FIRST_NAME on say its name.
_BEGIN, _END, _FIRST_NAME = 100, 101, 102

_NAMELESS = "command"


class Notes(NamedTuple):
    """What one rank noted between `Timeline.start` and `Timeline.stop`.

    All times are nanoseconds of the monotonic clock, which all processes share. ``totals`` has one entry for each of
    `CATEGORIES`, and sums to ``stop - start``. ``marks`` holds codes and times in turns, the last ``room`` of them;
    ``lost`` counts those that gave way to later ones.
    """

    pid: int
    start: int
    stop: int
    totals: tuple[int, ...]
    marks: np.ndarray
    names: tuple[str, ...]
    lost: int


class Span(NamedTuple):
    """What happened from ``start`` to ``stop``: being in a category, or a command (``category`` is then `None`)."""

    name: str
    category: int | None
    start: int
    stop: int


class Timeline:
    """The times of one rank.

    Parameters
    ----------
    finished : int64 array of shape (2, n_ranks)
        In memory that all ranks share: when each rank had finished the last command of even, and of odd number.
    rank : int

    Attributes
    ----------
    on : bool
    tracing : bool
        Whether the moments of changes are kept.
    """

    def __init__(self, finished: np.ndarray, rank: int) -> None:
        self.on = False
        self.tracing = False
        self._finished = [row.data for row in finished]  # quicker to index than arrays
        self._category = OUTSIDE
        self.reset(rank)

    def reset(self, rank: int) -> None:
        """Be the timeline of this process and rank from now on: what was copied from the master is not its own."""
        self._rank = rank
        self.start(self._room if self.tracing else 0, self.on)

    def start(self, room: int, on: bool = True) -> None:
        """Begin anew, and keep the last ``room`` changes as well (0: times alone)."""
        self.tracing = room > 0
        self._room = room
        self._marks = np.zeros(2 * room, np.int64).data
        self._n_marks = 0
        self._names: dict[str, int] = {}
        self._outer: list[int] = []
        self._totals = [0] * len(CATEGORIES)
        self._pid = os.getpid()
        self._start = self._since = monotonic_ns()
        self._category = CONTROL if on else OUTSIDE
        self.on = on
        if on:
            self._enter(CONTROL, self._start)

    def stop(self) -> Notes:
        """Note no more; returns what was noted."""
        self._enter(OUTSIDE, monotonic_ns())
        lost = max(0, self._n_marks - self._room)
        marks = np.array(self._marks[: 2 * self._n_marks], np.int64)
        if lost:
            marks = np.roll(marks, -2 * (self._n_marks % self._room))
        notes = Notes(self._pid, self._start, self._since, tuple(self._totals), marks, tuple(self._names), lost)
        self.start(0, on=False)
        return notes

    def switch(self, category: int) -> int:
        """From now on the rank is at something else; returns what it was at before."""
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
        """A command begins, or a call of the user's that may give several."""
        if self.on:
            self._outer.append(self._category)
            now = monotonic_ns()
            if self.tracing:
                self._mark(_BEGIN, now)
            self._enter(CONTROL, now)

    def end(self) -> None:
        """The command that began last is over."""
        if self.on:
            now = monotonic_ns()
            self._enter(self._outer.pop() if self._outer else OUTSIDE, now)
            if self.tracing:
                self._mark(_END, now)

    def call(self, name: str) -> Timeline:
        """Begin a command of this name; ends with the ``with`` block."""
        if self.on:
            self.begin()
            self.name(name)
        return self

    def __enter__(self) -> None:
        pass  # `call` did it

    def __exit__(self, *_: Any) -> None:
        if self.on:
            self.end()

    def name(self, name: str) -> None:
        """Name the command that began last."""
        if self.tracing:
            self._mark(self._names.setdefault(name, _FIRST_NAME + len(self._names)), monotonic_ns())

    def rest(self, number: int) -> None:
        """The rank has finished command ``number`` and waits."""
        if self.on:
            self._enter(STRAGGLING, monotonic_ns())
            self._finished[number & 1][self._rank] = self._since

    def resume(self, number: int, otherwise: int) -> None:
        """The wait after command ``number`` is over; once the slowest rank had finished, it was ``otherwise``."""
        if self.on:
            slowest = max(self._finished[number & 1])
            self._enter(otherwise, min(max(slowest, self._since), monotonic_ns()))

    def put_off(self, number: int, until: int) -> None:
        """Have all ranks of this machine that wait after command ``number`` wait for another machine ``until`` then."""
        self._finished[number & 1][self._rank] = until

    def _enter(self, category: int, now: int) -> None:
        self._totals[self._category] += now - self._since
        self._since = now
        self._category = category
        if self.tracing:
            self._mark(category, now)

    def _mark(self, code: int, when: int) -> None:
        place = 2 * (self._n_marks % self._room)
        self._marks[place] = code
        self._marks[place + 1] = when
        self._n_marks += 1


def by_other_clock(notes: Notes, before: int, after: int) -> Notes:
    """Notes with the times of a clock of which the own one was so many nanoseconds ahead, at their start and stop."""
    drift = (after - before) / max(1, notes.stop - notes.start)

    def moved(when: Any) -> Any:
        return when - before - np.rint(drift * (when - notes.start)).astype(np.int64)

    marks = notes.marks.copy()
    marks[1::2] = moved(marks[1::2])
    return notes._replace(start=int(moved(notes.start)), stop=int(moved(notes.stop)), marks=marks)


def spans(notes: Notes) -> list[Span]:
    """The spans that the marks tell of: categories follow each other without gaps, and lie within commands.

    Time outside of commands is left out; so is a command whose beginning or end was not noted.
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
