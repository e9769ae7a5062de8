"""Resources that this process may use: CPU cores and free memory.

A file in memory has no limit of its own: when the node, or the memory cgroup of a container or batch job, runs out of
memory, the kernel kills a process. Sizes are therefore compared with the free memory before they are requested.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 cgroups without a limit report a number near 2^63


def count_cores() -> int:
    """Return the number of CPU cores that this process may run on; of the node, where the kernel refuses to answer."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 1


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, str]]:
    """Yield the limits that the kernel reports: the bytes that this process may still take, and the limit's scope."""
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
            # in a container, the path is often the host's, while the mounted cgroup is the container's own
            for each in {top, folder, *(parent for parent in folder.parents if top in parent.parents)}:
                free = _free_in_cgroup(each, unified, swap)
                if free is not None:
                    yield free, "in the memory cgroup of this process (the limit of its container or batch job)"


def _free_in_cgroup(folder: Path, unified: bool, swap: int) -> int | None:
    """Return the bytes of memory, and of the node's free ``swap``, that a cgroup may still take; ``None``: no limit."""
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
    """Return the bytes of swap that a cgroup may still take."""
    limit, usage = (
        ("memory.swap.max", "memory.swap.current")
        if unified
        else ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")  # both include memory
    )
    try:
        free = int((folder / limit).read_text()) - int((folder / usage).read_text())
    except (OSError, ValueError):  # "max", or not accounted for
        return _NO_LIMIT
    return max(0, free if unified else free - (most - used))


def _fields(path: Path) -> dict[str, int]:
    """Read a file of lines with a name, a number, and perhaps a unit."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}
