"""How long the master waits for its workers."""

from __future__ import annotations

import time

__all__ = ["Patience"]

#: Seconds without a look at the clock that are no waiting.
_PAUSE = 1.0


class Patience:
    """The time that the master has waited for the answers to one message.

    It looks at the clock at least twenty times a second while it waits. So no second counts in which it did not: it
    computed itself, or the whole job was stopped, as batch systems do.

    Parameters
    ----------
    seconds : float or None
        That it waits at most; ``None``: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        """A message is sent."""
        self._waited, self._looked = 0.0, time.monotonic()

    def is_over(self, margin: float = 0.0) -> bool:
        """Look at the clock; returns whether it has waited for longer than it may, and a margin."""
        now = time.monotonic()
        if now - self._looked < _PAUSE:
            self._waited += now - self._looked
        self._looked = now
        return self.seconds is not None and self._waited > self.seconds + margin
