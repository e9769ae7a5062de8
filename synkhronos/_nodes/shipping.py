"""What of the master's shared memory a command needs on another machine.

Invariant: before a command runs on a machine, the rows of every array that its ranks will read are there as they are
here. Other rows of that memory hold anything there.

Memory travels by blocks, each when it is first needed, and again when it is needed and its digest is another than when
it was sent: so whoever writes to it need not tell. What is part of a file that is on the other machine, too, does not
travel, nor is it read here; both machines look before each command whether the file was changed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Union

import numpy as np

from synkhronos._memory import ArrayRef, FilePart, SegmentTable, find_part
from synkhronos._nodes.blocks import BLOCK, Digests, blocks_of, take
from synkhronos._processes import World
from synkhronos._rank import Call, Command, InOrder, Load, Put, Source, borrowed
from synkhronos._utils.rows import Rows

__all__ = ["Cargo", "Shipping"]

#: So many blocks travel together, or less than twice as many: of more no copy is made at a time.
PIECE = 2048

#: An array that is read, and which rows of it along an axis (``None``: all).
_Part = tuple[ArrayRef, int, Union[Rows, np.ndarray, None]]


class Cargo(NamedTuple):
    """What a leader does before its ranks execute a command.

    Attributes
    ----------
    make : list of (str, int)
        Memory that there is to be: key, bytes.
    fill : list of (str, int64 array, uint8 array)
        What is to be written, and where: key, blocks, and what these hold, one after the other.
    files : list of FilePart
        What must not have been changed.
    """

    make: list[tuple[str, int]]
    fill: list[tuple[str, np.ndarray, np.ndarray]]
    files: list[FilePart]


class Shipping:
    """What each machine has been sent.

    Parameters
    ----------
    segments : SegmentTable
        The master's.
    world : World

    Attributes
    ----------
    n_bytes : int
        How many of the memory have been sent, to all machines.
    """

    def __init__(self, segments: SegmentTable, world: World) -> None:
        self._segments = segments
        self._world = world
        self._there: list[dict[str, Digests]] = [{} for _ in world.sizes]  # of what was sent, by key
        self._parts: dict[str, FilePart] = {}  # of files that were looked for, by key
        self._opened: list[set[str]] = [set() for _ in world.sizes]  # and found
        self.n_bytes = 0

    def forget(self, keys: Sequence[str]) -> None:
        """The master has dropped memory."""
        for key in keys:
            self._parts.pop(key, None)
            for there, opened in zip(self._there, self._opened):
                there.pop(key, None)
                opened.discard(key)

    def doubt(self, machine: int) -> None:
        """What was to be sent to a machine may not be there: take nothing for being there."""
        self._there[machine].clear()
        self._parts.clear()  # files are looked for anew

    def files(self, command: Command | None) -> dict[str, FilePart]:
        """The parts of files, by key, that a command needs, and that must be looked for on other machines first."""
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
            for there, opened in zip(self._there, self._opened):
                there.pop(key, None)
                opened.discard(key)
        return wanted

    def found(self, machine: int, wanted: dict[str, FilePart], found: Sequence[bool]) -> None:
        """What a machine has answered that was to look for files."""
        self._parts.update(wanted)
        self._opened[machine].update(key for key, is_there in zip(wanted, found) if is_there)

    def _content(self, key: str) -> np.ndarray:
        return self._segments.view(ArrayRef(key, 0, (self._segments.n_bytes(key),), "|u1"))

    def load(self, command: Command | None, machine: int) -> Iterator[Cargo]:
        """What a machine needs for a command, in pieces; the last one may be empty.

        Each is taken for sent as it is made.
        """
        cargo, there, n_bytes = Cargo([], [], []), self._there[machine], 0
        for ref, axis, chosen in self._needed(command, self._world.ranks_of(machine)):
            if ref.key in self._opened[machine]:
                cargo.files.append(self._parts[ref.key])
                continue
            content = self._content(ref.key)
            if ref.key not in there:
                there[ref.key] = Digests(content.nbytes)
                cargo.make.append((ref.key, content.nbytes))
            blocks = _blocks_of(ref, axis, chosen)
            for start in range(0, len(blocks), PIECE):
                changed = there[ref.key].changed(content, blocks[start : start + PIECE])
                if len(changed):
                    values = take(content, changed)  # what is noted is what travels, whoever writes to it meanwhile
                    there[ref.key].note(changed, values)
                    cargo.fill.append((ref.key, changed, values))
                    self.n_bytes += values.nbytes
                    n_bytes += values.nbytes
                if n_bytes >= PIECE * BLOCK:
                    yield cargo
                    cargo, n_bytes = Cargo([], [], []), 0
        yield cargo

    def _needed(self, command: Command | None, ranks: range) -> Iterator[_Part]:
        """What ranks read: arrays, and which elements along an axis (``None``: all)."""
        if isinstance(command, InOrder):
            for part in command.parts:
                yield from self._needed(part, ranks)
        elif isinstance(command, Load):
            for ref in (command.pickled, *command.buffers):
                yield ref, 0, None
        elif isinstance(command, Call):
            yield from self._of_call(command, ranks)
        elif isinstance(command, Put):
            receiving = [rank for rank in ranks if command.ranks is None or rank in command.ranks]
            for i, source in enumerate(command.sources if receiving else ()):
                yield from self._rows(
                    source, None if command.shares is None else _span(command.shares[i], receiving), 0
                )

    def _of_call(self, call: Call, ranks: range) -> Iterator[_Part]:
        firsts = [0] * call.n_scattered
        if call.starts is not None:
            yield call.starts, 0, None
            firsts = self._segments.view(call.starts).tolist()
        for source, first in zip(call.inputs[: call.n_scattered], firsts):
            shares = call.shares or ()
            yield from self._rows(source, _span(shares, ranks), first)
            if call.meets and not all(len(shares[rank]) for rank in ranks):
                yield from self._rows(source, borrowed(call), first)
        for source in call.inputs[call.n_scattered :]:
            yield source.array, 0, None
        for rows in [call.rows[rank] for rank in ranks] if call.rows else []:
            if not isinstance(rows, Rows):
                yield rows, 0, None

    def _rows(self, source: Source, part: Rows | None, first: int) -> Iterator[_Part]:
        """A part of the rows that a source selects, ``None``: all of these."""
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
    """The rows from the first to the last one of some shares."""
    some = [shares[i] for i in which if len(shares[i])]
    return Rows(min(one.start for one in some), max(one.stop for one in some)) if some else Rows(0, 0)


def _blocks_of(ref: ArrayRef, axis: int, chosen: Rows | np.ndarray | None) -> np.ndarray:
    """As `blocks_of`; remembered for rows that are asked for again."""
    if isinstance(chosen, np.ndarray) or not isinstance(ref.dtype, str):
        return blocks_of(ref, axis, chosen)
    return _remembered(ref._replace(key=""), axis, chosen)


_remembered = functools.lru_cache(maxsize=64)(blocks_of)
