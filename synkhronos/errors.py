"""Exceptions that Synkhronos raises, all derived from `SynkhronosError`.

Invalid arguments raise Python's own `TypeError`, `ValueError`, `IndexError` and `MemoryError`, in the controller,
before anything is sent to a worker. The classes here report failures of the session and of its ranks.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CollectiveAborted",
    "DeviceError",
    "NodeLost",
    "SessionError",
    "SynkhronosError",
    "WorkerDied",
    "WorkerError",
    "WorkerRestarted",
    "WorkerTimeout",
]

#: Message of the `SessionError` in a call during which a signal handler closed the session.
CLOSED_WITHIN = "the session was closed while this call was under way"


class SynkhronosError(Exception):
    """Base class of all exceptions that are specific to Synkhronos.

    Examples
    --------
    >>> try:
    ...     synk.distribute()
    ... except synk.SynkhronosError as error:
    ...     print(type(error).__name__)
    SessionError
    """


class SessionError(SynkhronosError, RuntimeError):
    """A call came at the wrong time, or the session is broken; the message says what to call first.

    Examples
    --------
    >>> try:
    ...     synk.distribute()
    ... except synk.SessionError as error:
    ...     print(error)
    synkhronos.distribute: there is no session; call synkhronos.fork() first
    """


class DeviceError(SynkhronosError, RuntimeError):
    """A device cannot be used; the message names the device and the cause.

    Examples
    --------
    >>> try:
    ...     synk.fork(devices="opencl9:9")
    ... except synk.DeviceError:
    ...     print("no such device")
    no such device
    """


class WorkerError(SynkhronosError, RuntimeError):
    """An exception was raised on a rank while it executed a command; the session stays usable.

    ``str()`` gives the exception's message, and after it the traceback from that rank.

    Attributes
    ----------
    rank : int
        The rank that failed first.
    device : str
        The device of that rank.
    traceback_text : str
        The traceback on that rank, with the exceptions that caused it.
    exception : Exception or None
        The exception itself if the rank is the controller; exceptions of workers stay in the workers.
    part : int
        The index of the part of a `sequence` that failed, from 0; 0 outside of a sequence.
    updated : bool or None
        As for `WorkerRestarted`.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     second = synk.function([x], x[1])
    ...     try:
    ...         second([1, 2, 6])  # rank 1 has one row
    ...     except synk.WorkerError as error:
    ...         print(error.rank)
    1
    """

    def __init__(
        self,
        message: str,
        rank: int,
        device: str,
        traceback_text: str = "",
        exception: Exception | None = None,
        *,
        part: int = 0,
        updated: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.device = device
        self.traceback_text = traceback_text
        self.exception = exception
        self.part = part
        self.updated = updated

    def __str__(self) -> str:
        """Return the message, and then the traceback."""
        where = f"\n\nOn rank {self.rank}: {self.traceback_text.rstrip()}" if self.traceback_text else ""
        return f"{super().__str__()}{where}"


class WorkerDied(SynkhronosError, RuntimeError):
    """A worker process ended unexpectedly; the session is broken and can only be closed.

    Attributes
    ----------
    rank : int
        The rank of that worker.
    pid : int
        Its process id.
    exitcode : int or None
        Its exit code; negative: the signal that ended it.

    Examples
    --------
    >>> with synk.session(2):
    ...     try:
    ...         synk.distribute()
    ...     except synk.WorkerDied as error:  # then the session is broken, and its block ends
    ...         print(error.rank, error.exitcode)
    """

    def __init__(self, message: str, rank: int, pid: int, exitcode: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.exitcode = exitcode


class NodeLost(WorkerDied):
    """A node was silent for longer than ``fork(heartbeat=...)``, or ended, or did not start in time.

    A silent node is down or frozen, or the link to it is cut. `fork` raises this for a node that ends without calling
    `fork`, or does not start within ``start_timeout``.

    This program can have no other session and must be started again. It may still close this one and save its results.
    When it ends, the whole job ends.

    Attributes
    ----------
    machine : int
        The number of that node; 0: this node, whose link is down, or which was frozen itself.

    Examples
    --------
    >>> try:
    ...     raise synk.NodeLost("nothing was heard from node 1 (b)", machine=1)
    ... except synk.WorkerDied as error:  # the ranks of a lost node count as dead
    ...     print(error.machine)
    1
    """

    def __init__(self, message: str, machine: int) -> None:
        super().__init__(message, rank=-1, pid=0, exitcode=None)
        self.machine = machine


class WorkerRestarted(SynkhronosError, RuntimeError):
    """A worker died in a call and was replaced; the call was not completed, and can be made again.

    The new worker has the functions, the data, and the controller's values of the shared variables. Of scattered
    variables it has its own rows if the array that was scattered still exists with the same contents. Otherwise these
    rows are lost, and each use of the variable is a `SessionError` until it is scattered, broadcast or set again. Other
    ranks may have done their part of the interrupted call already; ``synkhronos.broadcast`` makes replicas equal again.
    The `WorkerDied` is the ``__cause__``.

    Attributes
    ----------
    ranks : tuple of int
        The ranks whose workers were replaced.
    lost : list of shared variables
        The variables of which rows are lost.
    updated : bool or None
        Whether a call of an exact function has made all of its updates, so that only its outputs are lost, or none of
        them. ``False`` if the function has no updates. ``None`` if it is not known: for other commands, and for calls
        that update nothing by slices.

    Examples
    --------
    >>> s = theano.shared(np.zeros(2), "s")
    >>> with synk.session(2, restart_workers=True):
    ...     try:
    ...         synk.broadcast(s, [1, 2])
    ...     except synk.WorkerRestarted:  # the call was not completed
    ...         synk.broadcast(s, [1, 2])
    """

    def __init__(
        self, message: str, ranks: tuple[int, ...], lost: list[Any] | None = None, *, updated: bool | None = None
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.lost = lost or []
        self.updated = updated


class WorkerTimeout(SynkhronosError, TimeoutError):
    """A rank did not answer within ``fork(timeout=...)``; the session is broken and can only be closed.

    Attributes
    ----------
    rank : int
        The rank that kept the others waiting.
    pid : int
        Its process id.

    Examples
    --------
    >>> s = theano.shared(np.zeros(2), "s")
    >>> with synk.session(2, timeout=60):
    ...     try:
    ...         synk.broadcast(s, [1, 2])
    ...     except synk.WorkerTimeout as error:
    ...         print(error.rank, error.pid)
    """

    def __init__(self, message: str, rank: int, pid: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid


class CollectiveAborted(SynkhronosError):
    """Raised on a rank that waits in a collective when another rank has failed; users see the other rank's error."""
