"""The commands that the master gives and every rank executes. Arrays never travel inside one: an `ArrayRef` says where
in shared memory they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Tuple, Union

from synkhronos._partition import Rows
from synkhronos._segments import ArrayRef, FileRef, SegmentRef

__all__ = [
    "AllGather",
    "AllReduce",
    "Arrays",
    "Call",
    "Command",
    "Envelope",
    "Failure",
    "Get",
    "Load",
    "Put",
    "Release",
    "RowsRef",
    "Settle",
    "Shapes",
    "Source",
]

#: Rows of an array as they travel: a range, or where an index array lies.
RowsRef = Union[Rows, ArrayRef]


class Source(NamedTuple):
    """An array in shared memory, and which of its rows are meant (``None`` for the whole array, as for broadcast inputs)."""

    array: ArrayRef
    rows: Optional[RowsRef]


class Release(NamedTuple):
    """What the master has dropped since the last command."""

    segments: Tuple[str, ...] = ()
    functions: Tuple[int, ...] = ()
    variables: Tuple[int, ...] = ()


@dataclass(frozen=True)
class Settle:
    """Do nothing: the envelope says what to attach and to release."""


@dataclass(frozen=True)
class Load:
    """Unpickle functions and their new shared variables."""

    pickled: ArrayRef
    buffers: Tuple[ArrayRef, ...]
    replicate_rng: bool


@dataclass(frozen=True)
class Call:
    """Call a function on this rank's share of the data.

    The function of a sliced call returns the new values of the variables `updated` after its outputs.
    """

    function: int
    inputs: Tuple[Source, ...]
    n_scattered: int
    shares: Optional[Tuple[Rows, ...]]  # of the scattered inputs, one for each rank
    rows: Tuple[RowsRef, ...]  # of the sliceable shared variables, one for each rank; empty: all of them, as they are
    counts: Tuple[int, ...]  # data points on each rank; a rank with 0 sits out, unless `everybody`
    everybody: bool
    num_slices: int
    output_modes: Tuple[Optional[str], ...]  # of the outputs that are wanted
    output_subset: Optional[Tuple[int, ...]]
    updated: Tuple[int, ...]
    update_modes: Tuple[str, ...]


@dataclass(frozen=True)
class Get:
    """Return the values of variables, on some ranks (``None``: on all); `publish` puts the master's into shared memory too."""

    variables: Tuple[int, ...]
    ranks: Optional[Tuple[int, ...]] = None
    publish: bool = False


@dataclass(frozen=True)
class Put:
    """Set variables to (rows of) arrays, on some ranks; ``shares`` gives each rank's part of the rows, if they differ."""

    variables: Tuple[int, ...]
    sources: Tuple[Source, ...]
    shares: Optional[Tuple[Tuple[Rows, ...], ...]] = None
    ranks: Optional[Tuple[int, ...]] = None


@dataclass(frozen=True)
class AllReduce:
    """Reduce variables over all ranks, in place on every rank."""

    variables: Tuple[int, ...]
    op: str
    weights: Optional[Tuple[float, ...]]


@dataclass(frozen=True)
class AllGather:
    """Set each variable to the concatenation of arrays in shared memory: ``arrays[i][rank]`` for variable ``i``."""

    variables: Tuple[int, ...]
    segments: Tuple[SegmentRef, ...]  # where the arrays lie: attached for this command alone
    arrays: Tuple[Tuple[ArrayRef, ...], ...]


@dataclass(frozen=True)
class Shapes:
    """Return the shapes of variables."""

    variables: Tuple[int, ...]


Command = Union[Settle, Load, Call, Get, Put, AllReduce, AllGather, Shapes]


class Envelope(NamedTuple):
    """What travels from the master to a worker: a command (``None``: stop), and what to map and to forget first."""

    attach: Tuple[Union[SegmentRef, FileRef], ...]
    release: Release
    command: Optional[Command]


class Failure(NamedTuple):
    """What a worker answers when a command failed there."""

    when: float  # time.monotonic(), the same clock on every rank
    summary: str  # type and message of the exception
    traceback: str
    aborted: bool  # it only stopped because another rank had failed


class Arrays(NamedTuple):
    """What a worker answers when a command gave arrays: where they lie (``None`` entries: not wanted by the master)."""

    segment: Optional[SegmentRef]
    refs: List[Optional[ArrayRef]]
