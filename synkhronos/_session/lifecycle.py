"""Start and end of the session (`fork`, `close`), and access to the current session."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Callable, Literal, TypeVar, cast

from synkhronos._memory import remove_stale
from synkhronos._multinode import WARNING_SECONDS, Options, StartLimit, find_nodes
from synkhronos._native import native
from synkhronos._processes import kind_of
from synkhronos._rank import digest_of_states
from synkhronos._session.devices import count_gpus, find_free_devices
from synkhronos._session.diagnostics import check_cores, check_threads, warn
from synkhronos._session.dispatch import BUSY
from synkhronos._session.profiles import Profile, Serial, begin, finish
from synkhronos._session.state import Session
from synkhronos._utils.display import check_keywords
from synkhronos._utils.interrupts import collect_garbage, new_lock
from synkhronos.errors import SessionError

_logger = logging.getLogger("synkhronos")
_session: Session | None = None
_measured: Profile | None = None  # the profile of the entire session, if requested by `fork(profile=)`
_ends = False  # whether the session was closed at exit; `__del__` methods may still call `close` after that
_lock = new_lock()
#: Who computes an exact function: every rank its rows, or the controller all rows; or the cost model chooses.
PLANS = ("auto", "rows", "controller")
_FRAMES = 220  # upper limit of the stack frames that `fork` and `close` need, mostly in `Dispatcher.issue`
_Callable = TypeVar("_Callable", bound=Callable[..., Any])

#: All existing `Function` objects; functions of earlier sessions join a new session.
functions: weakref.WeakSet[Any] = weakref.WeakSet()


def current(function: str = "this") -> Session:
    """Return the current session.

    Parameters
    ----------
    function : str
        Name of the public function that needs it, for the error message.

    Raises
    ------
    SessionError
        If there is no session, or if a signal handler or finalizer needs it during a call.
    """
    if _session is None:
        raise SessionError(f"synkhronos.{function}: there is no session; call synkhronos.fork() first")
    if _session.in_a_call():
        raise SessionError(f"synkhronos.{function}: {BUSY}")
    return _session


def _one_at_a_time(function: _Callable) -> _Callable:
    """Decorate functions so that only one of them runs at a time, in one thread.

    If a signal handler calls the function during a call on the ranks, it does not wait for the lock. The thread that
    holds the lock may be waiting for the interrupted call.
    """

    @functools.wraps(function)
    def wait_and_call(*args: Any, **kwargs: Any) -> Any:
        check_keywords(function, kwargs)
        native.require_frames(_FRAMES)  # a later RecursionError would leave workers running
        if _session is None or not _session.in_a_call():
            with _lock:
                return function(*args, **kwargs)
        if not _lock.acquire(blocking=False):
            waits = "another thread closes the session, and waits for the call that this handler has interrupted"
            raise SessionError(f"synkhronos.{function.__name__}: {waits}")
        try:
            return function(*args, **kwargs)
        finally:
            _lock.release()

    return cast("_Callable", wait_and_call)


def held() -> Session | None:
    """Return the session of this process, or ``None``; a process that the user's program forked has none."""
    return _session if _session is not None and _session.pid == os.getpid() else None


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
    wire_dtype: Literal["bfloat16", "float16"] | None = None,
    heartbeat: float = 10.0,
    start_timeout: float | None = 300,
    plan: Literal["auto", "rows", "controller"] | None = None,
    exchange: Literal["bfloat16", "float16"] | None = None,
) -> int:
    """Start a session: fork the worker processes, and make this process the controller.

    The controller runs the user's program, and is also a rank. Workers inherit its memory as it is at this moment.
    Under MPI the session spans all nodes: the process of each node calls `fork`, which forks the ranks of that node.
    The program continues in the process of node 0 only. Call `fork` before anything uses a GPU, and before starting
    threads.

    Parameters
    ----------
    n_parallel : int, optional
        Number of ranks of each node, this process included. Default: one rank for each device; on CPUs, one for each
        core.
    use_gpu : bool, optional
        ``None``: CUDA GPUs if pygpu finds any, otherwise CPU cores. ``True``: GPUs, or a `DeviceError` that says what
        is missing. ``False``: CPU cores.
    master_rank : int
        The rank of this process.
    profile_workers : bool
        Print the backend's profiles of the workers when they stop. The functions must be built with ``profile=True``,
        or the backend's flag ``profile`` must be set.
    max_n_var, max_dim : int
        No effect; accepted for scripts written for the 2017 release.
    devices : str or list of str, optional
        The device of each rank: ``"cuda0"``, ``"opencl0:0"``, … or ``"cpu"``. All must be of one kind; several ranks
        may share a device. A single name is the device of all ``n_parallel`` ranks. Default: the names in the
        environment variable ``SYNKHRONOS_DEVICES`` (``"cuda0,cuda2"``), unless ``use_gpu`` is ``False``.
    replicate_rng : bool
        ``False``: random states get a different stream on each rank when they are distributed. ``True``: they stay
        equal on all ranks.
    timeout : float, optional
        Seconds that the controller waits for the other ranks in one command. After that, `WorkerTimeout` names the rank
        that the others wait for. Time during which the entire job is stopped does not count. Default: no limit.
    restart_workers : bool
        Replace a worker that dies. The new worker gets the functions, the data, and the controller's values of the
        shared variables. The interrupted call raises `WorkerRestarted`; later calls work. On CPU cores only.
    profile : bool, Profile or dict
        Measure how every rank spends its time from here to `close`, which writes the table to standard error. Times of
        a serial program, as for `synkhronos.profile`, add columns to the table.
    check_replicas : int
        Before every ``check_replicas``-th function call, compare the replicas of the function's shared variables, and
        warn once for each variable that differs between ranks. 0: never.
    wire_dtype : str, optional
        ``"bfloat16"`` or ``"float16"``: the wire dtype of large float32 arrays that are reduced between nodes. Values
        are rounded to it, which halves the bytes sent; they are summed in float32, and the sums are rounded once.
        Default: float32. No effect on one node.
    heartbeat : float
        Seconds, more than 2, without a heartbeat after which a node is lost: `NodeLost` names it. A warning is printed
        after 2 seconds in any case. A node whose processes were killed is lost at once. The value on node 0 holds for
        all nodes. No effect on one node.
    start_timeout : float, optional
        Seconds that the start of a session on several nodes may take, counted from this call. After that, `NodeLost`
        names the nodes that did not call `fork` or did not start their ranks. ``None``: no limit.
    plan : str, optional
        Who computes the exact functions that were built without ``plan``; see `function`. Default: the value of the
        environment variable ``SYNKHRONOS_PLAN``, or ``"auto"``.
    exchange : str, optional
        Former name of ``wire_dtype``; deprecated since version 0.3.

    Returns
    -------
    int
        The number of ranks.

    Raises
    ------
    SessionError
        If there is already a session, or Python is shutting down.
    TypeError, ValueError
        For invalid arguments.
    DeviceError
        If a requested device cannot be used.
    NodeLost
        If the process of another node has ended without calling `fork`, or the start takes too long.

    Warns
    -----
    RuntimeWarning
        If there are more ranks than CPU cores, or other threads are running.
    DeprecationWarning
        If ``exchange`` is passed.

    Examples
    --------
    >>> synk.fork(2)
    2
    >>> synk.close()
    """
    global _session, _measured
    if held() is not None:
        raise SessionError("synkhronos.fork was already called; call synkhronos.close() first")
    if sys.is_finalizing():
        raise SessionError(
            "synkhronos.fork: Python is shutting down, so no session can start; call fork before the program ends"
        )
    if exchange is not None:
        warn("synkhronos.fork: the argument exchange is deprecated; use wire_dtype", DeprecationWarning)
        wire_dtype = wire_dtype or exchange
    limit = StartLimit(start_timeout)
    nodes = find_nodes(find_free_devices, limit)
    names = find_free_devices(n_parallel, use_gpu, devices)
    if restart_workers and kind_of(names[0]) != "cpu":
        raise ValueError("got restart_workers on GPUs, where no worker can be forked later; leave it out")
    if isinstance(master_rank, bool) or not hasattr(master_rank, "__index__"):
        raise TypeError(f"master_rank is {master_rank!r}; expected an int")
    if not 0 <= master_rank < len(names):
        raise ValueError(f"master_rank is {master_rank}; expected 0 to {len(names) - 1}")
    plan = plan or cast(Any, os.environ.get("SYNKHRONOS_PLAN")) or "auto"
    _check_options(timeout, check_replicas, wire_dtype, heartbeat, plan)
    options = Options(
        profile_workers=bool(profile_workers),
        replicate_rng=bool(replicate_rng),
        timeout=timeout,
        restart_workers=bool(restart_workers),
        check_replicas=int(check_replicas),
        wire_dtype=wire_dtype,
        seed=None if replicate_rng else digest_of_states(),
        heartbeat=float(heartbeat),
        plan=plan,
    )
    measured = None if profile is False else Profile(None if profile is True else profile)
    if kind_of(names[0]) == "cpu":
        check_cores(len(names))
    if len(names) > 1:
        check_threads()
    remove_stale()
    try:
        if nodes is not None:
            nodes.start(names, int(master_rank), (n_parallel, use_gpu, devices), options, limit)
        _session = Session(names, int(master_rank), options, nodes)
    except BaseException:
        if nodes is not None:
            nodes.stop()
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


