"""`session`: `fork` and `close` as a context manager."""

from __future__ import annotations

import contextlib
import inspect
import logging
from typing import TYPE_CHECKING, Any, Callable, TypeVar, cast

from synkhronos._session.lifecycle import close, fork, held
from synkhronos._utils.display import html_table
from synkhronos._utils.interrupts import let_interrupts_pass

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    _Parameters = ParamSpec("_Parameters")

_Made = TypeVar("_Made")
_logger = logging.getLogger("synkhronos")


class Block(contextlib.ContextDecorator, contextlib.AbstractContextManager[int]):
    """Context manager and decorator that `session` returns; it may be entered again after its end."""

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


def _like_fork(
    fork: Callable[_Parameters, int],
) -> Callable[[Callable[..., _Made]], Callable[_Parameters, _Made]]:
    """Give a function the signature of `fork`, except for its return annotation."""

    def decorate(function: Callable[..., _Made]) -> Callable[_Parameters, _Made]:
        signature = inspect.signature(fork)
        function.__signature__ = signature.replace(return_annotation="AbstractContextManager[int]")  # type: ignore[attr-defined]
        return cast("Callable[_Parameters, _Made]", function)

    return decorate


@_like_fork(fork)
def session(*args: Any, **kwargs: Any) -> Block:
    """Open a session for a ``with`` block: call `fork` at its beginning, and `close` at its end, however it is left.

    An exception in the block is raised unchanged, even if closing fails, too. Leaving the block with a broken session,
    or with one that was closed in the block, is no error. The returned object may also decorate a function.

    Parameters
    ----------
    *args, **kwargs
        The arguments of `fork`.

    Returns
    -------
    context manager
        Its value in ``with session(...) as n_ranks`` is the number of ranks.

    Raises
    ------
    SessionError, DeviceError, NodeLost, TypeError, ValueError
        As `fork`, when the block is entered. A `TypeError` for an unknown argument is raised at once.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2) as n_ranks:
    ...     print(n_ranks, synk.function([x], x.mean())([1, 2, 6]))
    2 3.0
    """
    inspect.signature(fork).bind(*args, **kwargs)  # raises TypeError here, not when the block is entered
    return Block(args, kwargs)
