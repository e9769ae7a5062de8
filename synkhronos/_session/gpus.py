"""Giving each rank of a new session its GPU, and connecting the GPUs by NCCL."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Callable

from synkhronos import _backends
from synkhronos._collectives import make_clique
from synkhronos._processes import kind_of
from synkhronos._rank import Bind, Command, Connect
from synkhronos._session.devices import check_unused, find_devices, may_use_nccl
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.progress import progress
from synkhronos.errors import DeviceError, WorkerDied, WorkerError, WorkerTimeout

__all__ = ["connect_gpus", "find_free_devices", "take_gpus"]

_logger = logging.getLogger("synkhronos")


def find_free_devices(n_parallel: int | None, use_gpu: bool | None, devices: str | Sequence[str] | None) -> list[str]:
    """As `find_devices`; GPUs only where this process has used none, and so can fork workers for them.

    Raises
    ------
    TypeError, ValueError, DeviceError
    """
    names = find_devices(n_parallel, use_gpu, devices)
    if kind_of(names[0]) != "cpu":
        _check_no_gpu_is_held()
    return names


def _check_no_gpu_is_held() -> None:
    device = _backends.bound()
    if device is not None:
        raise DeviceError(
            f"this process has used {device} already, and its context does not survive a fork. Leave device= and "
            "init_gpu_device= out of Theano's flags, since synkhronos.fork() binds the GPUs; after close(), GPUs can "
            "be had again in a new process only, CPU cores by use_gpu=False"
        )
    check_unused()


def take_gpus(devices: Sequence[str], run: Callable[[Command], Any]) -> None:
    """Have each rank take its GPU.

    Parameters
    ----------
    devices : sequence of str
        One for each rank.
    run : callable
        Has every rank execute a command.

    Raises
    ------
    DeviceError
        Naming the rank, its device and the cause.
    """
    try:
        with progress("taking GPUs"):
            run(Bind(tuple(devices)))
    except WorkerError as error:
        cause = str(error).splitlines()[0].split("DeviceError: ", 1)[-1]
        raise DeviceError(f"rank {error.rank}: {cause}") from None


def connect_gpus(devices: Sequence[str], context: Any, run: Callable[[Command], Any]) -> bool:
    """Have the ranks meet in NCCL; returns whether they did. If not, the log says why, and the host's memory serves."""
    if not may_use_nccl(devices):
        _logger.info("no NCCL between %s: collectives go through host memory", ", ".join(devices))
        return False
    try:
        run(Connect(make_clique(context)))
    except (WorkerDied, WorkerTimeout):
        raise
    except Exception as error:
        let_interrupts_pass(error)
        _logger.warning("NCCL cannot be used, so that collectives go through host memory: %s", error)
        return False
    return True