def _check_options(timeout: Any, check_replicas: Any, wire_dtype: Any, heartbeat: Any, plan: Any) -> None:
    """Raise `ValueError` if an argument of `fork` is invalid."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
        raise ValueError(f"timeout is {timeout!r}; expected a positive number of seconds, or None")
    if isinstance(check_replicas, bool) or not hasattr(check_replicas, "__index__") or check_replicas < 0:
        raise ValueError(f"check_replicas is {check_replicas!r}; expected a number of calls, or 0")
    if wire_dtype not in (None, "float16", "bfloat16"):
        raise ValueError(f'wire_dtype is {wire_dtype!r}; expected "float16", "bfloat16" or None')
    if plan not in PLANS:
        raise ValueError(f"plan is {plan!r}; expected {' or '.join(map(repr, PLANS))}")
    is_number = isinstance(heartbeat, (int, float)) and not isinstance(heartbeat, bool)
    if not (is_number and WARNING_SECONDS < heartbeat < math.inf):
        raise ValueError(
            f"heartbeat is {heartbeat!r}; expected a finite number of seconds above {WARNING_SECONDS:g}, after which a "
            "warning is printed"
        )


@_one_at_a_time
def close() -> None:
    """End the session: stop the workers, wait until they have ended, and free the session's memory.

    Call it in the controller; it ends the workers on all nodes. Python calls it at exit. `Data`, functions and the
    controller's values of shared variables remain, and can be used in the next session. If the session was started by
    ``fork(profile=...)``, the profile's table is written to standard error.

    Raises
    ------
    SessionError
        If it is called by a signal handler while another thread closes the session and waits for the interrupted call.

    Warns
    -----
    RuntimeWarning
        If there is no session.

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
        collect_garbage()  # the session's objects form reference cycles; this frees their memory now


