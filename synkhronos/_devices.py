"""What there is to compute on, and binding a process to one device.

This release computes on CPU cores. CUDA devices are counted, in a subprocess, so that asking leaves this process
without a CUDA context and thereby fit to fork.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from threadpoolctl import ThreadpoolController

from synkhronos.errors import DeviceError

__all__ = ["ThreadLimits", "count_cores", "count_gpus", "find_devices"]

_logger = logging.getLogger("synkhronos")

_COUNT_GPUS = """
import sys
try:
    from pygpu import gpuarray
    count = 0
    for platform in range(gpuarray.count_platforms("cuda")):
        count += gpuarray.count_devices("cuda", platform)
except Exception as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    count = 0
print(count)
"""


def count_cores() -> int:
    """The number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def count_gpus() -> int:
    """The number of CUDA devices that pygpu can see, counted in a subprocess; 0 without pygpu or without a driver."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        _logger.debug("counting GPUs failed: %s", error)
        return 0
    if done.stderr.strip():
        _logger.debug("no CUDA device: %s", done.stderr.strip())
    return int(done.stdout.split()[-1])


def find_devices(n_parallel: int | None, use_gpu: bool | None, devices: str | Sequence[str] | None) -> list[str]:
    """Name the device of each rank.

    Parameters
    ----------
    n_parallel : int or None
        Number of ranks; ``None`` for one on each device.
    use_gpu : bool or None
    devices : str, list of str or None
        Explicit names; with one name (or one string), ``n_parallel`` ranks share it.

    Raises
    ------
    TypeError, ValueError
        For arguments that make no sense.
    DeviceError
        If a device cannot be had; the message says what is missing.
    """
    if n_parallel is not None:
        if isinstance(n_parallel, bool) or not hasattr(n_parallel, "__index__"):
            raise TypeError(f"n_parallel must be an int or None; got {n_parallel!r}")
        if n_parallel < 1:
            raise ValueError(f"n_parallel must be at least 1; got {n_parallel}")
    if use_gpu not in (None, True, False):
        raise TypeError(f"use_gpu must be True, False or None; got {use_gpu!r}")
    if devices is not None:
        return _named(devices, n_parallel, use_gpu)
    if use_gpu:
        raise DeviceError(
            f"use_gpu=True, but this release computes on CPU cores only ({count_gpus()} CUDA devices are visible to "
            "pygpu here); leave use_gpu out, or pass use_gpu=False, to use the CPU cores"
        )
    return ["cpu"] * (count_cores() if n_parallel is None else int(n_parallel))


def _named(devices: Any, n_parallel: int | None, use_gpu: bool | None) -> list[str]:
    names = [devices] if isinstance(devices, str) else list(devices) if isinstance(devices, (list, tuple)) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f'devices must be a device name such as "cpu", or a list of them; got {devices!r}')
    if len(names) == 1 and n_parallel is not None:
        names *= n_parallel
    if n_parallel is not None and n_parallel != len(names):
        raise ValueError(f"n_parallel={n_parallel}, but {len(names)} devices are named")
    for name in names:
        if name != "cpu":
            raise DeviceError(f'device "{name}" cannot be used: this release computes on CPU cores only; use "cpu"')
    if use_gpu:
        raise DeviceError(f"use_gpu=True, but devices={devices!r} names none")
    return names


class ThreadLimits:
    """Keeps the BLAS and OpenMP threads of this process to its fair part of the cores.

    Parameters
    ----------
    n_ranks : int
    """

    def __init__(self, n_ranks: int) -> None:
        self._n_threads = max(1, count_cores() // n_ranks)
        self._limited: set[str] = set()
        self._undo: list[Any] = []

    def apply(self) -> None:
        """Limit the libraries that this process has loaded by now, and that are not limited yet."""
        controller = ThreadpoolController()
        loaded = {library["filepath"] for library in controller.info()}
        if loaded - self._limited:
            self._undo.append(controller.limit(limits=self._n_threads))
            self._limited |= loaded

    def restore(self) -> None:
        """Undo `apply`."""
        while self._undo:
            self._undo.pop().restore_original_limits()
        self._limited.clear()
