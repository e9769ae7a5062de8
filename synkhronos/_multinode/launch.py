"""Files that a library of MPI has left in ``/dev/shm``, because its program was killed.

Invariant: only files of this user are removed, and only those that no process holds open or maps.

Time limit of a session's start on several nodes.

Most of the start can be left by an exception. What cannot, such as ``MPI_Init`` where a firewall is between the nodes,
ends with this process: a small process next to it kills it some seconds after the limit, and the launcher ends the job.

Processes of a job that are on one machine share its cores, and its GPUs.

Detect whether this process was started with others by MPI, and connect it with them.

What launchers set in the environment is compared with what MPI knows: where they do not fit together, MPI takes each
process for one that is alone, and each of them would execute the script.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from synkhronos._multinode.leader_comm import Line
from synkhronos._processes import Patience, start_apart
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rendezvous import rendezvous
from synkhronos._utils.rows import shares
from synkhronos.errors import DeviceError

__all__ = ["StartLimit", "find_line", "own_part", "part_of", "share_cores", "sweep"]


#: MPICH's and UCX's, Open MPI's (versions 5 and 4), Intel MPI's.
_NAMES = re.compile(r"(mpich_sh(m_|ar_tmp)|ucx_shm_posix_|sm_segment\.|vader_segment\.|Intel_MPI_).+")

_FIRST_NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}


def sweep(folder: Path = Path("/dev/shm")) -> None:
    """Remove what nobody uses.

    Parameters
    ----------
    folder : Path
        Where shared memory has names.
    """
    left = {}
    with contextlib.suppress(OSError):  # there is no such folder
        for name in filter(_NAMES.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):  # another process has removed it
                status = (folder / name).lstat()
                if status.st_uid == os.geteuid():
                    left[status.st_dev, status.st_ino] = folder / name
    if not left:
        return
    with contextlib.suppress(OSError):  # a process that does not tell what it uses may use anything
        for used in _used():
            left.pop(used, None)
        for path in left.values():
            path.unlink(missing_ok=True)


def _used() -> Iterator[tuple[int, int]]:
    """Device and inode of all files that processes hold open or map: those of this user, at least.

    Raises
    ------
    PermissionError
        If there are processes of this user that do not tell, or that this one cannot see.
    """
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in _FIRST_NAMESPACES}
    if own["ipc"] == _FIRST_NAMESPACES["ipc"] and own["pid"] != _FIRST_NAMESPACES["pid"]:
        raise PermissionError("a container with the memory of its host, and without sight of its processes")
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield from _used_by(f"/proc/{process}")
        except PermissionError:
            with contextlib.suppress(FileNotFoundError):
                if process != "1" and os.stat(f"/proc/{process}").st_uid == os.geteuid():  # 1: that of a container
                    raise
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue


def _used_by(process: str) -> Iterator[tuple[int, int]]:
    with open(f"{process}/maps") as maps:
        for line in maps:
            device, inode = line.split(maxsplit=5)[3:5]
            major, minor = (int(part, 16) for part in device.split(":"))
            yield os.makedev(major, minor), int(inode)
    for fd in os.listdir(f"{process}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed
            status = os.stat(f"{process}/fd/{fd}")
            yield status.st_dev, status.st_ino


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


def share_cores(communicator: Any) -> tuple[int, int]:
    """Let this process, and what it forks, run on a part of its machine's cores; all processes of the job call it.

    Parameters
    ----------
    communicator : mpi4py.MPI.Comm
        Of all processes.

    Returns
    -------
    tuple of int
        The number of this process among those of its machine, and how many these are.
    """
    try:
        own = tuple(sorted(os.sched_getaffinity(0)))
    except OSError:  # the kernel refuses to tell
        own = ()
    known = communicator.allgather((_machine(), own))
    here = [rank for rank, (machine, _) in enumerate(known) if machine == _machine()]
    number = here.index(communicator.Get_rank())
    part = part_of([known[rank][1] for rank in here], number)
    if part:
        os.sched_setaffinity(0, part)
    return number, len(here)


def part_of(cores: Sequence[Sequence[int]], number: int) -> Sequence[int]:
    """Which cores one of the processes on a machine takes; empty: those that it has.

    Parts are disjoint, and their sizes differ by one core at most. Where the launcher has already given processes
    different cores, these stay; so they do where there are fewer cores than processes.

    Parameters
    ----------
    cores : sequence of sequences of int
        On which each process of that machine may run, in order.
    number : int
        Of the process, among these.
    """
    n, own = len(cores), cores[number]
    if n == 1 or len(own) < n or any(one != own for one in cores):
        return ()
    return own[slice(*shares(len(own), n)[number].bounds)]


def _machine() -> tuple[str, str]:
    """What tells this machine from others: hosts may have the same name, and containers the same kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return socket.gethostname(), file.read()
    except OSError:
        return socket.gethostname(), ""


