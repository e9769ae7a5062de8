"""The life of a session: `fork`, `close`, and finding the one that there is."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Callable, Literal, TypeVar, cast

from synkhronos._memory import remove_stale
from synkhronos._multinode import StartLimit, find_machines
from synkhronos._native import native
from synkhronos._processes import kind_of
from synkhronos._session.devices import count_gpus, find_free_devices
from synkhronos._session.diagnostics import check_cores, check_threads
from synkhronos._session.dispatch import BUSY
from synkhronos._session.options import make_options
from synkhronos._session.profiles import Profile, Serial, begin, finish
from synkhronos._session.state import Session
from synkhronos._utils.display import checks_keywords
from synkhronos._utils.interrupts import collect_garbage
from synkhronos.errors import SessionError

__all__ = ["close", "current", "distribute", "fork", "functions", "get_n_gpu", "held", "settle"]

_logger = logging.getLogger("synkhronos")
_session: Session | None = None
_measured: Profile | None = None  # from `fork` to `close`
_ends = False  # whether Python shuts down, and has closed the session: programs may close it later (`__del__`)
_lock = threading.RLock()
_FRAMES = 220  # deeper than `fork` and `close` call; `Dispatcher.issue` needs most of them
_Callable = TypeVar("_Callable", bound=Callable[..., Any])

#: Every `Function` there is: a new session takes in those of sessions before it.
functions: weakref.WeakSet[Any] = weakref.WeakSet()


def current(function: str = "this") -> Session:
    """The session; without one a `SessionError`, which says that ``fork`` comes first."""
    if _session is None:
        raise SessionError(f"synkhronos.{function}: there is no session; call synkhronos.fork() first")
    if _session.in_a_call():
        raise SessionError(f"synkhronos.{function}: {BUSY}")
    return _session


def _one_at_a_time(function: _Callable) -> _Callable:
    """Let one thread at a time be in any of the functions so decorated.

    What comes from within a call does not wait: who is there already may be waiting for that call.
    """

    @functools.wraps(function)
    def wait_and_call(*args: Any, **kwargs: Any) -> Any:
        native.require_frames(_FRAMES)  # a RecursionError within would leave workers behind
        if _session is None or not _session.in_a_call():
            with _lock:
                return function(*args, **kwargs)
        if not _lock.acquire(blocking=False):
            waits = "another thread closes the session, and waits for the call from within which this comes"
            raise SessionError(f"synkhronos.{function.__name__}: {waits}")
        try:
            return function(*args, **kwargs)
        finally:
            _lock.release()

    return cast("_Callable", wait_and_call)


def held() -> Session | None:
    """The session of this process, if it has one; a process that the user has forked does not."""
    return _session if _session is not None and _session.pid == os.getpid() else None


@checks_keywords
@_one_at_a_time
def fork(
    n_parallel: int | None = None,
    use_gpu: bool | None = None,
    master_rank: int = 0,
    profile_workers: bool = False,
    max_n_var: int = 1000,
    max_dim: int = 16,
    *,
    devices: str | Sequence[str] | None = None,
    replicate_rng: bool = False,
    timeout: float | None = None,
    restart_workers: bool = False,
    profile: bool | Serial = False,
    check_replicas: int = 0,
    exchange: Literal["bfloat16", "float16"] | None = None,
    heartbeat: float = 10.0,
    start_timeout: float | None = 300,
) -> int:
    """Start one worker process for each further device; this process becomes one of the ranks, the master.

    Parameters
    ----------
    n_parallel : int, optional
        Number of ranks, this process included; of several machines, on each. Default: one for each device.
    use_gpu : bool, optional
        ``None``: CUDA GPUs if pygpu finds any, else CPU cores. ``True``: GPUs, or a `DeviceError` that says what is
        missing. ``False``: CPU cores.
    master_rank : int
        The rank of this process.
    profile_workers : bool
        Print the engine's profiles of the workers when they stop (functions must be built with ``profile=True``, or
        the engine's flag ``profile`` be set).
    max_n_var, max_dim : int
        Accepted for scripts of 2017; they limit nothing.
    devices : str or list of str, optional
        Name the device of each rank: ``"cuda0"``, ``"opencl0:0"``, … or ``"cpu"``; several ranks may share one. With
        one name, ``n_parallel`` ranks share it. All are of one kind. Default:
        what the environment variable ``SYNKHRONOS_DEVICES`` names (``"cuda0,cuda2"``), unless ``use_gpu`` is ``False``.
    replicate_rng : bool
        ``False`` gives the random states that are distributed a stream of their own on each rank; ``True`` keeps them
        equal.
    timeout : float, optional
        Seconds that the master waits for the others in one command; then `WorkerTimeout` names the rank that keeps
        them waiting. Time in which the whole job is stopped does not count. Default: no limit.
    restart_workers : bool
        Replace a worker that dies: it gets the functions, the data, and the master's values of the shared variables;
        the interrupted call raises `WorkerRestarted`, and the next one works. On CPU cores only.
    profile : bool, Profile or dict
        Measure from here to `close` where the time of every rank goes; `close` writes the table to standard error. The
        times of a serial run give it a further column, as in `synkhronos.profile`.
    check_replicas : int
        At every so many-th call of a function, compare the replicas of its shared variables before, and warn of each
        that differs, once. 0: never.
    exchange : str, optional
        ``"bfloat16"`` or ``"float16"``: large arrays of float32 that are reduced travel between machines rounded to
        this, in half the bytes; their sums are in float32, and rounded once. Default: as they are. On one machine
        nothing is rounded.
    heartbeat : float
        Seconds, more than 2, after which a node of several that sends no sign of life is lost: `NodeLost` names it. A
        warning is printed after 2 seconds, whatever this is. A node whose processes were killed is lost at once. The
        value on the first node holds for all nodes. No effect on one machine.
    start_timeout : float, optional
        Seconds that the start of a session on several nodes may take, from this call on; then `NodeLost` names the
        nodes that did not call `fork`, or did not start their ranks. ``None``: no limit.

    Returns
    -------
    int
        The number of ranks.

    Raises
    ------
    SessionError
        A `RuntimeError`: if there is a session already.
    DeviceError
        If a device that was asked for cannot be used.
    NodeLost
        If the process of another node has ended without calling `fork`, or the start takes too long.

    Examples
    --------
    >>> synk.fork(2)
    2
    >>> synk.close()
    """
    global _session, _measured
    if held() is not None:
        raise SessionError("synkhronos.fork was called already; call synkhronos.close() first")
    if sys.is_finalizing():
        raise SessionError(
            "synkhronos.fork: Python is shutting down, so no session can begin; call it before the program ends"
        )
    limit = StartLimit(start_timeout)
    machines = find_machines(find_free_devices, limit)
    names = find_free_devices(n_parallel, use_gpu, devices)
    if restart_workers and kind_of(names[0]) != "cpu":
        raise ValueError("restart_workers is for CPU cores: no worker can be forked from a process that holds a GPU")
    if isinstance(master_rank, bool) or not hasattr(master_rank, "__index__"):
        raise TypeError(f"master_rank must be an int; got {master_rank!r}")
    if not 0 <= master_rank < len(names):
        raise ValueError(f"master_rank={master_rank}: expected a rank from 0 to {len(names) - 1}")
    options = make_options(
        profile_workers, replicate_rng, timeout, restart_workers, check_replicas, exchange, heartbeat
    )
    measured = None if profile is False else Profile(None if profile is True else profile)
    if kind_of(names[0]) == "cpu":
        check_cores(len(names))
    if len(names) > 1:
        check_threads()
    remove_stale()
    try:
        if machines is not None:
            machines.start(names, int(master_rank), (n_parallel, use_gpu, devices), options, limit)
        _session = Session(names, int(master_rank), options, machines)
    except BaseException:
        if machines is not None:
            machines.stop()
        raise
    finally:
        limit.disarm()
    for function in list(functions):
        function.join(_session)
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)
    if measured is not None:
        begin(_session, measured)
    _measured = measured
    _logger.info("forked %d ranks on %s", _session.n_ranks, ", ".join(sorted(set(_session.devices))))
    return _session.n_ranks


@_one_at_a_time
def close() -> None:
    """Stop the workers and join them. Runs by itself at exit; without a session it warns and does nothing.

    Examples
    --------
    >>> n_ranks = synk.fork(2)
    >>> synk.close()
    """
    global _session
    if _ends and held() is None:
        return
    if _session is None or held() is None:
        warnings.warn("synkhronos.close: there is no session to close", RuntimeWarning, stacklevel=3)
        return
    try:
        try:
            finish(_session)
            if _measured is not None:
                with contextlib.suppress(AttributeError, OSError, ValueError):  # a program may have closed it
                    sys.stderr.write(f"{_measured}\n")
        finally:
            _session.stop()
    finally:
        _session = None
        collect_garbage()  # a session's parts refer to each other; this gives its memory back now


def _close_at_exit() -> None:
    global _ends
    if held() is not None:
        close()
        _ends = True


def get_n_gpu() -> int:
    """The number of CUDA devices visible, counted in a subprocess, so that this process stays fit to fork.

    0 without pygpu or without a driver.

    Examples
    --------
    >>> devices = "cuda0" if synk.get_n_gpu() else "cpu"
    """
    return count_gpus()


def distribute() -> None:
    """Replicate on every rank all functions built so far, with their shared variables.

    What several functions share in the master they share on every rank, whenever they were distributed. May be called
    again after further functions are built; the first call of a function that is not yet distributed does it too.
    If all are, globals and class attributes that Ops of the program read are sent again where they have changed.

    Raises
    ------
    TypeError
        If a function, or a changed global that one reads, cannot be pickled.
    SessionError
        Before ``fork`` or after ``close``.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], x.mean())
    ...     synk.distribute()  # now, and not in the first call
    """
    current("distribute").distribute()


def settle() -> None:
    """Have every rank forget at once what was dropped, if there is a session that can be told."""
    session = held()
    if session is not None and not session.broken:
        session.settle()
