"""Detect the resources that this process may use: CPU cores and free memory.

Shared memory has no limit of its own. If the host, or the memory cgroup of a container or batch job, runs out of
memory, the kernel kills a process. Callers therefore compare a size with the free memory before they allocate it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

#: Vector extensions of processors, by their names in /proc/cpuinfo, the widest first.
_VECTORS = ("avx512f", "avx2", "avx", "asimd")

_NO_LIMIT = 1 << 60  # version 1 cgroups without a limit report a number near 2^63


def count_cores() -> int:
    """Return the number of CPU cores on which this process may run; if that is unknown, the cores of the host."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 1


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, str]]:
    """Yield the kernel's memory limits that apply to this process.

    Parameters
    ----------
    proc, cgroups : Path
        Mount points of procfs and of the cgroups.

    Yields
    ------
    free : int
        Number of bytes, including swap, that this process may still use under one limit.
    scope : str
        Scope of that limit, for error messages.
    """
    swap = 0
    try:
        fields = _fields(proc / "meminfo")
        swap = 1024 * fields["SwapFree:"]
        yield 1024 * fields["MemAvailable:"] + swap, "on this machine"
    except (OSError, KeyError):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "on this machine at most"
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            unified = controllers == ""
            if not unified and "memory" not in controllers.split(","):
                continue
            top = cgroups if unified else cgroups / "memory"
            folder = Path(os.path.normpath(f"{top}/{path}"))
            # a container often has the cgroup path of its host, but the mount point of its own cgroup: try all parents
            for each in {top, folder, *(parent for parent in folder.parents if top in parent.parents)}:
                free = _free_in_cgroup(each, unified, swap)
                if free is not None:
                    yield free, "in the memory cgroup of this process (the limit of its container or batch job)"


def _free_in_cgroup(folder: Path, unified: bool, swap: int) -> int | None:
    """Return the number of bytes that a cgroup may still use; ``None`` if it has no limit.

    Parameters
    ----------
    folder : Path
        Folder of the cgroup.
    unified : bool
        Whether it is a cgroup of version 2.
    swap : int
        Free swap of the host, in bytes.
    """
    limit, usage, reclaimable = (
        ("memory.max", "memory.current", ("inactive_file", "active_file"))
        if unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
    )
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):  # "max" is not a number
        most = int((folder / limit).read_text())
        if most < _NO_LIMIT:
            counts = _fields(folder / "memory.stat")
            used = int((folder / usage).read_text())
            free = max(0, most - used + sum(counts[name] for name in reclaimable))
            return free + min(swap, _swap_of_cgroup(folder, unified, most, used))
    return None


def _swap_of_cgroup(folder: Path, unified: bool, most: int, used: int) -> int:
    """Return the bytes of swap that a cgroup may still use."""
    limit, usage = (
        ("memory.swap.max", "memory.swap.current")
        if unified
        else ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")  # both include memory
    )
    try:
        free = int((folder / limit).read_text()) - int((folder / usage).read_text())
    except (OSError, ValueError):  # the limit is "max", or swap is not accounted
        return _NO_LIMIT
    return max(0, free if unified else free - (most - used))


def _fields(path: Path) -> dict[str, int]:
    """Read a file whose lines have a name, a number, and possibly a unit."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}


def cache_folder(caches: str, home: str) -> str:
    """Return the library's folder among the user's caches; empty if there is no place for one.

    Parameters
    ----------
    caches : str
        Value of ``XDG_CACHE_HOME``. The specification of base directories says to ignore relative paths.
    home : str
        The user's home, for its folder ``.cache``.
    """
    if not os.path.isabs(caches):
        caches = os.path.join(home, ".cache")
    return os.path.join(caches, "synkhronos") if os.path.isabs(caches) else ""


def processor(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return the processor's model name, its family and model numbers, and its widest vector extension."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), open(cpuinfo) as file:
        for line in file:
            name, _, text = line.partition(":")
            fields.setdefault(name.strip(), text.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    names = {"family": "cpu family", "model": "model"}
    numbers = [f"{name} {fields[field]}" for name, field in names.items() if field in fields]
    vectors = next((one.upper() for one in _VECTORS if one in flags), "")
    return f"{fields.get('model name', platform.machine())} ({', '.join(filter(None, [*numbers, vectors]))})"


def busy(seconds: float = 0.2, stat: str = "/proc/stat") -> float:
    """Return which part of the time of this process's cores is in use while this process sleeps; 0 if unknown.

    Parameters
    ----------
    seconds : float
        Duration of the sleep.
    stat : str
        Path of the kernel's file with the times of all cores.
    """

    def times() -> tuple[int, int]:
        idle = total = 0
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        with open(stat) as file:
            for line in file:
                name, *numbers = line.split()
                if name in cores:
                    total += sum(map(int, numbers[:8]))
                    idle += int(numbers[3]) + int(numbers[4])
        return idle, total

    try:
        before = times()
        time.sleep(seconds)
        idle, total = (after - earlier for earlier, after in zip(before, times()))
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1 - idle / total if total > 0 else 0.0
