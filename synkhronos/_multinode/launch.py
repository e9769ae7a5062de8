"""Connect the processes of an MPI job at its start, and prepare each host.

- Detection: the environment variables of the launcher are compared with the number of processes that MPI reports. If
  launcher and MPI library do not belong together, MPI takes each process for the only one. Each process would then
  execute the script.
- Time limit of the start: exceptions end most steps of the start. They cannot end some calls, such as ``MPI_Init``
  behind a firewall. A small separate process therefore kills this process some seconds after the limit, and the
  launcher ends the job.
- Cores and GPUs: the processes of a job on one host divide its cores and GPUs among themselves.
- Cleaning: files in ``/dev/shm`` that MPI libraries of killed programs have left are removed. Invariant: only files of
  this user are removed, and only if no process holds them open or maps them.
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

from synkhronos._multinode.leader_comm import LeaderComm
from synkhronos._processes import Deadline, start_detached
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rendezvous import rendezvous
from synkhronos._utils.rows import shares
from synkhronos.errors import DeviceError

#: Names of files of MPICH and UCX, of Open MPI 5 and 4, and of Intel MPI.
_NAMES = re.compile(r"(mpich_sh(m_|ar_tmp)|ucx_shm_posix_|sm_segment\.|vader_segment\.|Intel_MPI_).+")

#: Namespaces of the host outside of containers, as Linux names them.
_FIRST_NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}


def sweep(folder: Path = Path("/dev/shm")) -> None:
    """Remove files of MPI libraries that no process uses.

    Parameters
    ----------
    folder : Path
        Folder of POSIX shared memory.
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
    with contextlib.suppress(OSError):  # keep the files if a process whose files are hidden may use them
        for used in _used():
            left.pop(used, None)
        for path in left.values():
            path.unlink(missing_ok=True)


def _used() -> Iterator[tuple[int, int]]:
    """Yield device and inode of the files that processes hold open or map, for at least all processes of this user.

    Raises
    ------
    PermissionError
        If processes of this user may exist whose files cannot be listed.
    """
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in _FIRST_NAMESPACES}
    if own["ipc"] == _FIRST_NAMESPACES["ipc"] and own["pid"] != _FIRST_NAMESPACES["pid"]:
        raise PermissionError("a container with the memory of its host, and without sight of its processes")
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield from _used_by(f"/proc/{process}")
        except PermissionError:
            with contextlib.suppress(FileNotFoundError):
                if process != "1" and os.stat(f"/proc/{process}").st_uid == os.geteuid():  # 1: a container's init
                    raise
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
            continue


def _used_by(process: str) -> Iterator[tuple[int, int]]:
    """Yield device and inode of the files that one process maps or holds open."""
    with open(f"{process}/maps") as maps:
        for line in maps:
            device, inode = line.split(maxsplit=5)[3:5]
            major, minor = (int(part, 16) for part in device.split(":"))
            yield os.makedev(major, minor), int(inode)
    for fd in os.listdir(f"{process}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed
            status = os.stat(f"{process}/fd/{fd}")
            yield status.st_dev, status.st_ino


_GRACE_SECONDS = 5.0  # time after the limit until the process is killed, so that an exception can come first
_LOOK_SECONDS = 0.2  # time between two checks whether the limit was removed
_ABORT_SECONDS = 1.0  # time that the launcher has to end the job before this process is killed
_STDERR = 2


class StartLimit:
    """Time limit of one start. The time begins when this object is created.

    Parameters
    ----------
    seconds : float or None
        Longest duration of the start, as the user passed it; ``None``: no limit.

    Raises
    ------
    ValueError
        If ``seconds`` is not a positive number.
    """

    def __init__(self, seconds: Any) -> None:
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds > 0):
            raise ValueError(f"start_timeout is {seconds!r}; expected a positive number of seconds, or None")
        self.seconds: float | None = seconds
        self._began = time.monotonic()
        self._disarmed: mmap.mmap | None = None  # byte of shared memory that the separate process polls

    def remaining(self) -> float | None:
        """Return the remaining seconds; ``None``: no limit."""
        return None if self.seconds is None else max(0.0, self.seconds - (time.monotonic() - self._began))

    def arm(self, what: str, margin: float = 0.0) -> None:
        """Start a process that kills this one if it does not call `disarm` in time.

        Parameters
        ----------
        what : str
            Last part of the message that is printed then.
        margin : float
            Additional seconds, so that another process of the job reaches its limit first.
        """
        seconds, leader = self.remaining(), os.getpid()
        if seconds is None:
            return
        message = f"synkhronos.fork: the start took longer than start_timeout={self.seconds:g} seconds: {what}\n"
        disarmed = self._disarmed = mmap.mmap(-1, 1)
        seconds += margin + _GRACE_SECONDS
        start_detached(lambda: _end_late(leader, seconds, message.encode(), disarmed), rendezvous.descriptors())

    def disarm(self) -> None:
        """Cancel `arm`."""
        if self._disarmed is not None:
            self._disarmed[0] = 1
            self._disarmed = None


