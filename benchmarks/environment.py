"""Description of the machine on which figures are measured, and of its load by other processes."""

from __future__ import annotations

import os
import platform
import time
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import psutil

from synkhronos._utils.resources import processor

PACKAGES = (
    "Theano",
    "Lasagne",
    "pytensor",
    "numba",
    "numpy",
    "scipy",
    "scipy-openblas32",
    "torch",
    "deepspeed",
    "mpi4py",
    "mpich",
)
BUSY = 10  # per cent of the cores; with a higher load, figures are marked as measured on a busy machine


def describe() -> dict[str, Any]:
    """Return the description. It takes one second, in which this process sleeps to measure the load by others."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "cores of the machine": psutil.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "load": round(os.getloadavg()[0], 2),
        "busy": busy(),
    }


def version(name: str) -> str:
    """Return the version of an installed package, or a dash if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "–"


def busy(seconds: float = 1.0) -> int:
    """Return the load of this process's cores by other processes, in per cent, measured while this one sleeps."""
    cores = sorted(os.sched_getaffinity(0))
    psutil.cpu_percent(percpu=True)
    time.sleep(seconds)
    used = psutil.cpu_percent(percpu=True)
    return round(sum(used[core] for core in cores) / len(cores))