#: What the names of variables begin with by which launchers tell a process about its job.
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPIR_", "SLURM_STEP_NUM_TASKS")

#: UCX, by which MPICH's wheel sends, passes so much to TCP at a time; by itself a quarter of it.
_SEGMENT = "UCX_TCP_RX_SEG_SIZE", "256k"
#: UCX gives up a connection 16 seconds after its link went down, and the process crashes. Here, heartbeats decide.
_KEEPALIVE = "UCX_TCP_KEEPIDLE", "inf"

_LEADERS_SECONDS = 10.0  # that other processes leave the first one to name a node

_TOGETHER = "processes that were launched together"

_line: Line | None = None
_place = 0, 1  # the number of this process among those of the job on its machine, and how many these are


def find_line(limit: StartLimit) -> Line | None:
    """Return the connection to the other nodes; ``None`` where this process was started alone. Made once.

    Processes of one node get a part of its cores each. Files that killed programs of MPI have left are removed.

    Raises
    ------
    DeviceError
        If the launcher has started several processes, and MPI does not connect them.
    NodeLost
        If another process has ended, or does not come to `fork` in time.
    """
    global _line, _place
    sweep()
    if _line is not None:
        return _line
    launched = rendezvous.size
    if launched == 1:
        return None
    mpi = _import_mpi(launched)
    rendezvous.meet(limit.seconds)
    if rendezvous.rank:
        limit = StartLimit(limit.seconds)  # the first process's has begun, and ends the job before
    names = [rendezvous.describe(rank) for rank in range(launched) if rank != rendezvous.rank]
    try:
        limit.arm(
            f"MPI has not connected node {rendezvous.rank} ({os.uname().nodename}) with {', '.join(names)}; see "
            "docs/machines.md, When it hangs",
            margin=_LEADERS_SECONDS if rendezvous.rank else 0.0,
        )
        with deferred_interrupts():  # all processes come together once
            _initialize(mpi, launched)
            _place = share_cores(mpi.COMM_WORLD)
            _line = Line(mpi)
            rendezvous.joined()
            for name in [name for name in os.environ if name.startswith(_OF_LAUNCHERS)]:
                del os.environ[name]  # programs that this one starts are no part of the job
    finally:
        limit.disarm()
    return _line


def own_part(devices: list[str]) -> list[str]:
    """Of all devices of this machine, those that are this process's: all, unless others of the job are here, too."""
    number, n = _place
    if len(devices) < n:
        return devices
    return devices[slice(*shares(len(devices), n)[number].bounds)]


def _import_mpi(launched: int) -> Any:
    """Import mpi4py, without initializing MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"this is one of {launched} {_TOGETHER}, and mpi4py, which connects them, cannot be imported ({reason}): "
            "pip install mpi4py mpich"
        ) from error
    library = _library(MPI)
    if not MPI.Is_initialized() and "OMPI_COMM_WORLD_SIZE" in os.environ and not library.startswith("Open MPI"):
        # MPICH's library ends a process that starts it there
        raise DeviceError(f"this is one of {launched} {_TOGETHER}: {_mend(library)}")
    return MPI


def _initialize(mpi: Any, launched: int) -> None:
    """Initialize MPI, unless the program has done so."""
    is_ours = not mpi.Is_initialized()
    if is_ours:
        os.environ.setdefault(*_SEGMENT)
        os.environ.setdefault(*_KEEPALIVE)
        mpi.Init_thread(mpi.THREAD_SERIALIZED)
    size = mpi.COMM_WORLD.Get_size()
    if launched != size:
        if is_ours:
            atexit.register(mpi.Finalize)  # which removes its files
        raise DeviceError(f"this is one of {launched} {_TOGETHER}, and MPI knows {size}: {_mend(_library(mpi))}")


def _library(mpi: Any) -> str:
    """Return the name and version of the library."""
    return " ".join(mpi.Get_library_version().splitlines()[0].strip("\0 ").split(",")[0].split())


def _mend(library: str) -> str:
    """Why a library of MPI knows nothing of its launcher, and what to do."""
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        way = "pmix, or mpiexec in place of srun" if library.startswith("Open MPI") else "pmi2"
        return f"srun and the library ({library}) do not understand each other: pass --mpi={way}"
    return (
        f"the launcher is not that of the library ({library}): call the mpiexec that came with it, which "
        "`python -m synkhronos run --hosts …` finds"
    )
