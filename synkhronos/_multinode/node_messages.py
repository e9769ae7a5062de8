"""Messages between the controller and the leaders of the other nodes: orders out, answers back."""

from __future__ import annotations

from typing import Any, NamedTuple

from synkhronos._memory import FilePart
from synkhronos._multinode.shipping import Shipment


class Options(NamedTuple):
    """Checked arguments of `fork` that do not select devices.

    Attributes
    ----------
    profile_workers : bool
        Print the backend's profiles of the workers when they stop.
    replicate_rng : bool
        Give all ranks the same random streams.
    timeout : float or None
        Seconds that a rank may take for a command.
    restart_workers : bool
        Replace workers that die.
    check_replicas : int
        Compare replicas at every so many-th call; 0: never.
    wire_dtype : str or None
        The wire dtype of float32 arrays between nodes; ``None``: float32.
    seed : bytes or None
        The seed of each rank's global random states; ``None``: all ranks keep the states that they inherit.
    heartbeat : float
        Seconds of silence after which a node is lost.
    """

    profile_workers: bool
    replicate_rng: bool
    timeout: float | None
    restart_workers: bool
    check_replicas: int
    wire_dtype: str | None
    seed: bytes | None
    heartbeat: float


class Ask(NamedTuple):
    """Report the devices of the node; the arguments are those of `fork`."""

    number: int
    arguments: tuple[Any, ...]


class Start(NamedTuple):
    """Start a rank on each device; ``sizes`` are the numbers of ranks of all nodes."""

    number: int
    devices: list[str]
    sizes: tuple[int, ...]
    master_rank: int
    options: Options


class Bring(NamedTuple):
    """Take in a part of the data for the next `Do`; the answer has an exception if that fails."""

    number: int
    shipment: Shipment


class Do(NamedTuple):
    """Have the ranks execute a message of the controller, with the data that it needs.

    Attributes
    ----------
    message : bytes
        A pickled `Envelope`.
    shipment : Shipment
        The last part of the data.
    refusal : Exception or None
        The node's answer to an earlier `Bring` that failed: then the ranks do not begin.
    waited : int
        Nanoseconds from the node's last answer until all nodes had answered.
    """

    number: int
    message: bytes
    shipment: Shipment
    refusal: Exception | None
    waited: int = 0


class Look(NamedTuple):
    """Report which parts of files, by key, this node has, too; from then on they are the memory of their keys."""

    number: int
    parts: dict[str, FilePart]


class Report(NamedTuple):
    """Report the time of the monotonic clock, in nanoseconds, and the counts of each rank's part of the shared heap."""

    number: int


class Stop(NamedTuple):
    """End the ranks at once."""

    number: int


class Leave(NamedTuple):
    """End the leader, because the controller ends."""

    number: int


class Answer(NamedTuple):
    """Result of an order.

    Attributes
    ----------
    replies : object
        Requested data; for `Do`, the reply of each rank.
    took : int
        For `Do`, the nanoseconds that the ranks took.
    lacks : bool
        Whether some of the data that came with the order could not be taken in.
    """

    number: int
    replies: Any
    took: int = 0
    lacks: bool = False


class Lost(NamedTuple):
    """Failure of a node: a rank is dead or silent, and the others have been ended; or the ranks could not be started.

    Attributes
    ----------
    rank : int or None
        Rank on that node; ``None``: no particular rank, and ``text`` is the full message.
    replaced : tuple of int
        Ranks on that node that were replaced by new processes, while all others are well; empty: the node has no ranks.
    """

    number: int
    text: str
    rank: int | None = None
    pid: int = 0
    exitcode: int | None = None
    is_dead: bool = False
    replaced: tuple[int, ...] = ()
