"""What is sent from leader to leader: messages, and parts of arrays, by MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["Transfer", "Wire"]


class Transfer(NamedTuple):
    """One step of an exchange, under way.

    Attributes
    ----------
    request : mpi4py.MPI.Request
    arrays : tuple of array
        The memory that it reads and writes.
    """

    request: Any
    arrays: tuple[np.ndarray, ...]

    def is_complete(self) -> bool:
        """Whether nothing of it is left to do."""
        return bool(self.request.Test())


class Wire:
    """One leader's end; the master's has number 0. Whoever uses it overrides `take`.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, initialised.

    Attributes
    ----------
    machine, n_machines : int
    others : list of int
        The other machines.
    """

    def __init__(self, mpi: Any) -> None:
        from mpi4py.util import pkl5

        self._mpi = mpi
        self._messages, self._rows = mpi.COMM_WORLD.Dup(), pkl5.Intracomm(mpi.COMM_WORLD.Dup())
        self._parts, self._wholes = mpi.COMM_WORLD.Dup(), mpi.COMM_WORLD.Dup()
        self.machine, self.n_machines = self._messages.Get_rank(), self._messages.Get_size()
        self.others = [machine for machine in range(self.n_machines) if machine != self.machine]
        self._sending: list[Any] = []

    def send(self, machine: int, kind: int, message: Any, has_rows: bool = False) -> None:
        """Send a message, which nobody changes until it has arrived; ``has_rows``: with large arrays in it."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        way = self._rows if has_rows else self._messages
        self._sending.append(way.isend(message, machine, kind))

    def take_in(self) -> None:
        """Receive what has arrived, and `take` it."""
        for way in (self._messages, self._rows):
            while way.iprobe():
                with deferred_interrupts():  # a message that is half received is lost
                    self._receive(way)

    def _receive(self, way: Any) -> None:
        status = self._mpi.Status()
        found = way.improbe(status=status)
        if found is not None:
            self.take(status.Get_tag(), status.Get_source(), found.recv())

    def take(self, kind: int, machine: int, message: Any) -> None:
        """A message has come, of a kind, from a machine."""
        raise NotImplementedError

    def has_arrived(self) -> bool:
        """Whether all that was sent has arrived."""
        return all(request.test()[0] for request in self._sending)

    def all_to_all(
        self,
        given: np.ndarray,
        lengths: Sequence[int],
        starts: Sequence[int] | None,
        got: np.ndarray,
        got_lengths: Sequence[int],
    ) -> Transfer:
        """Give each leader a part of an array, and get one from each, which are put one after the other.

        ``lengths`` are those of the parts, in elements, ``starts`` where they begin; ``None``: one after the other.
        """
        byte = self._mpi.BYTE
        sent = [_bytes(given), _layout(lengths, given.itemsize, starts), byte]
        received = [_bytes(got), _layout(got_lengths, got.itemsize), byte]
        return Transfer(self._parts.Ialltoallv(sent, received), (given, got))

    def all_gather(self, array: np.ndarray, lengths: Sequence[int]) -> Transfer:
        """Complete an array of which each leader has a part, in the order of the machines."""
        received = [_bytes(array), _layout(lengths, array.itemsize), self._mpi.BYTE]
        return Transfer(self._wholes.Iallgatherv(self._mpi.IN_PLACE, received), (array,))


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


def _layout(lengths: Sequence[int], itemsize: int, starts: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
    """How many bytes each part has, and where it begins."""
    counts = [length * itemsize for length in lengths]
    if starts is None:
        return counts, [sum(counts[:i]) for i in range(len(counts))]
    return counts, [start * itemsize for start in starts]
