"""Select the ranks' devices (CPU cores, CUDA GPUs or OpenCL devices), bind GPUs, and connect them by NCCL.

GPUs are listed in a subprocess, so that this process opens no GPU context and can still be forked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Callable

from synkhronos import _backends
from synkhronos._collectives import make_clique
from synkhronos._multinode import own_part
from synkhronos._processes import kind_of
from synkhronos._rank import Bind, Command, Connect
from synkhronos._utils.display import progress
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.resources import count_cores
from synkhronos.errors import DeviceError, WorkerDied, WorkerError, WorkerTimeout

_logger = logging.getLogger("synkhronos")

_NAME = re.compile(r"cpu|cuda\d+|opencl\d+:\d+")
_HINT = "`python -m synkhronos info --gpu` shows what is available and what is missing"

#: Environment variable with device names, separated by commas, for scripts that name no devices.
_ENVIRONMENT = "SYNKHRONOS_DEVICES"

#: Program that prints, as JSON by kind, the names of the GPUs that pygpu finds, or a message why it finds none.
_LIST_GPUS = """
import json, sys
from pygpu import gpuarray

def list_gpus(kind):
    try:
        platforms = range(gpuarray.count_platforms(kind))
        names = [(p, d) for p in platforms for d in range(gpuarray.count_devices(kind, p))]
    except Exception as error:
        text = error.args[0] if error.args else error
        return str(text.decode() if isinstance(text, bytes) else text)
    return [f"cuda{d}" if kind == "cuda" else f"opencl{p}:{d}" for p, d in names]

print(json.dumps({kind: list_gpus(kind) for kind in sys.argv[1:]}))
"""


def count_gpus() -> int:
    """Count the CUDA devices that pygpu finds, in a subprocess; 0 without pygpu or without a driver."""
    names = _list_gpus("cuda")
    if isinstance(names, str):
        _logger.debug("no CUDA GPU: %s", names)
        return 0
    return len(names)


def _list_gpus(wanted: str) -> list[str] | str:
    """Return the names of the GPUs of a kind, ``"cuda"`` or ``"opencl"``, or the reason why there are none."""
    if importlib.util.find_spec("pygpu") is None:
        return "pygpu is not installed"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST_GPUS, wanted],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=environment,
        )
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [f"the process that asked ended with {error.returncode}"]
        return last[0]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    names: list[str] | str = json.loads(done.stdout.splitlines()[-1])[wanted]
    return names or f"pygpu finds no {wanted} device"


def may_use_nccl(devices: Sequence[str]) -> bool:
    """Return whether NCCL can connect ranks on these devices.

    Each rank needs a CUDA GPU of its own. Ranks may share a GPU only if NCCL is configured for this: by
    ``NCCL_MULTI_RANK_GPU_ENABLE`` (NCCL 2.30 and later), or by ``NCCL_HOSTID``, which then gets a different value on
    each rank.
    """
    shared = len(set(devices)) < len(devices)
    can_share = "NCCL_HOSTID" in os.environ or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return all(kind_of(device) == "cuda" for device in devices) and (not shared or can_share)


def find_devices(n_parallel: int | None, use_gpu: bool | None, devices: str | Sequence[str] | None) -> list[str]:
    """Return the name of each rank's device.

    Parameters
    ----------
    n_parallel : int or None
        Number of ranks; ``None``: one rank for each device.
    use_gpu : bool or None
        ``None``: CUDA GPUs if there are any, otherwise CPU cores.
    devices : str, list of str or None
        Device names. A single name is the device of all ``n_parallel`` ranks. ``None``: the names in the environment
        variable ``SYNKHRONOS_DEVICES``, unless ``use_gpu`` is ``False``.

    Raises
    ------
    TypeError, ValueError
        For invalid arguments.
    DeviceError
        If a device is not available; the message says what is missing.
    """
    if n_parallel is not None:
        if isinstance(n_parallel, bool) or not hasattr(n_parallel, "__index__"):
            raise TypeError(f"n_parallel is {n_parallel!r}; expected an int or None")
        if n_parallel < 1:
            raise ValueError(f"n_parallel is {n_parallel}; expected at least 1")
    if use_gpu not in (None, True, False):
        raise TypeError(f"use_gpu is {use_gpu!r}; expected True, False or None")
    if devices is not None:
        return _named(devices, n_parallel, use_gpu)
    from_environment = os.environ.get(_ENVIRONMENT, "").replace(",", " ").split()
    if from_environment and use_gpu is not False:
        try:
            return _named(from_environment[:n_parallel], n_parallel, use_gpu)
        except (DeviceError, ValueError) as error:
            raise DeviceError(f"{_ENVIRONMENT}={os.environ[_ENVIRONMENT]}: {error}") from error
    gpus = "use_gpu=False" if use_gpu is False else _list_gpus("cuda")
    if isinstance(gpus, str):
        if use_gpu:
            raise DeviceError(f"use_gpu is True, and no CUDA GPU is available: {gpus}; {_HINT}")
        names = ["cpu"] * (count_cores() if n_parallel is None else int(n_parallel))
        if use_gpu is None:
            _logger.info("computing on CPU cores: %s", gpus)
        return names
    gpus = own_part(gpus)
    if n_parallel is not None and n_parallel > len(gpus):
        raise DeviceError(
            f"n_parallel is {n_parallel}, and there are {len(gpus)} CUDA GPUs; name them in devices= to put several "
            "ranks on one, or pass use_gpu=False for CPU cores"
        )
    return gpus[:n_parallel]


def _named(devices: Any, n_parallel: int | None, use_gpu: bool | None) -> list[str]:
    names = [devices] if isinstance(devices, str) else list(devices) if isinstance(devices, (list, tuple)) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f'devices is {devices!r}; expected a device name such as "cpu", or a list of them')
    if len(names) == 1 and n_parallel is not None:
        names *= n_parallel
    if n_parallel is not None and n_parallel != len(names):
        raise ValueError(f"n_parallel is {n_parallel}, and devices names {len(names)}; expected equal numbers")
    for name in names:
        if not _NAME.fullmatch(name):
            raise DeviceError(f'device is "{name}"; expected a name such as "cpu", "cuda0" or "opencl0:0"')
    kinds = {kind_of(name) for name in names}
    if len(kinds) > 1:
        raise DeviceError(
            f"devices is {devices!r}, a mix of {' and '.join(sorted(kinds))}; expected one kind of device, for which "
            "functions are compiled"
        )
    if use_gpu is not None and use_gpu != (kinds != {"cpu"}):
        raise DeviceError(f"use_gpu is {use_gpu}, and devices is {devices!r}; leave one of the two out")
    if kinds != {"cpu"}:
        _check_there(names, *kinds)
    return names


def _check_there(names: list[str], wanted: str) -> None:
    there = _list_gpus(wanted)
    for name in names:
        if isinstance(there, str):
            raise DeviceError(f'device "{name}" cannot be used: {there}; {_HINT}')
        if name not in there:
            raise DeviceError(f'device "{name}" does not exist; available: {", ".join(there)}')


def check_unused() -> None:
    """Raise `DeviceError` if this process has a CUDA context, because a CUDA context does not survive a fork."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # `listdir` has closed its own descriptor by now
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia-uvm"):
                raise DeviceError(
                    "this process has already used CUDA, and a CUDA context does not survive a fork; call "
                    "synkhronos.fork() before anything else uses a GPU"
                )


