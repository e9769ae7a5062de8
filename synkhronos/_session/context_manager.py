"""Context managers: `session` calls `fork` and `close`, and `sequence` sends several commands in one message."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable, TypeVar, cast

from synkhronos._session.lifecycle import close, current, fork, held
from synkhronos._session.submission import Recorder
from synkhronos._utils.display import html_table
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
            except BaseException as error:
                recorder.drop(error)
                raise
            with session.lock, session.timeline.call("sequence"):  # from here on, signal handlers cannot call
                sequencer.recorder = None
                recorder.send(session)
        finally:
            sequencer.recorder = None
