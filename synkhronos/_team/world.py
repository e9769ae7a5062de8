"""The ranks of a session, on one machine or on several."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["World", "kind_of"]


def kind_of(device: str) -> str:
    """``"cpu"``, ``"cuda"`` or ``"opencl"``: what a device is, by its name."""
    return device.rstrip("0123456789:")


class World(NamedTuple):
    """How the ranks are numbered: machine by machine.

    Attributes
    ----------
    sizes : tuple of int
        The number of ranks on each machine.
    machine : int
        The number of this one.
    master_rank : int
        Among all ranks.
    line : Line, or None
        In the leader of a machine: the way to the other leaders.
    exchange : str, or None
        The type that float32 numbers have between machines; ``None``: their own.
    """

    sizes: tuple[int, ...]
    machine: int
    master_rank: int
    line: Any = None
    exchange: str | None = None

    @property
    def n_ranks(self) -> int:
        """The number of all ranks."""
        return sum(self.sizes)

    @property
    def first(self) -> int:
        """The number, among all ranks, of the first one of this machine."""
        return sum(self.sizes[: self.machine])

    def ranks_of(self, machine: int) -> range:
        """The ranks of a machine."""
        first = sum(self.sizes[:machine])
        return range(first, first + self.sizes[machine])
