"""What the ranks hold of the memory in which they compute.

The instruments: `profile` and `trace`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

from synkhronos._session.lifecycle import current
from synkhronos._session.profiles import Profile, Serial, begin, events, finish
from synkhronos._utils.display import html_table

__all__ = ["Memory", "Profile", "memory", "profile", "trace"]


_MEGABYTE = 10**6


@dataclass(frozen=True)
class Memory:
    """What each rank's region holds, in bytes; made by `memory`. ``str()`` gives a table, in megabytes.

    Attributes
    ----------
    in_use : dict
        ``in_use[rank]``: in arrays that are still needed, such as the values of shared variables.
    kept : dict
        ``kept[rank]``: in freed arrays, whose memory is kept for the next ones.
    largest : dict
        ``largest[rank]``: the most that was in use at once.
    """

    in_use: dict[int, int]
    kept: dict[int, int]
    largest: dict[int, int]

    def _lines(self) -> list[list[str]]:
        """The cells of the table, line by line."""
        rows = {"In use": self.in_use, "Kept": self.kept, "Largest": self.largest}
        lines = [["Memory (MB)", *(f"rank {rank}" for rank in self.in_use)]]
        for name, row in rows.items():
            lines.append([name, *(f"{n_bytes / _MEGABYTE:,.1f}" for n_bytes in row.values())])
        return lines

    def _repr_html_(self) -> str:
        """The table, as notebooks show it."""
        return html_table(self._lines())

    def __str__(self) -> str:
        lines = self._lines()
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def memory() -> Memory:
    """Tell what each rank holds of the memory in which it computes, now.

    No rank is asked but those that lead other machines.

    That is memory of arrays of 16 KiB and more that functions and collectives make, rounded up by a quarter at most.
    `Data`, results, and what the program itself allocates are not in it.

    Returns
    -------
    Memory
        All zeros where the kernel, or a limit of this process, allowed no such memory.

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
    counts = session.tell()[1]
    return Memory(*(dict(enumerate(column)) for column in zip(*counts)))


@contextlib.contextmanager
def profile(serial: Serial | None = None) -> Iterator[Profile]:
    """Measure, in a ``with`` block, where the time of every rank goes.

    Parameters
    ----------
    serial : Profile or dict, optional
        The times of the same work in serial, for a column of their own: the profile of a session of one rank, or
        seconds by category (and ``"total"``), such as ``{"total": 395.1, "function": 382.5}``.

    Yields
    ------
    Profile
        Filled when the block is left, also by an exception, or when the session is closed in it.

    Raises
    ------
    SessionError
        Without a session, or if it is being profiled already.

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
    """Write, in a ``with`` block, what every rank did and when to a file for https://ui.perfetto.dev.

    The file holds Chrome trace events: a process for each rank, in it the commands and what they consist of, all on one
    clock. Each rank keeps the last million of changes, in 16 MB.

    Parameters
    ----------
    path : str or path
        Of a JSON file, which is written when the block is left.

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
