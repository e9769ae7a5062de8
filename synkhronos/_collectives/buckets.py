"""How arrays of the ranks of several machines are reduced: within each machine, and between them.

What a collective of ranks on several machines consists of, and what of it moves between the machines at a time.

Invariant: all ranks, of all machines, divide a collective the same way.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._collectives.reductions import OPS, reduction_of
from synkhronos._core import native
from synkhronos._utils.rows import shares

__all__ = ["Part", "Piece", "Way", "apart", "divide", "length_of", "reduced", "way_of"]


class Way(NamedTuple):
    """How arrays of all ranks are reduced.

    Attributes
    ----------
    within : Reduction or None
        Of the ranks of this machine; ``None``: their leader brings what each of them has.
    between : Reduction
        Of what the leaders bring.
    dtype : dtype
        Of what they bring.
    rows : tuple of int
        How many arrays each leader brings.
    returned : dtype
    name : str
        The same for what is reduced the same way, on all machines.
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
) -> list[Way]:
    """On each machine, the way of a reduction of all ranks; ``sizes`` are the numbers of ranks.

    Averages of integers are exact, and half precision is rounded once, so leaders bring all operands of those.
    """
    name = repr((op, dtype, returned, weights))
    if not any(weights):
        weights = (1,) * len(weights)
    whole = (OPS[op].weighted and dtype.kind in "iub") or dtype == np.float16
    if whole or max(sizes) == 1:
        return [Way(None, reduction_of(op, dtype, returned, weights), dtype, sizes, returned, name)] * len(sizes)
    if not math.isfinite(sum(weights)):
        weights = tuple(native.normalized(weights))
    starts = [sum(sizes[:machine]) for machine in range(len(sizes))]
    own = [weights[start : start + size] for start, size in zip(starts, sizes)]
    between = reduction_of(op, returned, returned, tuple(map(sum, own)))
    return [
        Way(reduction_of(op, dtype, returned, one), between, returned, (1,) * len(sizes), returned, name) for one in own
    ]


def reduced(way: Way, brought: Sequence[np.ndarray], result: np.ndarray) -> None:
    """Reduce what all leaders bring, in the order of the machines: of each, its arrays one after the other."""
    rows = [row for arrays, n in zip(brought, way.rows) for row in arrays.reshape(n, -1)]
    way.between(rows, [result])


_SMALL_BYTES = 8 * 1024  # of one leader; they travel with its vote
_SHARED_BYTES = 256 * 1024  # so much is copied rather than sent by itself
_PIECES = 4  # of an array, if it is large enough: while one is between the machines, their ranks reduce another
_LEAST_BYTES = 1 << 20  # of a piece, of one leader, before there are more of them: each takes some time
_PIECE_BYTES = 3 << 20  # at most: while a machine reduces one, its leader sends nothing


class Part(NamedTuple):
    """Elements of an array.

    Attributes
    ----------
    array : array
        Flat; what this rank brings.
    out : array or None
        Where this rank wants the result.
    how : Way or list of int
        How it is reduced; to be gathered: how many elements each rank has.
    """

    array: Any
    out: Any
    how: Any

    def cut(self, some: slice) -> Part:
        """Some of the elements."""
        return Part(self.array[some], None if self.out is None else self.out[some], self.how)

    @property
    def dtype_of_result(self) -> np.dtype:
        """The type of the result."""
        dtype: np.dtype = self.array.dtype if isinstance(self.how, list) else self.how.returned
        return dtype


#: What moves at a time: a part, or several that are reduced the same way, and are one array between the machines.
Piece = list[Part]


def divide(parts: list[tuple[Any, Any, Any]]) -> tuple[list[Part], list[Piece]]:
    """What travels with the votes, and the pieces of the rest: of a large array many, of several smaller ones one.

    Parameters
    ----------
    parts : list of (array, array or None, Way or list of int)
        As of `Part`, of any shape.
    """
    small: list[Part] = []
    pieces: list[Piece] = []
    total = room = 0  # bytes that travel with the votes; and that the last piece can still take
    for array, out, how in parts:
        part = Part(array.reshape(-1), None if out is None else out.reshape(-1), how)
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
        elif n_bytes <= min(room, _SHARED_BYTES) and how.name == pieces[-1][0].how.name:
            pieces[-1].append(part)
            room -= n_bytes
        else:
            of_one = min(max(n_bytes // _PIECES, _LEAST_BYTES), _PIECE_BYTES)
            pieces += [[part.cut(slice(*some.bounds))] for some in shares(array.size, -(-n_bytes // of_one))]
            room = _PIECE_BYTES - n_bytes if n_bytes <= _SHARED_BYTES and max(how.rows) == 1 else 0
    return small, pieces


def length_of(piece: Piece) -> int:
    """How many elements a piece has, of one rank."""
    return sum(part.array.size for part in piece)


def apart(piece: Piece, memory: np.ndarray | None) -> list[Any]:
    """Of memory for a piece, what is that of each part; ``None``: there is none."""
    if len(piece) == 1 or memory is None:
        return [memory] * len(piece)
    return np.split(memory, list(itertools.accumulate(part.array.size for part in piece[:-1])))
