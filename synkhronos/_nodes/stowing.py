"""What the master has sent, on another machine: memory of the same keys and sizes, of which ranks read what has come.

Of memory that is large no more is taken of the machine than what has come.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from synkhronos._memory import ArrayRef, Descriptor, FilePart, Segment, SegmentTable, open_part
from synkhronos._nodes.blocks import BLOCK, put, runs
from synkhronos._nodes.shipping import Cargo
from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["Stowage"]

_LARGE = 4 * 1024 * 1024  # bytes; each such memory keeps a descriptor


class Stowage:
    """A machine's copy of the master's memory.

    Parameters
    ----------
    segments : SegmentTable
        The leader's.

    Attributes
    ----------
    new : list of Segment
        What not all workers have mapped.
    replaced : set of str
        What they must forget before: memory of these keys is another now.
    lacks : bool
        Whether some of what came last could not be taken in.
    """

    def __init__(self, segments: SegmentTable) -> None:
        self.new: list[Segment] = []
        self.replaced: set[str] = set()
        self.lacks = False
        self._segments = segments
        self._sparse: dict[str, _Sparse] = {}
        self._files: set[str] = set()

    def open(self, key: str, part: FilePart) -> bool:
        """Have part of a file as the memory of a key, if that file is here, too; returns whether it is."""
        segment = open_part(part, key)
        if segment is not None:
            with deferred_interrupts():
                self._put_in_place(segment, segment.bytes)
                self._files.add(key)
        return segment is not None

    def take(self, cargo: Cargo, dropped: Sequence[str]) -> None:
        """Take in what has come, without what the master has dropped; the cargo is empty then.

        Memory that is to be made and is there is not made again: what could not be done can be tried again.

        Raises
        ------
        MemoryError
            If the machine has no room for it.
        OSError
            If this process has too many open files, or a file was changed.
        """
        self.lacks = True
        self._drop(dropped)
        for part in cargo.files:
            if not part.is_as_it_was:
                raise OSError(
                    f"{part.path} was changed on this machine while it was used: a file that is a numpy.memmap of mode "
                    '"r" must stay as it is. The next call takes its rows from the first machine'
                )
        for key, n_bytes in cargo.make:
            if key not in self._segments or key in self._files:
                self._make(key, n_bytes)
        cargo.fill.reverse()
        while cargo.fill:
            key, blocks, values = cargo.fill.pop()  # what is in its place is not kept twice
            if key in self._sparse:
                self._sparse[key].reserve(blocks)
            put(self._segments.view(ArrayRef(key, 0, (self._segments.n_bytes(key),), "|u1")), blocks, values)
        self.lacks = False

    def _make(self, key: str, n_bytes: int) -> None:
        is_large = n_bytes >= _LARGE
        segment = Segment.create(n_bytes, key, reserved=not is_large)
        with deferred_interrupts():
            self._put_in_place(segment, segment.bytes[:n_bytes])
            if is_large:
                self._sparse[key] = _Sparse(segment)

    def _put_in_place(self, segment: Segment, content: np.ndarray) -> None:
        """Have memory, rather than what there was of its key."""
        key = segment.ref.key
        if key in self._segments:
            self._drop([key])
            self.replaced.add(key)
        self._segments.add(key, content)
        self.new.append(segment)

    def _drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._files.discard(key)
            if key in self._sparse:
                self._sparse.pop(key).segment.close_fd()
        for segment in self.new:
            if segment.ref.key in keys:
                segment.close_fd()
        self.new = [segment for segment in self.new if segment.ref.key not in keys]

    def delivered(self) -> None:
        """All workers have mapped what is new."""
        for segment in self.new:
            segment.close_fd()
        self.new = []
        self.replaced.clear()

    def abandon(self) -> None:
        """In a worker that was forked late: let go of what it inherited and the leader alone needs."""
        for segment in (*self.new, *(one.segment for one in self._sparse.values())):
            segment.abandon()
        self.new = []
        self._sparse.clear()

    def close(self) -> None:
        """Give descriptors back."""
        self._drop([*self._sparse, *(segment.ref.key for segment in self.new)])


class _Sparse:
    """Memory of which only the blocks are reserved that have come, with a descriptor of its own."""

    def __init__(self, segment: Segment) -> None:
        file = Descriptor(os.dup(segment.fileno()))
        self.segment = Segment(segment.ref, segment.bytes, file)
        self._reserved = np.zeros(-(-segment.ref.size // BLOCK), bool)

    def reserve(self, blocks: np.ndarray) -> None:
        missing = blocks[~self._reserved[blocks]]
        size = self.segment.ref.size
        self.segment.reserve([(BLOCK * first, min(BLOCK * end, size)) for first, end in runs(missing)])
        self._reserved[missing] = True
