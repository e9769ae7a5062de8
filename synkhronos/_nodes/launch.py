"""Finding out whether this process was started with others by MPI, and joining them.

What launchers tell in the environment is compared with what MPI knows: where they do not fit together, MPI takes each
process for one that is alone, and the script would be executed by each of them.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any

from synkhronos._interrupts import deferred_interrupts
from synkhronos._nodes.line import Line
from synkhronos._nodes.litter import sweep
from synkhronos._nodes.neighbours import share_cores
from synkhronos._nodes.witness import Witness
from synkhronos._partition import shares
from synkhronos.errors import DeviceError

__all__ = ["find_line", "own_part", "witness"]

#: What launchers of MPI programs tell each process: how many there are. That of ``srun`` counts where it speaks no PMI,
#: and has started no launcher that does.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPIR_", "SLURM_STEP_NUM_TASKS")

#: UCX, by which MPICH's wheel sends, passes so much to TCP at a time; by itself a quarter of it.
_SEGMENT = "UCX_TCP_RX_SEG_SIZE", "256k"
#: UCX gives up a connection 16 seconds after its link went down, and the process crashes. Here, heartbeats decide.
_KEEPALIVE = "UCX_TCP_KEEPIDLE", "inf"

_TOGETHER = "processes that were launched together"

_line: Line | None = None
_place = 0, 1  # the number of this process among those of the job on its machine, and how many these are

#: Whom this process tells that it is about to end.
witness = Witness()


def count_launched(environment: Mapping[str, str]) -> int:
    """How many processes were launched together, by the environment of one of them."""
    return next((int(environment[name]) for name in _SIZES if environment.get(name, "").isdigit()), 1)


def find_line() -> Line | None:
    """The way to the other machines; ``None`` where this process was started alone. Found once.

    Processes of one machine get a part of its cores each. Files that killed programs of MPI have left are removed.

    Raises
    ------
    DeviceError
        If the launcher has started several processes, and MPI does not connect them.
    """
    global _line, _place
    sweep()
    if _line is not None:
        return _line
    launched = count_launched(os.environ)
    if launched == 1:
        return None
    with deferred_interrupts():  # all processes come together once
        mpi = _initialised(launched)
        _place = share_cores(mpi.COMM_WORLD)
        _line = Line(mpi)
    witness.call(os.environ, _line.machine, _line.hosts[_line.machine])
    for name in [name for name in os.environ if name.startswith(_OF_LAUNCHERS)]:
        del os.environ[name]  # programs that this one starts are no part of the job
    return _line


def own_part(devices: list[str]) -> list[str]:
    """Of all devices of this machine, those that are this process's: all, unless others of the job are here, too."""
    number, n = _place
    if len(devices) < n:
        return devices
    return devices[slice(*shares(len(devices), n)[number].bounds)]


def _initialised(launched: int) -> Any:
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
    is_ours = not MPI.Is_initialized()
    library = " ".join(MPI.Get_library_version().splitlines()[0].strip("\0 ").split(",")[0].split())
    if is_ours and "OMPI_COMM_WORLD_SIZE" in os.environ and not library.startswith("Open MPI"):
        # MPICH's library ends a process that starts it there
        raise DeviceError(f"this is one of {launched} {_TOGETHER}: {_mend(library)}")
    if is_ours:
        os.environ.setdefault(*_SEGMENT)
        os.environ.setdefault(*_KEEPALIVE)
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    size = MPI.COMM_WORLD.Get_size()
    if launched != size:
        if is_ours:
            atexit.register(MPI.Finalize)  # which removes its files
        raise DeviceError(f"this is one of {launched} {_TOGETHER}, and MPI knows {size}: {_mend(library)}")
    return MPI


def _mend(library: str) -> str:
    """Why a library of MPI knows nothing of its launcher, and what to do."""
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        way = "pmix, or mpiexec in place of srun" if library.startswith("Open MPI") else "pmi2"
        return f"srun and the library ({library}) do not understand each other: pass --mpi={way}"
    return (
        f"the launcher is not that of the library ({library}): call the mpiexec that came with it, which "
        "`python -m synkhronos run --hosts …` finds"
    )
