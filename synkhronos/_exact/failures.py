"""Failed analyses of a graph: they only serve speed, so the slower path is taken and the failure is logged."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

__all__ = ["tolerated"]

_logger = logging.getLogger("synkhronos")
_ENVIRONMENT = "SYNKHRONOS_RAISE_ANALYSIS_ERRORS"
_logged: set[tuple[str, str]] = set()


@contextlib.contextmanager
def tolerated(analysis: str, subject: object) -> Iterator[None]:
    """Log what a block raises, once for each analysis and subject, instead of raising it.

    The block must leave its caller with a result that is right, if slow, wherever it ends. In a test run the
    environment variable ``SYNKHRONOS_RAISE_ANALYSIS_ERRORS=1`` has the error raised.

    Parameters
    ----------
    analysis : str
        What failed, for the log.
    subject : object
        The operation or graph that was analysed.
    """
    try:
        yield
    except (RecursionError, MemoryError):  # the slower path would not do with less
        raise
    except Exception as error:
        if os.environ.get(_ENVIRONMENT, "0") not in ("", "0"):
            raise
        key = analysis, str(subject)
        if key not in _logged:
            _logged.add(key)
            _logger.warning(
                "%s of %s failed (%s: %s): the function computes the same, perhaps more slowly. Please report it",
                *key,
                type(error).__name__,
                error,
            )
            _logger.debug("%s of %s failed", *key, exc_info=True)
