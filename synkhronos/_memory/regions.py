"""Memory for what ranks compute: a region for each rank, which all of them map.

While a rank executes a command, NumPy allocates in the rank's region (`Regions.call`). With one rank alone, there is
nobody to share with: its region is private memory, which is used again all the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource

from synkhronos._interrupts import deferred_interrupts
from synkhronos._limits import free_memory
from synkhronos._memory.anonymous import new_descriptor
from synkhronos._native import native

__all__ = ["look_at_free_memory", "make_regions"]

_logger = logging.getLogger("synkhronos")

_UNIT = 2 * 1024 * 1024
_LEAST_BYTES = 64 * 1024 * 1024
_MOST_ADDRESSES = 1 << 45  # for all ranks together; a process has 2^47
_TIMES_MEMORY = 2  # freed blocks of sizes that are not wanted again may leave gaps

os.register_at_fork(before=native.before_fork, after_in_parent=native.after_fork)


def make_regions(n_ranks: int, rank: int) -> native.Heap:
    """Map regions as large as the memory is, as far as limits allow, and take the one of this rank.

    Where the kernel, or a limit, allows none, `Regions` are made that do nothing: memory is malloc's, as ever.
    """
    shared = n_ranks > 1
    with deferred_interrupts():  # handlers may raise errors like those that are caught there
        free = min(free for free, _ in free_memory())
        size, limit = _size(n_ranks, shared, free)
        try:
            if size < _LEAST_BYTES:
                raise OSError(limit)
            regions = _map(shared, n_ranks, rank, size, keep=free // (4 * n_ranks))
        except (OSError, MemoryError) as error:
            text = "what ranks compute cannot lie in memory of which all ranks map all (%s): calls may take longer"
            _logger.warning(text, error)
            return native.Heap(-1, n_ranks, rank, 0, 0)
        regions.allow(free // n_ranks)
    return regions


def look_at_free_memory(regions: native.Heap, n_ranks: int) -> None:
    """Let regions of so many ranks take what is free now."""
    with deferred_interrupts():
        regions.allow(min(free for free, _ in free_memory()) // n_ranks)


def _map(shared: bool, n_ranks: int, rank: int, size: int, keep: int) -> native.Heap:
    if not shared:
        return native.Heap(-1, n_ranks, rank, size, keep)
    fd = new_descriptor()
    try:
        return native.Heap(fd, n_ranks, rank, size, keep)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise


def _size(n_ranks: int, shared: bool, free: int) -> tuple[int, str]:
    """Bytes of each region, and what limits them."""
    sizes = {_TIMES_MEMORY * free: "memory is short", _MOST_ADDRESSES // n_ranks: "there are too many ranks"}
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        sizes[max(0, addresses - used) // (4 * n_ranks)] = (
            f"this process may have {addresses:,} bytes in all: ulimit -v"
        )
    of_file = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if shared and of_file != resource.RLIM_INFINITY:
        sizes[max(0, of_file - _UNIT) // n_ranks] = (
            f"files may have {of_file:,} bytes, and this counts as one: ulimit -f"
        )
    size = min(sizes)
    return size // _UNIT * _UNIT, sizes[size]
