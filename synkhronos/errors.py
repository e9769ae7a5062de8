"""The errors that Synkhronos raises, in one tree under `SynkhronosError`.

Bad arguments raise Python's own `TypeError`, `ValueError`, `IndexError` and `MemoryError`, in the master, before
anything is sent to a worker. The classes here tell of what happens on the ranks.
"""

from __future__ import annotations

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

#: What a `SessionError` says in a call from within which, by a handler of a signal, the session was closed.
CLOSED_WITHIN = "the session was closed while this call was under way"


class SynkhronosError(Exception):
    """Base class of every error that is particular to Synkhronos.

    Examples
    --------
    >>> try:
    ...     synk.distribute()
    ... except synk.SynkhronosError as error:
    ...     print(type(error).__name__)
    SessionError
    """


class SessionError(SynkhronosError, RuntimeError):
    """A call came out of order, or the session is broken; the message says what to call first.

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
    """An exception was raised on a rank while it executed a command.

    ``str()`` gives what was raised, once, and after it the traceback from that rank. The session stays usable.

    Attributes
    ----------
    rank : int
        The rank that failed first.
    device : str
        That rank's device.
    traceback_text : str
        Where on that rank it was raised, and what it came from.
    exception : Exception or None
        The exception itself, if the rank is the master's own: exceptions of workers stay there.
    part : int
        Which part of a `sequence` it was, counted from 0; 0 outside of one.

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
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.device = device
        self.traceback_text = traceback_text
        self.exception = exception
        self.part = part

    def __str__(self) -> str:
        """What was raised, then where."""
        where = f"\n\nOn rank {self.rank}: {self.traceback_text.rstrip()}" if self.traceback_text else ""
        return f"{super().__str__()}{where}"


class WorkerDied(SynkhronosError, RuntimeError):
    """A worker process ended without being told to; the session is broken and can only be closed.

    Attributes
    ----------
    rank, pid, exitcode : int
        Which worker, its process id, and its exit code (negative: the signal that ended it).

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
    """A node of several was not heard of for two seconds, ended before `fork`, or did not start in time.

    This program can have no other session, and must be started again; it may close this one and save its results. At
    its end the whole job ends.

    Attributes
    ----------
    machine : int
        Which one.

    Examples
    --------
    >>> try:
    ...     raise synk.NodeLost("machine 1 (b) was not heard of", machine=1)
    ... except synk.WorkerDied as error:  # for the ranks there count as dead
    ...     print(error.machine)
    1
    """

    def __init__(self, message: str, machine: int) -> None:
        super().__init__(message, rank=-1, pid=0, exitcode=None)
        self.machine = machine


class WorkerRestarted(SynkhronosError, RuntimeError):
    """A worker died in a call, and was replaced: the call was not completed, the next one will work.

    The new worker has the functions, the data, and the master's values of the shared variables. Other ranks may have
    done their part of the interrupted call already; ``synkhronos.broadcast`` makes replicas equal again. The
    `WorkerDied` is the ``__cause__``.

    Attributes
    ----------
    ranks : tuple of int
        The ranks whose workers were replaced.

    Examples
    --------
    >>> s = theano.shared(np.zeros(2), "s")
    >>> with synk.session(2, restart_workers=True):
    ...     try:
    ...         synk.broadcast(s, [1, 2])
    ...     except synk.WorkerRestarted:  # the call was not completed
    ...         synk.broadcast(s, [1, 2])
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class WorkerTimeout(SynkhronosError, TimeoutError):
    """A rank did not answer within the ``timeout`` given to ``fork``; the session is broken and can only be closed.

    Attributes
    ----------
    rank, pid : int
        Which rank kept the others waiting, and its process id.

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
