"""The record of the machine, and how busy it was with other work."""

from __future__ import annotations

import os
import platform
import time
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import psutil

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
VECTORS = ("avx512f", "avx2", "avx", "asimd")  # the widest first
BUSY = 10  # per cent of the cores, from which on figures are marked as taken on a busy machine


def describe() -> dict[str, Any]:
    """Give the record; takes a second, in which this process does nothing, to see what others do."""
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


def processor(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Name the kind of processor: its model, as virtual machines call it, its numbers, and its widest vectors."""
    fields: dict[str, str] = {}
    with open(cpuinfo) as file:
        for line in file:
            name, _, text = line.partition(":")
            fields.setdefault(name.strip(), text.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    names = {"family": "cpu family", "model": "model"}
    numbers = [f"{name} {fields[field]}" for name, field in names.items() if field in fields]
    vectors = next((one.upper() for one in VECTORS if one in flags), "")
    return f"{fields.get('model name', platform.machine())} ({', '.join(filter(None, [*numbers, vectors]))})"


def version(name: str) -> str:
    """Give the version of an installed package, or a dash."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "–"


def busy(seconds: float = 1.0) -> int:
    """Give the part of this process's cores, in per cent, that others use while it waits."""
    cores = sorted(os.sched_getaffinity(0))
    psutil.cpu_percent(percpu=True)
    time.sleep(seconds)
    used = psutil.cpu_percent(percpu=True)
    return round(sum(used[core] for core in cores) / len(cores))
