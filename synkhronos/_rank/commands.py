"""The commands that the master gives and every rank executes.

Arrays never travel inside one: an `ArrayRef` says where in shared memory they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Union

from synkhronos._memory import ArrayRef
from synkhronos._utils.rows import Rows

__all__ = [
    "AllGather",
    "AllReduce",
    "Bind",
    "Call",
    "Command",
    "Connect",
    "Digest",
    "Follow",
    "Get",
    "InOrder",
    "Load",
    "Nccl",
    "Put",
    "Record",
    "Reduce",
    "RowsRef",
    "Settle",
    "Shapes",
    "Source",
    "meets",
]

#: Rows of an array as they travel: a range, or where an index array lies.
RowsRef = Union[Rows, ArrayRef]


class Source(NamedTuple):
    """An array in shared memory, and which of its rows are meant (``None``: the whole array)."""

    array: ArrayRef
    rows: RowsRef | None
    axis: int = 0  # along which the rows lie


@dataclass(frozen=True)
class Settle:
    """Do nothing, for the envelope says what to attach and to release; or give back what memory is kept."""

    trim: bool = False


@dataclass(frozen=True)
class Bind:
    """Make a GPU this rank's own: ``devices[rank]``."""

    devices: tuple[str, ...]


@dataclass(frozen=True)
class Connect:
    """Meet the other ranks in NCCL."""

    clique: bytes


@dataclass(frozen=True)
class Load:
    """Unpickle functions and their new shared variables."""

    pickled: ArrayRef
    buffers: tuple[ArrayRef, ...]
    replicate_rng: bool
    ranks: tuple[int, ...] | None = None


class Follow(NamedTuple):
    """What follows the slices of a call whose function has collectives: a function of what enters these.

    The function of the slices returns the outputs that need no collective, then what enters them.
    """

    function: int
    modes: tuple[str, ...]  # of what the function of the slices returns
    n_entering: int
    output_subset: tuple[int, ...] | None
    order: tuple[int, ...]  # of the outputs that are wanted, among those of the slices and then those of this function


class Call(NamedTuple):
    """Call a function on this rank's share of the data.

    The function of a sliced call returns the new values of the variables `updated` after its outputs.
    """

    function: int
    inputs: tuple[Source, ...]
    n_scattered: int
    shares: tuple[Rows, ...] | None  # of the scattered inputs, one for each rank
    rows: tuple[RowsRef, ...]  # of the sliceable shared variables, one for each rank; empty: all of them, as they are
    counts: tuple[int, ...]  # data points on each rank; a rank with 0 sits out, unless `everybody`
    everybody: bool
    num_slices: int
    output_modes: tuple[str | None, ...]  # of the outputs that are wanted
    output_subset: tuple[int, ...] | None
    updated: tuple[int, ...]
    update_modes: tuple[str, ...]
    nccl: tuple[int, ...] = ()  # the outputs, of those that are wanted, that NCCL reduces to the master
    master: int = 0  # its rank
    meets: bool = False  # there are collectives in it: a rank without data points takes part, left out of all of them
    kept: tuple[int, ...] = ()  # variables that such a rank must not update
    exact: bool = False  # the function takes numbers, too: of all rows, of the first one of a rank, and of those there
    follow: Follow | None = None
    starts: ArrayRef | None = None  # where the first row of each scattered input is listed; its range begins at 0 then


@dataclass(frozen=True)
class Get:
    """Return the values of variables, on some ranks (``None``: all)."""

    variables: tuple[int, ...]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Put:
    """Set variables to (rows of) arrays, on some ranks; `shares` gives each rank's part of the rows.

    For the variables `digests`, the value of each rank is its own, and the rank returns the digest of it.
    """

    variables: tuple[int, ...]
    sources: tuple[Source, ...]
    shares: tuple[tuple[Rows, ...], ...] | None = None
    ranks: tuple[int, ...] | None = None
    digests: tuple[int, ...] = ()


class AllReduce(NamedTuple):
    """Reduce variables over all ranks, in place on every rank."""

    variables: tuple[int, ...]
    op: str
    weights: tuple[float, ...] | None
    nccl: bool = True  # where there is NCCL


@dataclass(frozen=True)
class Reduce:
    """Reduce variables over all ranks to the master: into its variables, or into arrays that it returns."""

    variables: tuple[int, ...]
    op: str
    in_place: bool


@dataclass(frozen=True)
class Nccl:
    """Broadcast variables of the given shapes from rank `root`, reduce them to it, or all-gather them, over NCCL.

    `kind` is ``"broadcast"``, ``"reduce"`` or ``"all_gather"``. The root gets what is reduced; no variable changes.
    """

    kind: str
    variables: tuple[int, ...]
    root: int
    op: str = "avg"
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class AllGather:
    """Set each variable to the concatenation of all ranks' values; ``shapes[i][rank]`` are those of variable ``i``."""

    variables: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Digest:
    """Return digests of variables' values: equal for values that are equal to the bit, of equal shapes."""

    variables: tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """Return the shapes of variables."""

    variables: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """Note from now on how this rank spends its time (and its last `room` changes), or stop and return the notes."""

    on: bool
    room: int = 0


@dataclass(frozen=True)
class InOrder:
    """Execute commands one after the other, each when all ranks have completed the one before; return all results."""

    parts: tuple[Command, ...]


Command = Union[
    Settle, Bind, Connect, Load, Call, Get, Put, AllReduce, Reduce, Nccl, AllGather, Digest, Shapes, Record, InOrder
]


def meets(command: Command) -> bool:
    """Whether all ranks meet in a command before they change anything."""
    return isinstance(command, (AllReduce, Reduce, AllGather))
