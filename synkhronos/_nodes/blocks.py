"""Blocks of memory: in which ones arrays lie, their digests, and their contents, taken and put."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np

from synkhronos._memory import ArrayRef
from synkhronos._native import native
from synkhronos._partition import Rows

__all__ = ["BLOCK", "Digests", "blocks_of", "put", "runs", "take"]

BLOCK = 4096  # bytes


class Digests:
    """What blocks held when they were last noted; in the beginning, nothing that any block may hold.

    Two different blocks have the same digest with a probability of at most 2^-128, since the key is random and secret.

    Parameters
    ----------
    n_bytes : int
        Of the memory.
    """

    _key = os.urandom(BLOCK + 16)

    def __init__(self, n_bytes: int) -> None:
        self._noted = np.zeros((-(-n_bytes // BLOCK), 4), np.uint64)  # pages that are not written to take no memory

    def changed(self, content: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Those of some blocks that are not as they were noted."""
        fresh = self._of(content, blocks)
        return np.asarray(blocks[(fresh != self._noted[blocks]).any(axis=1)])

    def note(self, blocks: np.ndarray, values: np.ndarray) -> None:
        """Note what blocks hold, as `take` has taken it."""
        self._noted[blocks] = self._of(values, np.arange(len(blocks)))

    def _of(self, content: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        digests = np.empty((len(blocks), 4), np.uint64)
        native.hash_blocks(content, blocks, self._key, digests)
        return digests


def take(content: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """A copy of blocks, which are in order, one after the other, as a uint8 array."""
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first == len(blocks) - 1:
        return content[BLOCK * first : BLOCK * (last + 1)].copy()
    n_whole = len(content) // BLOCK
    whole = content[: BLOCK * n_whole].reshape(n_whole, BLOCK)
    if last < n_whole:
        return whole[blocks].reshape(-1)
    return np.concatenate([whole[blocks[:-1]].reshape(-1), content[BLOCK * n_whole :]])


def put(content: np.ndarray, blocks: np.ndarray, values: np.ndarray) -> None:
    """Write to memory what `take` has taken of other memory of its size."""
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
    """The blocks, in order, in which chosen rows of an array along an axis lie; ``None``: all of it."""
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
    return blocks[np.flatnonzero(np.diff(blocks, prepend=-1))]  # neighbours may begin where others end


def runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Numbers, in order, as ranges: the first one of each, and the one after its last."""
    if len(numbers):
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        firsts, lasts = numbers[np.concatenate([[0], cuts])], numbers[np.concatenate([cuts - 1, [-1]])]
        yield from zip(firsts.tolist(), (lasts + 1).tolist())
