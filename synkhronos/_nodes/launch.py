"""Detect whether this process was started with others by MPI, and connect it with them.

What launchers set in the environment is compared with what MPI knows: where they do not fit together, MPI takes each
process for one that is alone, and each of them would execute the script.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

from synkhronos._nodes.limit import StartLimit
from synkhronos._nodes.line import Line
from synkhronos._nodes.litter import sweep
from synkhronos._nodes.neighbours import share_cores
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rendezvous import rendezvous
from synkhronos._utils.rows import shares
from synkhronos.errors import DeviceError

__all__ = ["find_line", "own_part"]

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
