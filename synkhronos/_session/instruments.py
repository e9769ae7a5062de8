"""Instruments: `profile` and `trace` measure where the time goes, `memory` shows what the shared heaps hold."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

from synkhronos._session.lifecycle import current
from synkhronos._session.profiles import Profile, Serial, begin, events, finish
from synkhronos._utils.display import html_table, text_table

_MEGABYTE = 10**6


@dataclass(frozen=True)
class Memory:
    """Contents of each rank's shared heap, in bytes; made by `memory`. ``str()`` gives a table, in megabytes.

    Attributes
    ----------
    in_use : dict
        ``in_use[rank]``: bytes of arrays that are still needed, such as the values of shared variables.
    kept : dict
        ``kept[rank]``: bytes of freed arrays, whose memory is kept for the next ones.
    largest : dict
        ``largest[rank]``: the most bytes that were in use at the same time.
    """

    in_use: dict[int, int]
    kept: dict[int, int]
    largest: dict[int, int]

    def _lines(self) -> list[list[str]]:
        """Return the cells of the table, line by line."""
        rows = {"In use": self.in_use, "Kept": self.kept, "Largest": self.largest}
        lines = [["Memory (MB)", *(f"rank {rank}" for rank in self.in_use)]]
        for name, row in rows.items():
            lines.append([name, *(f"{n_bytes / _MEGABYTE:,.1f}" for n_bytes in row.values())])
        return lines

    def _repr_html_(self) -> str:
        """Return the table, as notebooks show it."""
        return html_table(self._lines())

    def __str__(self) -> str:
        return text_table(self._lines())


def memory() -> Memory:
    """Return what each rank's shared heap holds now.

    The shared heap holds arrays of 16 KiB and more that functions and collectives make; each is rounded up by a quarter
    at most. `Data`, results, and memory that the program allocates itself are not included. The numbers are read from
    shared memory: only the node leaders of other nodes are asked, and no other rank.

    Returns
    -------
    Memory
        Three dicts of bytes by rank. All zeros where the kernel, or a limit of this process, allowed no shared heap.

    Raises
    ------
    SessionError
        Without a session.

    Examples
    --------
    >>> with synk.session(2):
    ...     print(sorted(synk.memory().in_use))
    [0, 1]
    """
    session = current("memory")
    counts = session.report()[1]
    return Memory(*(dict(enumerate(column)) for column in zip(*counts)))


@contextlib.contextmanager
def profile(serial: Serial | None = None) -> Iterator[Profile]:
    """Measure, in a ``with`` block, where the time of every rank goes.

    At every moment each rank is in one category of `Profile`, so that its categories sum to the measured time.

    Parameters
    ----------
    serial : Profile or dict, optional
        The times of the same work in serial, for another column of the table: the profile of a session of one rank, or
        seconds by category (and ``"total"``), such as ``{"total": 395.1, "function": 382.5}``.

    Yields
    ------
    Profile
        Filled when the block is left, also by an exception, or when the session is closed in it.

    Raises
    ------
    SessionError
        Without a session, or if it is being profiled already.
    TypeError, ValueError
        For a ``serial`` that is no profile of one rank and no dict of seconds.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], x.mean())
    ...     with synk.profile() as times:
    ...         mean = f([1, 2, 6])
    >>> print(times)  # doctest: +SKIP
    """
    measured = Profile(serial)
    session = current("profile")
    begin(session, measured)
    try:
        yield measured
    finally:
        if session.profile is measured:
            finish(session)


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Profile]:
    """Record, in a ``with`` block, what every rank does and when, in a file for https://ui.perfetto.dev.

    The file holds Chrome trace events in the JSON object format: a process for each rank, in it the commands and their
    phases, all on the controller's clock. Each rank keeps its last million changes of phase, in 16 MB.

    Parameters
    ----------
    path : str or path
        The JSON file. It is opened when the block is entered, and written when it is left.

    Yields
    ------
    Profile
        The same times as from `profile`.

    Raises
    ------
    SessionError
        Without a session, or if it is being profiled already.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], x.mean())
    ...     with synk.trace("trace.json"):
    ...         mean = f([1, 2, 6])
    """
    session = current("trace")
    with open(path, "w", encoding="utf-8") as file:
        measured = Profile()
        begin(session, measured, spans=True)
        try:
            yield measured
        finally:
            if session.profile is measured:
                finish(session)
            json.dump(events(measured), file)
