"""Messages between the controller and the leaders of other nodes: orders of the controller, and answers to them."""

from __future__ import annotations

from typing import Any, NamedTuple

from synkhronos._memory import FilePart
from synkhronos._multinode.shipping import Shipment


class Options(NamedTuple):
    """Checked arguments of `fork` that do not select devices.

    Attributes
    ----------
    profile_workers : bool
        Whether workers print the backend's profiles when they stop.
    replicate_rng : bool
        Whether all ranks have the same random streams.
    timeout : float or None
        Seconds that a rank may take for a command; ``None``: no limit.
    restart_workers : bool
        Whether dead workers are replaced.
    check_replicas : int
        Number of calls between two comparisons of the replicas; 0: they are not compared.
    wire_dtype : str or None
        Wire dtype of float32 arrays between nodes; ``None``: float32.
    seed : bytes or None
        Seed from which each rank derives its global random states; ``None``: ranks keep the states that they inherit.
    heartbeat : float
        Seconds of silence after which a node is lost.
    plan : str
        Plan of exact functions that name none: ``"rows"`` or ``"controller"``.
    """

    profile_workers: bool
    replicate_rng: bool
    timeout: float | None
    restart_workers: bool
    check_replicas: int
    wire_dtype: str | None
    seed: bytes | None
    heartbeat: float
    plan: str


class Ask(NamedTuple):
    """Order to report the devices of the node, as selected by the ``arguments`` of `fork`."""

    number: int
    arguments: tuple[Any, ...]


class Start(NamedTuple):
    """Order to start a rank on each device; ``sizes`` has the number of ranks of each node."""

    number: int
    devices: list[str]
    sizes: tuple[int, ...]
    master_rank: int
    options: Options


class Bring(NamedTuple):
    """Order to store a part of the data for the next `Do`; the answer contains an exception if that fails."""

    number: int
    shipment: Shipment


class Do(NamedTuple):
    """Order to execute a message of the controller on all ranks of the node.

    Attributes
    ----------
    message : bytes
        Pickled `Envelope`.
    shipment : Shipment
        Last part of the data that the command needs.
    refusal : Exception or None
        Exception with which the node answered an earlier `Bring`; the ranks then do not execute the message.
    waited : int
        Nanoseconds from the node's last answer until all nodes had answered.
    """

    number: int
    message: bytes
    shipment: Shipment
    refusal: Exception | None
    waited: int = 0


class Look(NamedTuple):
    """Order to open the parts of files, by key, that this node has, too, and use them as the memory of their keys."""

    number: int
    parts: dict[str, FilePart]


class Report(NamedTuple):
    """Order to report the monotonic clock, in nanoseconds, and counts of each rank's part of the shared heap."""

    number: int


class Stop(NamedTuple):
    """Order to end the ranks at once."""

    number: int


class Leave(NamedTuple):
    """Order to end the leader, because the controller ends."""

    number: int


class Answer(NamedTuple):
    """Answer to an order.

    Attributes
    ----------
    replies : object
        Data that the order asked for; for `Do`, the reply of each rank.
    took : int
        Nanoseconds that the ranks took; only for `Do`.
    lacks : bool
        Whether a part of the data that came with the order could not be stored.
    """

    number: int
    replies: Any
    took: int = 0
    lacks: bool = False


class Lost(NamedTuple):
    """Answer of a node that has failed, because a rank is dead or silent or because ranks could not be started.

    Attributes
    ----------
    text : str
        Description of the failure; the full error message if ``rank`` is ``None``.
    rank : int or None
        Number of the failed rank on its node; ``None`` if no particular rank has failed.
    pid, exitcode, is_dead
        Process id of the failed rank, its exit code, and whether it is dead instead of silent.
    replaced : tuple of int
        Ranks on that node that were replaced by new processes; the other ranks still run. Empty: all ranks of the node
        have been ended.
    """

    number: int
    text: str
    rank: int | None = None
    pid: int = 0
    exitcode: int | None = None
    is_dead: bool = False
    replaced: tuple[int, ...] = ()
