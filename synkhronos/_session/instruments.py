"""Profile and trace the ranks (`profile`, `trace`), and report the contents of the shared heaps (`memory`)."""

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
    """Use of each rank's part of the shared heap, in bytes, as `memory` returns it.

    ``str()`` returns a table in megabytes (10**6 bytes).

    Attributes
    ----------
    in_use : dict
        ``in_use[rank]``: bytes of existing arrays, such as the values of shared variables.
    kept : dict
        ``kept[rank]``: bytes of freed arrays whose memory is cached for new arrays.
    largest : dict
        ``largest[rank]``: the largest number of bytes that were in use at the same time.
    """

    in_use: dict[int, int]
    kept: dict[int, int]
    largest: dict[int, int]

    def _lines(self) -> list[list[str]]:
        """Return the rows of the table, each a list of cells."""
        rows = {"In use": self.in_use, "Kept": self.kept, "Largest": self.largest}
        lines = [["Memory (MB)", *(f"rank {rank}" for rank in self.in_use)]]
        for name, row in rows.items():
            lines.append([name, *(f"{n_bytes / _MEGABYTE:,.1f}" for n_bytes in row.values())])
        return lines

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return html_table(self._lines())

    def __str__(self) -> str:
        return text_table(self._lines())


def memory() -> Memory:
    """Return how many bytes of the shared heap each rank uses.

    The shared heap holds arrays of 16 KiB and more that functions and collectives create. The size of each is rounded
    up by at most a quarter. `Data`, results, and memory that the program allocates itself are not included. The numbers
    are read from shared memory: they need a message to the other node leaders only, not to the other ranks.

    Returns
    -------
    Memory
        Three dicts of bytes by rank. All are 0 if the kernel, or a limit of this process, allowed no shared heap.

    Raises
    ------
    SessionError
        If there is no session.

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
    """Measure how every rank spends its time in a ``with`` block.

    At every moment each rank is in exactly one category of `Profile`, so a rank's categories sum to the measured time.

    Parameters
    ----------
    serial : Profile or dict, optional
        Times of the same work in a serial program, for further columns of the table: the profile of a session of one
        rank, or seconds by category (and ``"total"``), such as ``{"total": 395.1, "function": 382.5}``.

    Yields
    ------
    Profile
        Empty within the block. It is filled when the block ends, even by an exception, or when the session is closed
        within the block.

    Raises
    ------
    SessionError
        If there is no session, or it is being profiled already.
    TypeError, ValueError
        If ``serial`` is neither the profile of one rank nor a dict of seconds by category.

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
    """Record a timeline of every rank in a ``with`` block, as a file for https://ui.perfetto.dev.

    The file has the JSON object format of Chrome's trace events. It shows each rank as a process, with its commands and
    their phases. All times are converted to the controller's clock. Each rank keeps the last million changes of phase,
    in 16 MB.

    Parameters
    ----------
    path : str or path
        The JSON file. It is opened when the block begins, and written, in place of an existing file, when the block
        ends.

    Yields
    ------
    Profile
        The times that `profile` measures.

    Raises
    ------
    SessionError
        If there is no session, or it is being profiled already.
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
    with open(path, "a", encoding="utf-8") as file:  # a file that exists is kept if there is an error here
        measured = Profile()
        begin(session, measured, spans=True)
        try:
            yield measured
        finally:
            if session.profile is measured:
                finish(session)
            if file.seekable():
                file.truncate(0)
            json.dump(events(measured), file)
