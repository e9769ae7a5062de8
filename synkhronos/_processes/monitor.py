"""What other processes of this user can see of a session: who its ranks are, and how far they are.

It lies in shared memory, which the master's descriptor keeps within reach of ``python -m synkhronos top``: that maps it
read-only, and so neither asks nor disturbs anybody.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from synkhronos._memory import Descriptor, Segment
from synkhronos._native import native

__all__ = ["Board", "Sight"]

_MAGIC = int.from_bytes(b"synkrank", "little")
_HEAD = 5  # numbers before the pids: the magic one, how many ranks, the master's, the first one's among all, all
_SEAT = 64  # bytes of each rank's words, after as many others: see _native/sync.h
_PARKED = 7  # where in these, in numbers of four bytes


def _words_at(n_ranks: int) -> int:
    return -(-8 * (_HEAD + n_ranks) // 64) * 64


class Board:
    """The side of the master, or of the leader of another machine; made before it forks.

    Parameters
    ----------
    n_ranks : int
        Of this machine.
    master_rank : int
        The rank of this process, of these.
    first, n_all : int
        The number of the first of these ranks among those of all machines, and how many those are.

    Attributes
    ----------
    words : uint8 array
        The memory of the session's words.
    pids : int64 array of shape (n_ranks,)
    close : callable
        Has nobody find it any more; so does its end.
    """

    def __init__(self, n_ranks: int, master_rank: int, first: int, n_all: int) -> None:
        segment = Segment.create(_words_at(n_ranks) + native.Sync.bytes_for(n_ranks))
        self.close = Descriptor(os.dup(segment.fileno())).close
        numbers = segment.array((_HEAD + n_ranks,), np.int64)
        self.pids = numbers[_HEAD:]
        self.pids[master_rank] = os.getpid()
        numbers[1:_HEAD] = n_ranks, master_rank, first, n_all
        numbers[0] = _MAGIC
        self.words = segment.bytes[_words_at(n_ranks) :]


class Sight:
    """The view of another process.

    Parameters
    ----------
    path : str
        Of a descriptor, in ``/proc``.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is another thing.

    Attributes
    ----------
    n_ranks, master_rank, first, n_all : int
        As of the `Board`.
    """

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        numbers = np.frombuffer(memory, np.int64, _HEAD)
        if numbers[0] != _MAGIC:
            raise ValueError(f"{path} is no board of a session")
        self.n_ranks, self.master_rank, self.first, self.n_all = map(int, numbers[1:_HEAD])
        seats_at = _words_at(self.n_ranks) + _SEAT
        self._pids = np.frombuffer(memory, np.int64, self.n_ranks, 8 * _HEAD)
        seats = np.frombuffer(memory, np.uint8, _SEAT * self.n_ranks, seats_at).reshape(-1, _SEAT)
        self._words, self._small = seats.view(np.int64), seats.view(np.int32)

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [int(pid) for pid in self._pids]

    def look(self) -> list[str]:
        """What each rank is at, now; what begins with "waits" is no work."""
        sent = self._words[self.master_rank, 0]
        answered, parked = self._words[:, 1], self._small[:, _PARKED] != 0
        idle = answered == sent
        idle[self.master_rank] = True
        found, at_rest = [], "waits for a command" if self.first else "Python"
        for rank in range(self.n_ranks):
            if rank == self.master_rank:
                found.append("waits for ranks" if parked[rank] else at_rest if idle.all() else "computes")
            else:
                waits = "waits for a command" if idle[rank] else "waits for ranks" if parked[rank] else ""
                found.append(waits or "computes")
        return found
