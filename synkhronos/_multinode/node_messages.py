"""What the master says to the leaders of the other machines, and they to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from synkhronos._memory import FilePart
from synkhronos._multinode.shipping import Cargo

__all__ = ["Answer", "Ask", "Bring", "Do", "Leave", "Look", "Lost", "Start", "Stop", "Tell"]


class Ask(NamedTuple):
    """Tell the devices that there are; the arguments are those of `fork`."""

    number: int
    arguments: tuple[Any, ...]


class Start(NamedTuple):
    """Start ranks on these devices; ``sizes`` are the numbers of ranks of all machines."""

    number: int
    devices: list[str]
    sizes: tuple[int, ...]
    master_rank: int
    profile_workers: bool
    timeout: float | None
    exchange: str | None
    restart_workers: bool
    seed: bytes | None
    heartbeat: float


class Bring(NamedTuple):
    """Take in a part of what the next `Do` needs; the answer is an exception if that cannot be."""

    number: int
    cargo: Cargo


class Do(NamedTuple):
    """Have the ranks do what a message of the master's says, when there is what it needs.

    Attributes
    ----------
    refusal : Exception or None
        What a `Bring` before it was answered: then they need not begin.
    waited : int
        Nanoseconds from the machine's last answer until all machines had answered.
    """

    number: int
    message: bytes
    cargo: Cargo
    refusal: Exception | None
    waited: int = 0


class Look(NamedTuple):
    """Tell which parts of files, by key, are here, too; they are the memory of their keys from then on."""

    number: int
    parts: dict[str, FilePart]


class Tell(NamedTuple):
    """Tell the time, in nanoseconds of the monotonic clock, and what each rank's region holds."""

    number: int


class Stop(NamedTuple):
    """End the ranks at once."""

    number: int


class Leave(NamedTuple):
    """The master ends."""

    number: int


class Answer(NamedTuple):
    """What was asked for: of `Do`, what each rank has answered, and the nanoseconds that they took.

    Attributes
    ----------
    lacks : bool
        Whether some of what came with it could not be taken in.
    """

    number: int
    replies: Any
    took: int = 0
    lacks: bool = False


class Lost(NamedTuple):
    """A rank of the machine is dead, or silent, and the others are ended; or they could not be started.

    Attributes
    ----------
    rank : int or None
        On that machine; ``None``: it is none of the ranks, and ``text`` says all.
    replaced : tuple of int
        The ranks, on that machine, that are new processes now, and all of the others are well; empty: it has no ranks.
    """

    number: int
    text: str
    rank: int | None = None
    pid: int = 0
    exitcode: int | None = None
    is_dead: bool = False
    replaced: tuple[int, ...] = ()