def _close_at_exit() -> None:
    global _ends
    if held() is not None:
        close()
        _ends = True


def get_n_gpu() -> int:
    """Return the number of visible CUDA devices.

    They are counted in a subprocess, so that this process opens no CUDA context and can still be forked. The function
    needs no session, and raises no error.

    Returns
    -------
    int
        The number of devices; 0 if pygpu or the driver is not installed.

    Examples
    --------
    >>> devices = "cuda0" if synk.get_n_gpu() else "cpu"
    """
    return count_gpus()


def distribute() -> None:
    """Replicate all functions built so far, and their shared variables, on every rank.

    If functions use the same shared variable in the controller, they also do so on every rank, even if they are
    distributed at different times. New shared variables get copies of the controller's values. If a function is not
    distributed yet, its first call distributes it. Globals and class attributes that the program's own Ops read are
    sent again if they have changed.

    Raises
    ------
    TypeError
        If a function, or a changed global that one reads, cannot be pickled.
    WorkerError
        If a rank cannot load a function. The other functions are still distributed.
    SessionError
        If there is no session.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], x.mean())
    ...     synk.distribute()  # now, instead of in the first call
    """
    current("distribute").distribute()


def flush() -> None:
    """Have every rank free dropped memory now, if there is a usable session."""
    session = held()
    if session is not None and not session.broken:
        session.flush()
