"""Context managers: `session`, `sequence`, `profile` and `trace`; and `memory`, which reports on the shared heaps."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, TypeVar, cast

from synkhronos._session.lifecycle import close, current, fork, held
from synkhronos._session.profiles import Profile, Serial, begin, events, finish
from synkhronos._session.submission import Recorder
from synkhronos._utils.display import check_keywords, html_table, text_table
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos.errors import SessionError

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    _Parameters = ParamSpec("_Parameters")

_Made = TypeVar("_Made")
_logger = logging.getLogger("synkhronos")


class Block(contextlib.ContextDecorator, contextlib.AbstractContextManager[int]):
    """Context manager and decorator that `session` returns; it can be entered again after it was left."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._args, self._kwargs = args, kwargs

    def __enter__(self) -> int:
        before = held()
        try:
            return fork(*self._args, **self._kwargs)
        except BaseException:
            if held() is not before:
                _close_after_error()
            raise

    def __repr__(self) -> str:
        return f"<synkhronos.session{self._args!r}: {held() or 'not entered'}>"

    def _repr_html_(self) -> str:
        """Return a table of the ranks of the current session, for notebooks."""
        session = held()
        if session is None:
            return html_table([("Session", "ranks"), ("not entered", 0)])
        own = {session.master_rank: "controller"}
        lines = [(rank, device, own.get(rank, "worker")) for rank, device in enumerate(session.devices)]
        return html_table(
            [("rank", "device", ""), *lines], "broken: only close() is possible" if session.broken else ""
        )

    def __exit__(self, kind: Any, error: Any, where: Any) -> None:
        if held() is None:
            return
        if error is None:
            close()
        else:
            _close_after_error()


def _close_after_error() -> None:
    try:
        close()
    except Exception as error:  # the exception of the block says more
        let_interrupts_pass(error)
        _logger.error("closing the session failed, too: %s: %s", type(error).__name__, error)


def _like_fork(fork: Callable[_Parameters, int]) -> Callable[[Callable[..., _Made]], Callable[_Parameters, _Made]]:
    """Give a function the signature of `fork`, except for its return annotation."""

    def decorate(function: Callable[..., _Made]) -> Callable[_Parameters, _Made]:
        signature = inspect.signature(fork)
        function.__signature__ = signature.replace(return_annotation="AbstractContextManager[int]")  # type: ignore[attr-defined]
        return cast("Callable[_Parameters, _Made]", function)

    return decorate


@_like_fork(fork)
def session(*args: Any, **kwargs: Any) -> Block:
    """Open a session for a ``with`` block: call `fork` at its beginning, and `close` at its end.

    The session is closed even if an exception ends the block. The exception is raised unchanged, even if closing fails,
    too. It is no error if the session is broken at the end of the block, or was closed within it. The returned object
    can also decorate a function.

    Parameters
    ----------
    *args, **kwargs
        The arguments of `fork`.

    Returns
    -------
    context manager
        ``with session(...) as n_ranks`` gives the number of ranks.

    Raises
    ------
    SessionError, DeviceError, NodeLost, TypeError, ValueError
        As in `fork`, when the block is entered. A `TypeError` for an unknown argument is raised at once.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2) as n_ranks:
    ...     print(n_ranks, synk.function([x], x.mean())([1, 2, 6]))
    2 3.0
    """
    check_keywords(fork, kwargs)
    inspect.signature(fork).bind(*args, **kwargs)  # raises TypeError here, not when the block is entered
    return Block(args, kwargs)


# -- sequences


@contextlib.contextmanager
def sequence() -> Iterator[None]:
    """Record the calls and collectives in a ``with`` block, and send them to the ranks in one message at its end.

    Within the block each part (a call or a collective) is validated, NumPy inputs are copied into shared memory, and a
    call returns a `Future`. At the end of the block the ranks execute the parts in order, with a barrier between them,
    and reply once.

    Operations on the controller alone (writes to `Data`, a variable's own ``set_value`` and ``get_value``) take effect
    at once, and so before all recorded parts. Operations that need a reply of the ranks (reading a variable,
    `all_gather`, `broadcast` of the controller's values) must come first in the block, or outside of it. If an
    exception ends the block, no part is sent. Calls of other threads are not recorded.

    Yields
    ------
    None

    Raises
    ------
    SessionError
        If there is no session, or a sequence is already open.
    WorkerError
        At the end of the block, if a rank fails. The message names the failed part, and the parts that are complete on
        all ranks. Later parts are not executed.

    Examples
    --------
    >>> x, total = T.dvector("x"), theano.shared(0.0)
    >>> with synk.session(2):
    ...     add = synk.function([x], x.mean(), updates=[(total, total + x.sum())])
    ...     with synk.sequence():
    ...         mean = add([1, 2, 6])
    ...         synk.all_reduce(total, op="sum")
    ...     print(mean.result(), total.get_value())
    3.0 9.0
    """
    session = current("sequence")
    sequencer = session.sequencer
    if sequencer.recording is not None:
        raise SessionError("synkhronos.sequence: another sequence is open, and they do not nest; close that one first")
    session.check_usable()
    with sequencer.one_at_a_time:
        recorder = Recorder()
        try:
            sequencer.recorder = recorder
            try:
                yield
                with session.lock, session.timeline.call("sequence"):  # from here on, signal handlers cannot call
                    sequencer.recorder = None
                    recorder.send(session)
            except BaseException as error:
                recorder.drop(error)
                raise
        finally:
            sequencer.recorder = None


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