def _end_late(leader: int, seconds: float, message: bytes, disarmed: mmap.mmap) -> None:
    """Wait for the limit in the separate process, then end the job and kill the leader, unless it was disarmed."""
    deadline = Deadline(seconds)
    while not deadline.is_over():
        time.sleep(_LOOK_SECONDS)
        if disarmed[0]:
            return
    os.write(_STDERR, message)
    rendezvous.abort()
    time.sleep(_ABORT_SECONDS)
    os.kill(leader, signal.SIGKILL)


def share_cores(communicator: Any) -> tuple[int, int]:
    """Restrict this process, and its future children, to a part of its host's cores.

    All processes of the job must call this.

    Parameters
    ----------
    communicator : mpi4py.MPI.Comm
        Communicator of all processes.

    Returns
    -------
    number, n : int
        Number of this process among the processes of the job on this host, and number of these processes.
    """
    try:
        own = tuple(sorted(os.sched_getaffinity(0)))
    except OSError:  # a sandbox forbids the call
        own = ()
    known = communicator.allgather((_host_key(), own))
    here = [rank for rank, (host, _) in enumerate(known) if host == _host_key()]
    number = here.index(communicator.Get_rank())
    part = part_of([known[rank][1] for rank in here], number)
    if part:
        os.sched_setaffinity(0, part)
    return number, len(here)


def part_of(cores: Sequence[Sequence[int]], number: int) -> Sequence[int]:
    """Return the cores to which one of the processes on a host is restricted.

    Parts are disjoint, and their sizes differ by at most one core. The result is empty if the process keeps all of its
    cores: if the launcher has already given the processes different cores, or if there are fewer cores than processes.

    Parameters
    ----------
    cores : sequence of sequences of int
        Cores on which each process of the host may run, in ascending order.
    number : int
        Number of the process on this host.
    """
    n, own = len(cores), cores[number]
    if n == 1 or len(own) < n or any(one != own for one in cores):
        return ()
    return own[slice(*shares(len(own), n)[number].bounds)]


