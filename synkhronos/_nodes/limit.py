"""Time limit of a session's start on several nodes.

Most of the start can be left by an exception. What cannot, such as ``MPI_Init`` where a firewall is between the nodes,
ends with this process: a small process next to it kills it some seconds after the limit, and the launcher ends the job.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from typing import Any

from synkhronos._processes import Patience, start_apart
from synkhronos._utils.rendezvous import rendezvous

__all__ = ["StartLimit"]

_GRACE_SECONDS = 5.0  # in which an exception should have come
_LOOK_SECONDS = 0.2
_ABORT_SECONDS = 1.0  # that the launcher has to end the job, before this process's end does so where it can
_STDERR = 2


class StartLimit:
    """Limit of one start, which begins when this is made.

    Parameters
    ----------
    seconds : float or None
        ``None``: no limit.

    Raises
    ------
    ValueError
        If this is no positive number.
    """

    def __init__(self, seconds: Any) -> None:
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds > 0):
            raise ValueError(f"start_timeout must be a positive number of seconds, or None; got {seconds!r}")
        self.seconds: float | None = seconds
        self._began = time.monotonic()
        self._disarmed: mmap.mmap | None = None  # a byte that the small process looks at

    def remaining(self) -> float | None:
        """Return the seconds that are left; ``None``: no limit."""
        return None if self.seconds is None else max(0.0, self.seconds - (time.monotonic() - self._began))

    def arm(self, what: str, margin: float = 0.0) -> None:
        """Have this process killed if it does not come to `disarm` in time.

        Parameters
        ----------
        what : str
            The end of the message.
        margin : float
            Seconds more, so that another process ends the job before.
        """
        seconds, leader = self.remaining(), os.getpid()
        if seconds is None:
            return
        message = f"synkhronos.fork: the start took longer than start_timeout={self.seconds:g} seconds: {what}\n"
        disarmed = self._disarmed = mmap.mmap(-1, 1)
        seconds += margin + _GRACE_SECONDS
        start_apart(lambda: _end_late(leader, seconds, message.encode(), disarmed), rendezvous.descriptors())

    def disarm(self) -> None:
        """Undo `arm`."""
        if self._disarmed is not None:
            self._disarmed[0] = 1
            self._disarmed = None


def _end_late(leader: int, seconds: float, message: bytes, disarmed: mmap.mmap) -> None:
    patience = Patience(seconds)
    while not patience.is_over():
        time.sleep(_LOOK_SECONDS)
        if disarmed[0]:
            return
    os.write(_STDERR, message)
    rendezvous.abort()
    time.sleep(_ABORT_SECONDS)
    os.kill(leader, signal.SIGKILL)
