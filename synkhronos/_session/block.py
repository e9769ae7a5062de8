"""`session`: `fork` and `close` around a ``with`` block."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

from synkhronos._interrupts import let_interrupts_pass
from synkhronos._keywords import checks_keywords
from synkhronos._session.lifecycle import close, fork, held

__all__ = ["session"]

_logger = logging.getLogger("synkhronos")


@contextlib.contextmanager
def _session(*args: Any, **kwargs: Any) -> Iterator[int]:
    before = held()
    try:
        yield fork(*args, **kwargs)
    except BaseException:
        try:
            _close_what_is_new(before)
        except Exception as error:  # the one that is on its way says more
            let_interrupts_pass(error)
            _logger.error("closing the session failed, too: %s: %s", type(error).__name__, error)
        raise
    _close_what_is_new(before)


def _close_what_is_new(before: Any) -> None:
    """Close the session, unless there is none any more, or it was there before."""
    if held() is not before:
        close()


def _takes_what_fork_takes(function: Any) -> Any:
    signature = inspect.signature(fork)
    function.__signature__ = signature.replace(return_annotation="AbstractContextManager[int]")
    return checks_keywords(function)


@_takes_what_fork_takes
def session(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[int]:
    """Have a session in a ``with`` block: `fork` at its beginning, `close` at its end, however it is left.

    An exception in the block goes on as it is, whatever becomes of closing. A session that is broken, or that was
    closed in the block, is no error at its end. The function also makes a decorator.

    Parameters
    ----------
    *args, **kwargs
        Those of `fork`.

    Returns
    -------
    context manager
        Its value is the number of ranks.

    Raises
    ------
    SessionError, DeviceError, TypeError, ValueError
        As `fork`, when the block is entered.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2) as n_ranks:
    ...     print(n_ranks, synk.function([x], x.mean())([1, 2, 6]))
    2 3.0
    """
    return _session(*args, **kwargs)
