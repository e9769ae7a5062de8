"""Transfer the controller's shared memory to other nodes, and only the blocks that have changed.

Other nodes have copies of the controller's segments, with the same keys and sizes. Before a command is executed on a
node, `Shipping` finds the blocks that its ranks will read. It sends those whose digests differ from the last sent ones,
because a program may write to its memory at any time and without a call. `SegmentCache` on the node stores them.

If a node has the same file as the controller, it maps its own file, and the file's content is not sent. Before each
command, both nodes check that the file has not changed.

Invariant: when a command is executed on a node, all array rows that its ranks read are equal to those on the
controller. Other rows have arbitrary content. A large segment occupies no more memory on the node than the blocks that
were sent. Exception: memory in which the ranks of a node exchange parameters is sent once, as zeros.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Union

import numpy as np

from synkhronos._memory import ArrayRef, Descriptor, FilePart, Segment, SegmentTable, find_part, open_part
from synkhronos._native import native
from synkhronos._processes import World
from synkhronos._rank import (
    Call,
    Command,
    InOrder,
    Load,
    Loop,
    Put,
    RestoreLoop,
    Source,
    TimeFunction,
    borrowed_row,
)
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rows import Rows

BLOCK = 4096  # bytes


class Digests:
    """Digests of the last sent content of each block. They are initially zeros, which match no content.

    Two different blocks have the same digest with a probability of at most 2^-128, because the hash is universal and
    its key random and secret.

    Parameters
    ----------
    n_bytes : int
        Size of the memory.
    """

    _key = os.urandom(BLOCK + 16)

    def __init__(self, n_bytes: int) -> None:
        self._noted = np.zeros((-(-n_bytes // BLOCK), 4), np.uint64)  # unwritten pages occupy no memory

    def changed(self, content: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return the numbers of those ``blocks`` whose content differs from the recorded content."""
        fresh = self._of(content, blocks)
        return np.asarray(blocks[(fresh != self._noted[blocks]).any(axis=1)])

    def note(self, blocks: np.ndarray, values: np.ndarray) -> None:
        """Record the content of blocks; ``values`` is the copy that `take` has made."""
        self._noted[blocks] = self._of(values, np.arange(len(blocks)))

    def _of(self, content: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        digests = np.empty((len(blocks), 4), np.uint64)
        native.hash_blocks(content, blocks, self._key, digests)
        return digests


def take(content: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Copy blocks, whose numbers are in ascending order, into one uint8 array."""
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first == len(blocks) - 1:
        return content[BLOCK * first : BLOCK * (last + 1)].copy()
    n_whole = len(content) // BLOCK
    whole = content[: BLOCK * n_whole].reshape(n_whole, BLOCK)
    if last < n_whole:
        return whole[blocks].reshape(-1)
    return np.concatenate([whole[blocks[:-1]].reshape(-1), content[BLOCK * n_whole :]])


def put(content: np.ndarray, blocks: np.ndarray, values: np.ndarray) -> None:
    """Write blocks that `take` has copied from other memory of the same size."""
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first == len(blocks) - 1:
        content[BLOCK * first : BLOCK * (last + 1)] = values
        return
    n_whole = len(content) // BLOCK
    if last == n_whole:
        content[BLOCK * n_whole :] = values[BLOCK * (len(blocks) - 1) :]
        blocks = blocks[:-1]
    content[: BLOCK * n_whole].reshape(n_whole, BLOCK)[blocks] = values[: BLOCK * len(blocks)].reshape(-1, BLOCK)


def blocks_of(ref: ArrayRef, axis: int = 0, chosen: Rows | np.ndarray | None = None) -> np.ndarray:
    """Return the numbers, in ascending order, of the blocks that contain some rows of an array.

    Parameters
    ----------
    ref : ArrayRef
    axis : int
        Axis of the rows.
    chosen : Rows or int64 array, optional
        Numbers of the rows, in ascending order; default: all rows.
    """
    if chosen is None:
        axis, chosen, shape = 0, Rows(0, 1), (1, *ref.shape)
    else:
        shape = ref.shape
    inner = np.dtype(ref.dtype).itemsize * math.prod(shape[axis + 1 :])
    outer = np.arange(math.prod(shape[:axis]))
    if isinstance(chosen, Rows):
        begin, length = np.array([chosen.start]), inner * len(chosen)
    else:
        begin, length = chosen, inner
    firsts = ref.offset + inner * (outer[:, None] * shape[axis] + begin).reshape(-1)
    if not length or not len(firsts):
        return np.empty(0, np.int64)
    starts, stops = firsts // BLOCK, (firsts + length - 1) // BLOCK + 1
    lengths = stops - starts
    ends = np.cumsum(lengths)
    blocks = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
    return blocks[np.flatnonzero(np.diff(blocks, prepend=-1))]  # adjacent runs may share a block


def runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ascending numbers as ranges ``(start, stop)`` of consecutive numbers."""
    if len(numbers):
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        firsts, lasts = numbers[np.concatenate([[0], cuts])], numbers[np.concatenate([cuts - 1, [-1]])]
        yield from zip(firsts.tolist(), (lasts + 1).tolist())


#: Number of blocks after which a piece of data is complete. A piece has fewer than twice as many, or 3 MiB: copies stay
#: small, and the time-out limits each piece.
PIECE = 384

#: Array that ranks read, axis of its rows, and rows that they read (``None``: the full array).
_Part = tuple[ArrayRef, int, Union[Rows, np.ndarray, None]]


class Shipment(NamedTuple):
    """Data that a leader stores before its ranks execute a command.

    Attributes
    ----------
    make : list of (str, int)
        Segments to create: key and size in bytes.
    fill : list of (str, int64 array, uint8 array)
        Blocks to write: key, block numbers, and the concatenated contents.
    files : list of FilePart
        Parts of files that ranks read, and which must not have changed.
    """

    make: list[tuple[str, int]]
    fill: list[tuple[str, np.ndarray, np.ndarray]]
    files: list[FilePart]


class Shipping:
    """Record of the memory that each node has, on the controller; it finds the data to send.

    Parameters
    ----------
    segments : SegmentTable
        Shared memory of the controller.
    world : World

    Attributes
    ----------
    n_bytes : int
        Number of bytes sent to all nodes together.
    """

    def __init__(self, segments: SegmentTable, world: World) -> None:
        self._segments = segments
        self._world = world
        self._there: list[dict[str, Digests]] = [{} for _ in world.sizes]  # digests of sent memory, by node and key
        self._parts: dict[str, FilePart] = {}  # parts of files that nodes have looked for, by key
        self._opened: list[set[str]] = [set() for _ in world.sizes]  # keys of files that were found, by node
        self.n_bytes = 0

    def forget(self, keys: Sequence[str]) -> None:
        """Remove the records of segments that the controller has released."""
        for key in keys:
            self._parts.pop(key, None)
            for there, opened in zip(self._there, self._opened):
                there.pop(key, None)
                opened.discard(key)

    def assume_missing(self, node: int) -> None:
        """Assume that a node has no data, because the last data may not have arrived."""
        self._there[node].clear()
        self._parts.clear()  # look for files again

    def files(self, command: Command | None) -> dict[str, FilePart]:
        """Return the parts of files, by key, that a command needs and that other nodes have yet to look for."""
        if not self._segments.files:
            return {}
        wanted = {}
        for key in {ref.key for ref, _, _ in self._needed(command, range(self._world.n_ranks))}:
            if key not in self._segments.files or (key in self._parts and self._parts[key].is_as_it_was):
                continue
            path, offset = self._segments.files[key]
            part = find_part(path, offset, self._content(key))
            if part is not None:
                wanted[key] = part
            self.forget([key])
        return wanted

    def found(self, node: int, wanted: dict[str, FilePart], found: Sequence[bool]) -> None:
        """Record a node's answer to `Look`: whether it has found each of the ``wanted`` files."""
        self._parts.update(wanted)
        self._opened[node].update(key for key, is_there in zip(wanted, found) if is_there)

    def _content(self, key: str) -> np.ndarray:
        """Return the full memory of a key as bytes."""
        return self._segments.view(ArrayRef(key, 0, (self._segments.n_bytes(key),), "|u1"))

    def load(self, command: Command | None, node: int) -> Iterator[Shipment]:
        """Yield the data that a node needs for a command, in pieces of limited size; the last piece may be empty.

        A piece is recorded as sent before it is yielded.
        """
        shipment, there, n_bytes = Shipment([], [], []), self._there[node], 0
        for ref, axis, chosen in self._needed(command, self._world.ranks_of(node)):
            if ref.key in self._opened[node]:
                shipment.files.append(self._parts[ref.key])
                continue
            content = self._content(ref.key)
            if ref.key not in there:
                there[ref.key] = Digests(content.nbytes)
                shipment.make.append((ref.key, content.nbytes))
            blocks = _blocks_of(ref, axis, chosen)
            for start in range(0, len(blocks), PIECE):
                changed = there[ref.key].changed(content, blocks[start : start + PIECE])
                if len(changed):
                    values = take(content, changed)  # digest this copy, because the program may write to the original
                    there[ref.key].note(changed, values)
                    shipment.fill.append((ref.key, changed, values))
                    self.n_bytes += values.nbytes
                    n_bytes += values.nbytes
                if n_bytes >= PIECE * BLOCK:
                    yield shipment
                    shipment, n_bytes = Shipment([], [], []), 0
        yield shipment

    def _needed(self, command: Command | None, ranks: range) -> Iterator[_Part]:
        """Yield the arrays and rows that some ranks read when they execute a command."""
        if isinstance(command, InOrder):
            for part in command.parts:
                yield from self._needed(part, ranks)
        elif isinstance(command, Load):
            for ref in (command.pickled, *command.buffers):
                yield ref, 0, None
        elif isinstance(command, Call):
            yield from self._of_call(command, ranks)
        elif isinstance(command, TimeFunction):
            for ref in command.inputs:
                yield ref, 0, None
        elif isinstance(command, Loop):
            yield command.order, 0, None
            order = self._segments.view(command.order)
            own = np.arange(len(order)) % self._world.n_ranks
            rows = np.unique(order[(own >= ranks.start) & (own < ranks.stop)])
            for ref in command.data:
                yield ref, 0, rows
            for ref in (*command.scheduled, *(ref for _, ref in command.shared)):
                yield ref, 0, None
            if not command.number and command.exchange.memory is not None:  # each node fills it
                yield command.exchange.memory, 0, np.empty(0, np.int64)
        elif isinstance(command, RestoreLoop):
            for rank in ranks:
                yield command.states[rank], 0, None
        elif isinstance(command, Put):
            receiving = [rank for rank in ranks if command.ranks is None or rank in command.ranks]
            for i, source in enumerate(command.sources if receiving else ()):
                yield from self._rows(
                    source, None if command.shares is None else _span(command.shares[i], receiving), 0
                )

    def _of_call(self, call: Call, ranks: range) -> Iterator[_Part]:
        """Yield the arrays and rows that some ranks read in a call of a function."""
        firsts = [0] * call.n_scattered
        if call.starts is not None:
            yield call.starts, 0, None
            firsts = self._segments.view(call.starts).tolist()
        for source, first in zip(call.inputs[: call.n_scattered], firsts):
            shares = call.shares or ()
            yield from self._rows(source, _span(shares, ranks), first)
            if call.has_collectives and not all(len(shares[rank]) for rank in ranks):
                yield from self._rows(source, borrowed_row(call), first)
        for source in call.inputs[call.n_scattered :]:
            yield source.array, 0, None
        for rows in [call.rows[rank] for rank in ranks] if call.rows else []:
            if not isinstance(rows, Rows):
                yield rows, 0, None

    def _rows(self, source: Source, part: Rows | None, first: int) -> Iterator[_Part]:
        """Yield the arrays and rows that a source reads.

        Parameters
        ----------
        source : Source
        part : Rows or None
            Part of the source's selected rows; ``None``: all of them.
        first : int
            Number to add to the row numbers of a range.
        """
        array, rows, axis = source
        if rows is None:
            yield array, 0, None
        elif isinstance(rows, Rows):
            start, stop = (0, len(rows)) if part is None else part.bounds
            first += rows.start
            yield array, axis, Rows(first + start, first + stop)
        else:
            start, stop = (0, rows.shape[0]) if part is None else part.bounds
            yield rows, 0, Rows(start, stop)
            yield array, axis, np.unique(self._segments.view(rows)[start:stop])


def _span(shares: Sequence[Rows], which: Sequence[int]) -> Rows:
    """Return the smallest range of rows that contains the shards of some ranks."""
    some = [shares[i] for i in which if len(shares[i])]
    return Rows(min(one.start for one in some), max(one.stop for one in some)) if some else Rows(0, 0)


def _blocks_of(ref: ArrayRef, axis: int, chosen: Rows | np.ndarray | None) -> np.ndarray:
    """Return `blocks_of`, with a cache for full arrays and ranges of rows."""
    if isinstance(chosen, np.ndarray) or not isinstance(ref.dtype, str):
        return blocks_of(ref, axis, chosen)
    return _remembered(ref._replace(key=""), axis, chosen)


_remembered = functools.lru_cache(maxsize=64)(blocks_of)


_LARGE = 4 * 1024 * 1024  # bytes; pages of larger segments are reserved on demand, by a file descriptor that stays open


class SegmentCache:
    """Copy of the controller's memory on another node, kept by the node leader.

    Parameters
    ----------
    segments : SegmentTable
        Shared memory of the leader.

    Attributes
    ----------
    new : list of Segment
        Segments that workers have yet to map.
    replaced : set of str
        Keys whose memory was replaced; workers must unmap the old memory first.
    lacks : bool
        Whether a part of the last data could not be stored.
    """

    def __init__(self, segments: SegmentTable) -> None:
        self.new: list[Segment] = []
        self.replaced: set[str] = set()
        self.lacks = False
        self._segments = segments
        self._sparse: dict[str, _Sparse] = {}
        self._files: set[str] = set()

    def open(self, key: str, part: FilePart) -> bool:
        """Map a part of a file as the memory of a key; return ``False`` if this node does not have the same file."""
        segment = open_part(part, key)
        if segment is not None:
            with deferred_interrupts():
                self._put_in_place(segment, segment.bytes)
                self._files.add(key)
        return segment is not None

    def take(self, shipment: Shipment, dropped: Sequence[str]) -> None:
        """Store data. It empties the shipment, to free memory as soon as possible.

        A failed attempt can be repeated, because segments that exist already are not created again.

        Parameters
        ----------
        shipment : Shipment
        dropped : sequence of str
            Keys of segments that the controller has released; these are released first.

        Raises
        ------
        MemoryError
            If the node has too little memory.
        OSError
            If this process has too many open files, or if a file has changed.
        """
        self.lacks = True
        self._drop(dropped)
        for part in shipment.files:
            if not part.is_as_it_was:
                raise OSError(
                    f'{part.path} was changed on this node while it was used; a numpy.memmap of mode "r" needs a file '
                    "that stays as it is. The next call takes its rows from node 0"
                )
        for key, n_bytes in shipment.make:
            if key not in self._segments or key in self._files:
                self._make(key, n_bytes)
        shipment.fill.reverse()
        while shipment.fill:
            key, blocks, values = shipment.fill.pop()  # so that each piece is freed when it is written
            if key in self._sparse:
                self._sparse[key].reserve(blocks)
            put(self._segments.view(ArrayRef(key, 0, (self._segments.n_bytes(key),), "|u1")), blocks, values)
        self.lacks = False

    def _make(self, key: str, n_bytes: int) -> None:
        """Create the segment for a key; a large one is sparse."""
        is_large = n_bytes >= _LARGE
        segment = Segment.create(n_bytes, key, reserved=not is_large)
        with deferred_interrupts():
            self._put_in_place(segment, segment.bytes[:n_bytes])
            if is_large:
                self._sparse[key] = _Sparse(segment)

    def _put_in_place(self, segment: Segment, content: np.ndarray) -> None:
        """Use a new segment for a key; it replaces the old one, if there is one."""
        key = segment.ref.key
        if key in self._segments:
            self._drop([key])
            self.replaced.add(key)
        self._segments.add(key, content)
        self.new.append(segment)

    def _drop(self, keys: Sequence[str]) -> None:
        """Close the file descriptors of some keys, and remove what is recorded about them."""
        for key in keys:
            self._files.discard(key)
            if key in self._sparse:
                self._sparse.pop(key).segment.close_fd()
        for segment in self.new:
            if segment.ref.key in keys:
                segment.close_fd()
        self.new = [segment for segment in self.new if segment.ref.key not in keys]

    def delivered(self) -> None:
        """Record that all workers have mapped the new segments."""
        for segment in self.new:
            segment.close_fd()
        self.new = []
        self.replaced.clear()

    def abandon(self) -> None:
        """Release what only the leader needs; called in a worker that was forked later and has inherited it."""
        for segment in (*self.new, *(one.segment for one in self._sparse.values())):
            segment.abandon()
        self.new = []
        self._sparse.clear()

    def close(self) -> None:
        """Close all file descriptors."""
        self._drop([*self._sparse, *(segment.ref.key for segment in self.new)])


class _Sparse:
    """Segment of which only the received blocks are reserved, by its own file descriptor."""

    def __init__(self, segment: Segment) -> None:
        file = Descriptor(os.dup(segment.fileno()))
        self.segment = Segment(segment.ref, segment.bytes, file)
        self._reserved = np.zeros(-(-segment.ref.size // BLOCK), bool)

    def reserve(self, blocks: np.ndarray) -> None:
        """Reserve the memory of blocks that were not reserved before, so that writing to them cannot fail."""
        missing = blocks[~self._reserved[blocks]]
        size = self.segment.ref.size
        self.segment.reserve([(BLOCK * first, min(BLOCK * end, size)) for first, end in runs(missing)])
        self._reserved[missing] = True