def find_free_devices(n_parallel: int | None, use_gpu: bool | None, devices: str | Sequence[str] | None) -> list[str]:
    """Return the devices as `find_devices` does, and check that this process can be forked for them.

    Raises
    ------
    TypeError, ValueError
        For invalid arguments.
    DeviceError
        If a device is not available, or if the devices are GPUs and this process has already used a GPU.
    """
    names = find_devices(n_parallel, use_gpu, devices)
    if kind_of(names[0]) != "cpu":
        _check_no_gpu_is_held()
    return names


def _check_no_gpu_is_held() -> None:
    device = _backends.bound()
    if device is not None:
        raise DeviceError(
            f"this process has already used {device}, and its context does not survive a fork. Leave device= and "
            "init_gpu_device= out of Theano's flags, because synkhronos.fork() binds the GPUs; after close(), GPUs are "
            "available in a new process only, and CPU cores by use_gpu=False"
        )
    check_unused()


def take_gpus(devices: Sequence[str], run: Callable[[Command], Any]) -> None:
    """Have each rank bind its GPU.

    Parameters
    ----------
    devices : sequence of str
        One for each rank.
    run : callable
        ``run(command)`` has every rank execute a command.

    Raises
    ------
    DeviceError
        If a rank cannot bind its GPU; the message names the rank, its device and the cause.
    """
    try:
        with progress("taking GPUs"):
            run(Bind(tuple(devices)))
    except WorkerError as error:
        cause = str(error).splitlines()[0].split("DeviceError: ", 1)[-1]
        raise DeviceError(f"rank {error.rank}: {cause}") from None


def connect_gpus(devices: Sequence[str], context: Any, run: Callable[[Command], Any]) -> bool:
    """Connect the ranks by NCCL; return whether this succeeded.

    If not, log the reason; collectives then use host memory.
    """
    if not may_use_nccl(devices):
        _logger.info("NCCL does not connect %s; collectives go through host memory", ", ".join(devices))
        return False
    try:
        run(Connect(make_clique(context)))
    except (WorkerDied, WorkerTimeout):
        raise
    except Exception as error:
        let_interrupts_pass(error)
        _logger.warning("NCCL cannot be used, and collectives go through host memory: %s", error)
        return False
    return True
