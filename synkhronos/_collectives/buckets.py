"""Division of a collective between nodes into pieces, and the reductions within and between the nodes.

Invariant: all ranks of all nodes divide a collective in the same way.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import numpy as np

from synkhronos._collectives.reductions import OPS, reduction_of
from synkhronos._native import native
from synkhronos._utils.rows import shares


class Algorithm(NamedTuple):
    """How arrays of all ranks are reduced, in two steps.

    Attributes
    ----------
    within : Reduction or None
        Reduction over the ranks of this node; ``None``: the leader contributes the arrays of all its ranks instead.
    between : Reduction
        Reduction over the contributions of the node leaders.
    dtype : dtype
        Of the contributions.
    rows : tuple of int
        Number of arrays that each leader contributes.
    returned : dtype
        Of the result.
    name : str
        Equal for arrays that are reduced in the same way, on all nodes.
    """

    within: native.Reduction | None
    between: native.Reduction
    dtype: np.dtype
    rows: tuple[int, ...]
    returned: np.dtype
    name: str


@functools.lru_cache(maxsize=256)
def way_of(
    op: str, dtype: np.dtype, returned: np.dtype, weights: tuple[float, ...], sizes: tuple[int, ...]
) -> list[Algorithm]:
    """Return how a reduction over all ranks is done on each node.

    Averages of integers are exact, and half precision is rounded once. For these, leaders contribute all operands of
    their ranks.

    Parameters
    ----------
    op : str
        A key of `OPS`.
    dtype : dtype
        Of the operands.
    returned : dtype
        Of the result.
    weights : tuple of float
        One for each rank.
    sizes : tuple of int
        Number of ranks on each node.

    Returns
    -------
    list of Algorithm
    """
    name = repr((op, dtype, returned, weights))
    if not any(weights):
        weights = (1,) * len(weights)
    whole = (OPS[op].weighted and dtype.kind in "iub") or dtype == np.float16
    if whole or max(sizes) == 1:
        return [Algorithm(None, reduction_of(op, dtype, returned, weights), dtype, sizes, returned, name)] * len(sizes)
    if not math.isfinite(sum(weights)):
        weights = tuple(native.normalized(weights))
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    own = [weights[start : start + size] for start, size in zip(starts, sizes)]
    between = reduction_of(op, returned, returned, tuple(map(sum, own)))
    return [
        Algorithm(reduction_of(op, dtype, returned, one), between, returned, (1,) * len(sizes), returned, name)
        for one in own
    ]


def reduced(way: Algorithm, brought: Sequence[np.ndarray], result: np.ndarray) -> None:
    """Reduce the contributions of all leaders into ``result``, in the order of the nodes and of their arrays."""
    rows = [row for arrays, n in zip(brought, way.rows) for row in arrays.reshape(n, -1)]
    way.between(rows, [result])


_SMALL_BYTES = 8 * 1024  # of one leader's arrays, in total, that are sent with its vote
_SHARED_BYTES = 256 * 1024  # larger arrays do not share a piece, because sharing copies them
_PIECES = 4  # of a large array: while one is between the nodes, their ranks reduce another
_LEAST_BYTES = 1 << 20  # at least, of one leader, if an array is split: each piece has a fixed cost
_PIECE_BYTES = 3 << 20  # at most: while a node reduces a piece, its leader does not send


class Bucket(NamedTuple):
    """Elements of an array.

    Attributes
    ----------
    array : array of shape (n,)
        This rank's operand.
    out : array or None
        Destination of the result on this rank, if it wants one.
    how : Algorithm or list of int
        How it is reduced; for a gathering, the number of elements of each rank.
    """

    array: np.ndarray
    out: np.ndarray | None
    how: Algorithm | list[int]

    def cut(self, some: slice) -> Bucket:
        """Return a slice of the elements."""
        return Bucket(self.array[some], None if self.out is None else self.out[some], self.how)

    @property
    def dtype_of_result(self) -> np.dtype:
        """Dtype of the result."""
        return self.array.dtype if isinstance(self.how, list) else self.how.returned


#: The fields of a `Bucket`, with arrays of any shape.
Undivided = tuple[np.ndarray, Optional[np.ndarray], Union[Algorithm, list[int]]]

#: Parts that are sent together: one, or several that are reduced in the same way and form one array between the nodes.
Piece = list[Bucket]


def divide(parts: Sequence[Undivided]) -> tuple[list[Bucket], list[Piece]]:
    """Divide a collective into the arrays that are sent with the votes and the pieces of the rest.

    A large array becomes several pieces; several smaller ones share a piece.

    Parameters
    ----------
    parts : sequence of Undivided

    Returns
    -------
    small : list of Bucket
        Sent with the votes.
    pieces : list of Piece
    """
    small: list[Bucket] = []
    pieces: list[Piece] = []
    total = room = 0  # bytes sent with the votes; bytes that still fit in the last piece
    name = ""  # of the algorithm of that piece
    for array, out, how in parts:
        part = Bucket(array.reshape(-1), None if out is None else out.reshape(-1), how)
        if isinstance(how, list):
            n_bytes = array.itemsize * sum(how)
        else:
            n_bytes = array.size * max(how.dtype.itemsize * max(how.rows), how.returned.itemsize)
        if total + n_bytes <= _SMALL_BYTES:
            total += n_bytes
            small.append(part)
        elif isinstance(how, list):
            pieces.append([part])
            room = 0
        elif n_bytes <= min(room, _SHARED_BYTES) and how.name == name:
            pieces[-1].append(part)
            room -= n_bytes
        else:
            of_one = min(max(n_bytes // _PIECES, _LEAST_BYTES), _PIECE_BYTES)
            pieces += [[part.cut(slice(*some.bounds))] for some in shares(array.size, -(-n_bytes // of_one))]
            room = _PIECE_BYTES - n_bytes if n_bytes <= _SHARED_BYTES and max(how.rows) == 1 else 0
            name = how.name
    return small, pieces


def length_of(piece: Piece) -> int:
    """Return the number of elements of a piece, of one rank."""
    return sum(part.array.size for part in piece)


def split_memory(piece: Piece, memory: np.ndarray | None) -> Sequence[np.ndarray | None]:
    """Split the memory of a piece into that of each part; without memory, return ``None`` for each."""
    if len(piece) == 1 or memory is None:
        return [memory] * len(piece)
    return np.split(memory, list(itertools.accumulate(part.array.size for part in piece[:-1])))
