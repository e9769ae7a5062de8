"""The instruments: `profile` and `trace`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

from synkhronos._session.lifecycle import current
from synkhronos._session.profiles import Profile, Serial, begin, events, finish

__all__ = ["Profile", "profile", "trace"]


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
