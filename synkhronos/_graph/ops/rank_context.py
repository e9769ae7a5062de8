"""Where a rank stands while it executes a function: what the ops of a graph must know at run time.

There is one `Standing` for each rank, and it is `current` in the thread that executes a function with collectives, from
its beginning to its end. Everywhere else there is none, and a collective is that of one rank: the identity.

All ranks must come to the same collectives in the same order. Each compares a signature whenever they meet, and they
meet once more at the end of the function; so one that goes another way is an error on all of them, not a wait.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from synkhronos._collectives import SharedMemoryTransport, result_dtype
from synkhronos._processes import COLLECTIVES
from synkhronos.errors import CollectiveAborted, WorkerDied, WorkerTimeout

if TYPE_CHECKING:
    from synkhronos._processes import Timeline

__all__ = ["BROADCAST", "GATHER", "Standing", "current"]

GATHER = "gather"
BROADCAST = "broadcast"  # of bytes, or of other rows: all ranks get the controller's

_logger = logging.getLogger("synkhronos")
_here = threading.local()
_END = -2  # the number of the meeting at the end of a function


def current() -> Standing | None:
    """The standing of the rank whose function this thread executes; ``None`` if it executes none."""
    return getattr(_here, "standing", None)


class Standing:
    """One rank among the others in a call.

    Parameters
    ----------
    rank, n_ranks, controller : int
        This rank, how many there are, and the one in which the program runs.
    transport : SharedMemoryTransport
    timeline : Timeline

    Attributes
    ----------
    weights : tuple of int
        By which the ranks count in the call under way: their data points, if there are any. A rank of weight 0 is left
        out of every collective.
    own : int
        This rank's weight; in a call in slices, how many data points the slice has.
    """

    def __init__(
        self, rank: int, n_ranks: int, controller: int, transport: SharedMemoryTransport, timeline: Timeline
    ) -> None:
        self.rank = rank
        self.n_ranks = n_ranks
        self.controller = controller
        self.weights: tuple[int, ...] = (1,) * n_ranks
        self.own = 1
        self._transport = transport
        self._timeline = timeline
        self._lost: Exception | None = None
        self._known: dict[Any, Any] = {}  # the last reductions of each collective
        self._left: list[Any] = []  # what other ranks may still read and write

    def execute(self, weights: tuple[int, ...], function: Callable[[], Any]) -> Any:
        """Call a function with this standing, and meet the others at its end.

        Parameters
        ----------
        weights : tuple of int
            Of each rank; not all of them 0.
        function : callable
        """
        self.weigh(weights)
        self._left.clear()
        self._lost = None
        _here.standing = self
        try:
            result = function()
            if self.n_ranks > 1:
                before = self._timeline.switch(COLLECTIVES)
                self._run([], _END, _END)
                self._timeline.switch(before)
            return result
        except CollectiveAborted:
            if self._lost is not None:
                raise self._lost from None
            raise
        finally:
            _here.standing = None

    def weigh(self, weights: tuple[int, ...]) -> None:
        """Have the ranks count by these; no one has met the others yet."""
        self.weights = weights
        self.own = weights[self.rank]

    def combine(
        self, number: int, ops: Sequence[str], arrays: Sequence[np.ndarray], in_place: Sequence[bool]
    ) -> list[np.ndarray]:
        """Reduce arrays over the ranks, and gather others; all ranks come out with the same.

        Parameters
        ----------
        number : int
            Of this collective in its function, the same on all ranks.
        ops : sequence of str
            For each array a key of `OPS`, ``"gather"`` or ``"broadcast"``.
        arrays : sequence of array
            C-contiguous.
        in_place : sequence of bool
            For each array whether its memory takes the result, which has its dtype then.

        Raises
        ------
        ValueError
            On every rank, if shapes differ between ranks where they must not.
        RuntimeError
            On every rank, if not all are in this collective.
        """
        timeline = self._timeline
        if not timeline.on:
            return self._combine(number, ops, arrays, in_place)
        with timeline.call(_describe(ops, arrays)):
            timeline.switch(COLLECTIVES)
            return self._combine(number, ops, arrays, in_place)

    def _combine(
        self, number: int, ops: Sequence[str], arrays: Sequence[np.ndarray], in_place: Sequence[bool]
    ) -> list[np.ndarray]:
        signature, reductions = self._reductions(number, ops, arrays)
        in_rows = [(array, op) for (array, op), how in zip(zip(arrays, ops), reductions) if how is None]
        shapes_of = iter(self._exchange_shapes(number, in_rows) if in_rows else ())
        parts: list[tuple[Any, Any, Any]] = []
        results = []
        for array, op, is_own, reduction in zip(arrays, ops, in_place, reductions):
            if reduction is None:
                shapes = next(shapes_of)
                out = np.empty((sum(shape[0] for shape in shapes), *array.shape[1:]), array.dtype)
                sizes = [int(np.prod(shape)) for shape in shapes]
                parts.append((array if self._is_present(self.rank, op) else array[:0], out, sizes))
            else:
                out = array if is_own else np.empty(array.shape, reduction[0])
                parts.append((array, out, reduction[1]))
            results.append(out)
        directly = self._run(parts, number, signature)
        if self.rank == self.controller and _logger.isEnabledFor(logging.DEBUG):
            way = "large ones where they lie" if directly else "through lanes"
            _logger.debug("in a function, %s: %s", _describe(ops, arrays), way)
        return results

    def _reductions(self, number: int, ops: Sequence[str], arrays: Sequence[np.ndarray]) -> tuple[int, list[Any]]:
        """What must be the same on all ranks; and for each array dtype and way of its result, ``None`` for rows."""
        seen = [(array.shape, array.dtype) for array in arrays]
        last, weights, known = self._known.get((number, ops), (None, None, None))
        if known is None or last != seen or weights != self.weights:
            same = (*ops, *(array.shape for op, array in zip(ops, arrays) if op not in (GATHER, BROADCAST)))
            reductions: list[Any] = []
            for op, array in zip(ops, arrays):
                returned = None if op in (GATHER, BROADCAST) else result_dtype(array.dtype, op)
                how = (
                    None if returned is None else self._transport.reduction_of(op, array.dtype, returned, self.weights)
                )
                reductions.append(None if how is None else (returned, how))
            known = zlib.crc32(repr((number, same)).encode()), reductions  # the same on every machine
            self._known[number, ops] = seen, self.weights, known
        return known

    def _is_present(self, rank: int, op: str) -> bool:
        """Whether a rank has rows of what is gathered or broadcast."""
        return rank == self.controller if op == BROADCAST else bool(self.weights[rank])

    def _exchange_shapes(self, number: int, arrays: Sequence[tuple[np.ndarray, str]]) -> list[list[tuple[int, ...]]]:
        """For each array, with its op, the shapes that it has on the ranks: without rows where a rank is left out."""
        own = [(array.shape[0] * self._is_present(self.rank, op), *array.shape[1:]) for array, op in arrays]
        lengths = np.array([length for shape in own for length in shape], np.int64)
        table = np.empty((self.n_ranks, len(lengths)), np.int64)
        self._run([(lengths, table, [len(lengths)] * self.n_ranks)], number, hash((number, len(lengths))))
        found, start = [], 0
        for array, op in arrays:
            shapes = [tuple(row[start : start + array.ndim]) for row in table.tolist()]
            start += array.ndim
            beyond = {shape[1:] for rank, shape in enumerate(shapes) if self._is_present(rank, op)}
            if len(beyond) > 1:
                raise ValueError(f"gathered: the shapes of the ranks differ beyond axis 0: {shapes}")
            found.append(shapes)
        return found

    def _run(self, parts: list[tuple[Any, Any, Any]], number: int, signature: int) -> bool:
        """Meet, if the signature is the same on all ranks."""
        try:
            directly = self._transport.run(parts, signature)
            if directly is None:
                raise self._difference(number, [part[0] for part in parts if not isinstance(part[2], list)])
        except BaseException as error:
            self._left += parts
            if isinstance(error, (WorkerDied, WorkerTimeout)):  # which Theano cannot raise again with its own words
                self._lost = error
                raise CollectiveAborted(str(error)) from error
            raise
        return bool(directly)

    def _difference(self, number: int, arrays: Sequence[np.ndarray]) -> Exception:
        """What tells in which way ranks differ: all of them come here, since signatures differ for all."""
        shape = [length for array in arrays for length in array.shape]
        numbers = [tuple(row) for row in self._tell_all([number, len(shape)])]
        if len(set(numbers)) == 1:
            table = self._tell_all(shape)
            start = 0
            for array in arrays:
                shapes = [tuple(row[start : start + array.ndim]) for row in table]
                start += array.ndim
                if len(set(shapes)) > 1:
                    return ValueError(
                        f"a collective of a function needs equal shapes on all ranks; got {shapes}. Use gathered for "
                        "values with one row for each data point"
                    )
        places = [
            f"rank {rank} is at {'the end' if one == _END else f'number {one}'}"
            for rank, (one, _) in enumerate(numbers)
        ]
        return RuntimeError(
            f"the ranks are not in the same collective of a function: {', '.join(places)}. What decides whether a "
            "collective is reached (the condition of an IfElse, the number of steps of a scan) must be the same on all "
            "ranks: make it of what is, such as the result of a collective"
        )

    def _tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, as many on each."""
        own = np.array(numbers, np.int64)
        table = np.empty(self.n_ranks * len(own), np.int64)
        self._transport.run([(own, table, [len(own)] * self.n_ranks)], 0)
        return table.reshape(self.n_ranks, -1).tolist()


def _describe(ops: Sequence[str], arrays: Sequence[np.ndarray]) -> str:
    """A collective for traces: its ops, how many arrays, how many bytes on this rank."""
    names = ", ".join(sorted(set(ops)))
    n_bytes = sum(array.nbytes for array in arrays)
    return f"{names} of {len(arrays)} array{'s' if len(arrays) > 1 else ''}, {n_bytes} bytes"
