"""Status of a running session for ``python -m synkhronos top``: processes and progress of the ranks.

The status lies in shared memory. The controller keeps a file descriptor of it open, so that ``top`` finds it in
``/proc``. That program maps the memory read-only. It sends the session no requests and does not slow it down.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from synkhronos._memory import Descriptor, Segment
from synkhronos._native import native

_MAGIC = int.from_bytes(b"synkrank", "little")
_HEAD = 5  # number of int64 before the pids: magic, n_ranks, master_rank, first, n_all
_SEAT = 64  # bytes of each rank's slot in _native/sync.h; common data of the same size precedes the slots
_PARKED = 7  # index of `parked` in a slot, in units of int32


def _words_at(n_ranks: int) -> int:
    """Return the offset in bytes of the counters, aligned to 64."""
    return -(-8 * (_HEAD + n_ranks) // 64) * 64


class StatusBoard:
    """Writable status of the ranks of one node; its node leader creates it before it forks workers.

    Parameters
    ----------
    n_ranks : int
        Number of ranks on this node.
    master_rank : int
        Rank of this process on this node.
    first, n_all : int
        Global number of this node's first rank, and number of ranks on all nodes.

    Attributes
    ----------
    words : uint8 array
        Memory for the counters of `RankSync`.
    pids : int64 array of shape (n_ranks,)
        Process id of each rank.
    close : callable
        Close the descriptor, so that other processes no longer find the session. It is also closed when the board is
        deleted.
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


class SessionStatus:
    """Read-only view of the `StatusBoard` of another process.

    Parameters
    ----------
    path : str
        Path of a file descriptor in ``/proc``.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If the file is not a `StatusBoard`.

    Attributes
    ----------
    n_ranks, master_rank, first, n_all : int
        As in `StatusBoard`.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        numbers = np.frombuffer(memory, np.int64, _HEAD)
        if numbers[0] != _MAGIC:
            raise ValueError(f"{path} is not a status file of a session")
        self.n_ranks, self.master_rank, self.first, self.n_all = map(int, numbers[1:_HEAD])
        seats_at = _words_at(self.n_ranks) + _SEAT
        self._pids = np.frombuffer(memory, np.int64, self.n_ranks, 8 * _HEAD)
        seats = np.frombuffer(memory, np.uint8, _SEAT * self.n_ranks, seats_at).reshape(-1, _SEAT)
        self._words, self._small = seats.view(np.int64), seats.view(np.int32)

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [int(pid) for pid in self._pids]

    def look(self) -> list[str]:
        """Return the current activity of each rank, as text; it starts with "waits" if the rank does not compute."""
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