def _host_key() -> tuple[str, str]:
    """Return an identifier of this host: name and boot id, because hosts may share a name, and containers a kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return socket.gethostname(), file.read()
    except OSError:
        return socket.gethostname(), ""


#: Prefixes of the environment variables in which launchers describe the job to a process.
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPIR_", "SLURM_STEP_NUM_TASKS")

#: Size of a TCP segment in UCX, the transport of MPICH's wheel: four times its default.
_SEGMENT = "UCX_TCP_RX_SEG_SIZE", "256k"
#: UCX's keep-alive is turned off, because it drops a connection 16 seconds after the link went down, and the process
#: crashes. Heartbeats detect lost nodes instead.
_KEEPALIVE = "UCX_TCP_KEEPIDLE", "inf"

_LEADERS_SECONDS = 10.0  # margin of the other processes, so that the first one ends the job and names the node

_TOGETHER = "processes that were launched together"

_comm: LeaderComm | None = None
_place = 0, 1  # result of `share_cores`


def find_comm(limit: StartLimit) -> LeaderComm | None:
    """Return the connection to the other nodes, which is made once; ``None`` if this process was started alone.

    It also restricts each of several processes on a host to a part of its cores, and removes files that MPI libraries
    of killed programs have left.

    Parameters
    ----------
    limit : StartLimit

    Raises
    ------
    DeviceError
        If the launcher has started several processes, but MPI does not connect them.
    NodeLost
        If another process has ended, or does not reach `fork` in time.
    """
    global _comm, _place
    sweep()
    if _comm is not None:
        return _comm
    launched = rendezvous.size
    if launched == 1:
        return None
    mpi = _import_mpi(launched)
    rendezvous.wait_for_all(limit.seconds)
    if rendezvous.rank:
        limit = StartLimit(limit.seconds)  # begins later than the limit of the first process, which must end the job
    names = [rendezvous.describe(rank) for rank in range(launched) if rank != rendezvous.rank]
    try:
        limit.arm(
            f"MPI has not connected node {rendezvous.rank} ({os.uname().nodename}) with {', '.join(names)}; see "
            "docs/machines.md, When it hangs",
            margin=_LEADERS_SECONDS if rendezvous.rank else 0.0,
        )
        with deferred_interrupts():  # each process must take part in these collectives exactly once
            _initialize(mpi, launched)
            _place = share_cores(mpi.COMM_WORLD)
            _comm = LeaderComm(mpi)
            rendezvous.joined()
            for name in [name for name in os.environ if name.startswith(_OF_LAUNCHERS)]:
                del os.environ[name]  # so that programs that this one starts do not join the job
    finally:
        limit.disarm()
    return _comm


def own_part(devices: list[str]) -> list[str]:
    """Return the devices of the host that this process uses.

    The processes of the job on this host divide the devices among themselves. If there are fewer devices than
    processes, each process uses all of them.
    """
    number, n = _place
    if len(devices) < n:
        return devices
    return devices[slice(*shares(len(devices), n)[number].bounds)]


def _import_mpi(launched: int) -> Any:
    """Return ``mpi4py.MPI``, imported without initializing MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"this is one of {launched} {_TOGETHER}, and mpi4py, which connects them, cannot be imported ({reason}); "
            "pip install mpi4py mpich"
        ) from error
    library = _library(MPI)
    if not MPI.Is_initialized() and "OMPI_COMM_WORLD_SIZE" in os.environ and not library.startswith("Open MPI"):
        # MPICH would end a process that initializes it under Open MPI's launcher
        raise DeviceError(f"this is one of {launched} {_TOGETHER}: {_how_to_launch(library)}")
    return MPI


def _initialize(mpi: Any, launched: int) -> None:
    """Initialize MPI unless the program has done so, and check that it connects all processes."""
    is_ours = not mpi.Is_initialized()
    if is_ours:
        os.environ.setdefault(*_SEGMENT)
        os.environ.setdefault(*_KEEPALIVE)
        mpi.Init_thread(mpi.THREAD_SERIALIZED)
    size = mpi.COMM_WORLD.Get_size()
    if launched != size:
        if is_ours:
            atexit.register(mpi.Finalize)  # so that MPI removes its files
        how = _how_to_launch(_library(mpi))
        raise DeviceError(f"this is one of {launched} {_TOGETHER}, and MPI knows {size}: {how}")


def _library(mpi: Any) -> str:
    """Return the name and version of the MPI library."""
    return " ".join(mpi.Get_library_version().splitlines()[0].strip("\0 ").split(",")[0].split())


def _how_to_launch(library: str) -> str:
    """Explain, for an error message, why an MPI library does not support its launcher, and how to fix it."""
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        way = "pmix, or mpiexec in place of srun" if library.startswith("Open MPI") else "pmi2"
        return f"srun does not support the library ({library}) in this way; pass --mpi={way}"
    return (
        f"the launcher belongs to another MPI library than {library}; call the mpiexec of that library, which "
        "`python -m synkhronos run --hosts …` finds"
    )
