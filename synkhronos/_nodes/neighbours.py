"""Processes of a job that are on one machine share its cores, and its GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from synkhronos._utils.rows import shares

__all__ = ["part_of", "share_cores"]


def share_cores(communicator: Any) -> tuple[int, int]:
    """Let this process, and what it forks, run on a part of its machine's cores; all processes of the job call it.

    Parameters
    ----------
    communicator : mpi4py.MPI.Comm
        Of all processes.

    Returns
    -------
    tuple of int
        The number of this process among those of its machine, and how many these are.
    """
    try:
        own = tuple(sorted(os.sched_getaffinity(0)))
    except OSError:  # the kernel refuses to tell
        own = ()
    known = communicator.allgather((_machine(), own))
    here = [rank for rank, (machine, _) in enumerate(known) if machine == _machine()]
    number = here.index(communicator.Get_rank())
    part = part_of([known[rank][1] for rank in here], number)
    if part:
        os.sched_setaffinity(0, part)
    return number, len(here)


def part_of(cores: Sequence[Sequence[int]], number: int) -> Sequence[int]:
    """Which cores one of the processes on a machine takes; empty: those that it has.

    Parts are disjoint, and their sizes differ by one core at most. Where the launcher has already given processes
    different cores, these stay; so they do where there are fewer cores than processes.

    Parameters
    ----------
    cores : sequence of sequences of int
        On which each process of that machine may run, in order.
    number : int
        Of the process, among these.
    """
    n, own = len(cores), cores[number]
    if n == 1 or len(own) < n or any(one != own for one in cores):
        return ()
    return own[slice(*shares(len(own), n)[number].bounds)]


def _machine() -> tuple[str, str]:
    """What tells this machine from others: hosts may have the same name, and containers the same kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return socket.gethostname(), file.read()
    except OSError:
        return socket.gethostname(), ""
