"""Split a collective over several nodes into pieces, and select the reductions within and between nodes.

Invariant: all ranks of all nodes split a collective in the same way.
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
    """Two-step reduction over all ranks: within each node, then between the node leaders.

    Attributes
    ----------
    within : Reduction or None
        Reduction over the ranks of this node. ``None``: there is no first step, and the leader contributes the
        separate arrays of its ranks.
    between : Reduction
        Reduction over the contributions of the node leaders.
    dtype : dtype
        Dtype of the contributions.
    rows : tuple of int
        For each node, the number of arrays that its leader contributes.
    returned : dtype
        Dtype of the result.
    name : str
        Identifier of the reduction. Arrays with equal names can be reduced as one array.
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
    """Return the two-step reduction for each node.

    An average of integers must be exact, and half precision must be rounded only once. For these, there is no reduction
    within a node: leaders contribute the operands of all of their ranks.

    Parameters
    ----------
    op : str
        Key of `OPS`.
    dtype : dtype
        Dtype of the operands.
    returned : dtype
        Dtype of the result.
    weights : tuple of float
        Weight of each rank.
    sizes : tuple of int
        Number of ranks on each node.

    Returns
    -------
    list of Algorithm
        One for each node.
    """
    name = repr((op, dtype, returned, weights))
    if not any(weights):
        weights = (1,) * len(weights)
    is_unsplit = (OPS[op].weighted and dtype.kind in "iub") or dtype == np.float16
    if is_unsplit or max(sizes) == 1:
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
    """Reduce the contributions of all leaders into ``result``, in rank order.

    Parameters
    ----------
    way : Algorithm
    brought : sequence of array
        Contribution of each leader, in node order: ``way.rows[node]`` arrays, concatenated.
    result : array of shape (n,)
    """
    rows = [row for arrays, n in zip(brought, way.rows) for row in arrays.reshape(n, -1)]
    way.between(rows, [result])


# All sizes are bytes of one leader's contribution.
_SMALL_BYTES = 8 * 1024  # limit on the total size of the arrays that are sent with the votes
SHARED_BYTES = 256 * 1024  # larger arrays do not share a piece, because that takes a copy
_PIECES = 4  # pieces of a large array, so that ranks reduce one piece while another is sent
_LEAST_BYTES = 1 << 20  # smallest piece of an array that is split, because each piece has a fixed cost
PIECE_BYTES = 3 << 19  # largest piece, because a leader does not send while its node reduces


class Bucket(NamedTuple):
    """Range of elements of one array of a collective.

    Attributes
    ----------
    array : array of shape (n,)
        This rank's operand.
    out : array or None
        Destination of the result; ``None`` if this rank does not need the result.
    how : Algorithm or list of int
        Reduction to apply, or, for an all-gather, the number of elements of each rank.
    """

    array: np.ndarray
    out: np.ndarray | None
    how: Algorithm | list[int]

    def cut(self, some: slice) -> Bucket:
        """Return the bucket for a slice of the elements of the result; its arrays are views.

        In an all-gather, a single rank contributes elements.
        """
        how = self.how
        if isinstance(how, list):
            how = [(some.stop - some.start) * (n > 0) for n in how]
        return Bucket(self.array[some], None if self.out is None else self.out[some], how)

    @property
    def dtype_of_result(self) -> np.dtype:
        """Dtype of the result."""
        return self.array.dtype if isinstance(self.how, list) else self.how.returned


#: Fields of a `Bucket` whose arrays may have any shape.
Undivided = tuple[np.ndarray, Optional[np.ndarray], Union[Algorithm, list[int]]]

#: Buckets that are sent between the nodes as one array. Several buckets in a piece have the same reduction.
Piece = list[Bucket]


def find_small(parts: Sequence[Undivided], n_nodes: int = 2) -> list[bool]:
    """Return for each array of a collective whether it is sent with the votes.

    Votes are sent together, so that fewer bytes are small if there are many nodes.
    """
    limit = _SMALL_BYTES * 4 // max(4, n_nodes)
    total = 0
    found = []
    for part in parts:
        n_bytes = _bytes_of(part)
        found.append(total + n_bytes <= limit)
        total += n_bytes * found[-1]
    return found


def _bytes_of(part: Undivided) -> int:
    array, _, how = part
    if isinstance(how, list):
        return array.itemsize * sum(how)
    return array.size * max(how.dtype.itemsize * max(how.rows), how.returned.itemsize)


def divide(parts: Sequence[Undivided], are_small: Sequence[bool] | None = None) -> tuple[list[Bucket], list[Piece]]:
    """Split a collective into small arrays, which are sent with the votes, and pieces.

    A large array is split into several pieces, unless several ranks contribute elements to an all-gather. Consecutive
    smaller arrays with the same reduction share a piece.

    Parameters
    ----------
    parts : sequence of Undivided
        Arrays of the collective.
    are_small : sequence of bool, optional
        For each array, whether it is sent with the votes. Default: the result of `find_small`.

    Returns
    -------
    small : list of Bucket
        Arrays to send with the votes.
    pieces : list of Piece
        All other arrays, in order.
    """
    small: list[Bucket] = []
    pieces: list[Piece] = []
    room = 0  # bytes that still fit into the last piece
    name = ""  # name of the last piece's reduction
    for one, is_small in zip(parts, find_small(parts) if are_small is None else are_small):
        array, out, how = one
        part, n_bytes = Bucket(array.reshape(-1), None if out is None else out.reshape(-1), how), _bytes_of(one)
        if is_small:
            small.append(part)
        elif isinstance(how, list) and sum(map(bool, how)) != 1:
            pieces.append([part])
            room = 0
        elif not isinstance(how, list) and n_bytes <= min(room, SHARED_BYTES) and how.name == name:
            pieces[-1].append(part)
            room -= n_bytes
        else:
            of_one = min(max(n_bytes // _PIECES, _LEAST_BYTES), PIECE_BYTES)
            length = sum(how) if isinstance(how, list) else array.size
            pieces += [[part.cut(slice(*some.bounds))] for some in shares(length, -(-n_bytes // of_one))]
            room = 0
            if not isinstance(how, list) and n_bytes <= SHARED_BYTES and max(how.rows) == 1:
                room, name = PIECE_BYTES - n_bytes, how.name
    return small, pieces


def length_of(piece: Piece) -> int:
    """Return the number of elements that one rank contributes to a piece."""
    return sum(part.array.size for part in piece)


def split_memory(piece: Piece, memory: np.ndarray | None) -> Sequence[np.ndarray | None]:
    """Split the memory of a piece into views for its buckets; if ``memory`` is ``None``, return ``None`` for each."""
    if len(piece) == 1 or memory is None:
        return [memory] * len(piece)
    return np.split(memory, list(itertools.accumulate(part.array.size for part in piece[:-1])))
