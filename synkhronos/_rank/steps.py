"""Updates by slices, which happen completely or not at all: each rank computes new values for its range of elements.

All ranks compute what the updates need, and then wait at a barrier. After it, the updates are always completed. Each
rank computes its range piece by piece, and copies the new values of a piece over the old ones, in the memory of the
controller, or of the leader of another node. In shared memory it notes where the new values are before it copies them.
If a rank ends within the step, the controller does the rest: what the new values are computed from is still in the
shared heap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos import _graph
from synkhronos._collectives import NOTES
from synkhronos._costs import most_rows_by_slices
from synkhronos._graph.ops import RankContext
from synkhronos._memory import copy_to_heap
from synkhronos._native import native
from synkhronos._rank.commands import RowProduct, SlicedUpdate, Step
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rows import shares

#: Elements that are computed at once: few enough for their new values to be in the cache when they are copied.
PIECE = 64 * 1024
_BLOCK = 1024 * 1024  # elements of a product that are computed at once: more, because BLAS is then faster
_UNIT = 1024  # elements: ranges of ranks are multiples of it
#: Columns of a rank's notes: three counters, `MOST_VALUES` places of new values, and three numbers for each sum over
#: the ranks: the place of the rank's array, or the places of both factors and their number of rows.
_BEGUN = 0  # 0, 1 (the rank has begun the step) or `_HAS_SET`
_DONE = 1  # number of pieces that are complete
_NOTED = 2  # number of pieces of which the new values are noted; negative: in private memory, lost if the rank dies
_FIRST = 3  # place of the first new value
_HAS_SET = 2  # the rank has set the variables that it sets
MOST_VALUES = 64  # of a `SlicedUpdate`
_PLACES = _FIRST + MOST_VALUES
MOST_SUMS = (NOTES - _PLACES) // 3
_NO_FACTORS = -1  # in place of the number of rows
_SUMS = ("partial", "product")  # kinds of the inputs of updates that are sums over the ranks

_REDUCTION = -3  # number of the collective of `Steps.reduce`


class TornUpdate(Exception):
    """An update has changed a part of its variables, which the message names, and cannot be completed."""


_Compute = Callable[[list[Any]], list[Any]]


class _Update(NamedTuple):
    """A `SlicedUpdate` with its arrays on one rank."""

    compute: _Compute
    blocks: list[np.ndarray]  # of the variables, flat
    inputs: list[tuple[str, Any]]  # flat; for a sum over the ranks, its position among those


class _Sum(NamedTuple):
    """A sum over the ranks, with what this rank adds to it: a flat array, or two factors whose product it is."""

    arrays: tuple[np.ndarray, ...]  # which other ranks read
    shape: tuple[int, ...]  # of the result
    product: _Compute | None  # of two factors, of this rank or others

    def own(self) -> np.ndarray:
        """Return what this rank adds as one array."""
        if self.product is None or len(self.arrays) == 1:
            return self.arrays[0]
        return np.ascontiguousarray(self.product(list(self.arrays))[0]).reshape(-1)


class _Prepared(NamedTuple):
    step: Step
    outputs: list[Any]
    updates: list[_Update]
    sums: list[_Sum]
    weights: Sequence[int]


class Steps:
    """Execution of steps on one rank.

    Each node has its own values, notes and ranges of elements.

    Parameters
    ----------
    rank : int
    notes : int64 array of shape (n_ranks, NOTES)
        See `Workspace`.
    heap : Heap
    variables : VariableTable
    runner : callable
        ``runner(function, None)`` returns a callable that computes the outputs of a function.
    leader : int
        The rank whose variables the others view.
    is_controller : bool
    """

    def __init__(
        self,
        rank: int,
        notes: np.ndarray,
        heap: native.Heap,
        variables: _graph.VariableTable,
        *,
        runner: Callable[[int, None], _Compute],
        leader: int,
        is_controller: bool,
    ) -> None:
        self._rank, self._notes, self._heap = rank, notes, heap
        self._added = notes[:, _PLACES : _PLACES + 3 * MOST_SUMS].reshape(len(notes), MOST_SUMS, 3)
        self._variables, self._runner = variables, runner
        self._leads, self._is_controller = rank == leader, is_controller
        self._prepared: _Prepared | None = None
        self._logs: dict[Any, np.ndarray] = {}
        self._memory: Any = None if heap.base is None else np.frombuffer(memoryview(heap), np.uint8)

    @property
    def is_open(self) -> bool:
        """Whether the last step may still have to be completed by `finish`."""
        return self._prepared is not None

    def forget(self) -> None:
        """Forget the last step, because all ranks have done their part: no rank reads its arrays any more."""
        self._prepared = None

    def prepare(self, step: Step, outputs: list[Any], n_wanted: int, weights: Sequence[int]) -> None:
        """Note where the arrays are that this rank adds to sums, before the ranks meet.

        Raises
        ------
        ValueError
            If shapes differ that must be equal.
        """
        arrays = [np.asarray(value) for value in outputs[n_wanted:]]
        sums: list[_Sum] = []
        places: dict[tuple[str, int], int] = {}  # of sums

        def place_of(kind: str, number: int) -> int:
            if (kind, number) not in places:
                places[kind, number] = len(sums)
                is_product = kind == "product"
                sums.append(
                    self._product(step.products[number], arrays, weights) if is_product else self._sum(arrays[number])
                )
            return places[kind, number]

        updates = [self._update(one, arrays, sums, place_of) for one in step.sliced]
        if self._leads:
            self._notes[:, :_FIRST] = 0
        for i, one in enumerate(sums):
            offsets = [self._heap.offset(array) for array in one.arrays]
            spots = [-1 if offset is None else offset for offset in offsets]
            n_rows = len(one.arrays[0]) if len(spots) == 2 else _NO_FACTORS
            self._added[self._rank, i] = spots[0], spots[-1], n_rows
        self._prepared = _Prepared(step, arrays, updates, sums, weights)

    def _update(
        self, one: SlicedUpdate, arrays: list[Any], sums: list[_Sum], place_of: Callable[[str, int], int]
    ) -> _Update:
        blocks = list(map(self._value, one.variables))
        shape = blocks[0].shape
        inputs: list[tuple[str, Any]] = []
        for kind, number in one.inputs:
            if kind in _SUMS:
                place = place_of(kind, number)
                found = sums[place].shape
                inputs.append(("sum", place))
            else:
                array = self._value(number) if kind == "value" else arrays[number]
                found = shape if kind == "scalar" else array.shape
                inputs.append((kind, array if kind == "scalar" else np.ascontiguousarray(array).reshape(-1)))
            if found != shape:
                names = ", ".join(str(self._variables[key]) for key in one.variables)
                raise ValueError(f"an update of {names}, of shape {shape}, got an array of shape {found}")
        flat_blocks = [self._at(self._heap.offset(block), (block.size,), block.dtype) for block in blocks]
        return _Update(self._runner(one.function, None), flat_blocks, inputs)

    def _sum(self, array: np.ndarray, product: _Compute | None = None) -> _Sum:
        return _Sum((self._shared(array).reshape(-1),), array.shape, product)

    def _product(self, one: RowProduct, arrays: list[Any], weights: Sequence[int]) -> _Sum:
        """Return the sum of the ranks' products: with this rank's factors, or if there are many rows, its product."""
        left, right = arrays[one.left], arrays[one.right]
        if len(left) != len(right):
            raise ValueError(f"a product of matrices got {len(left)} and {len(right)} rows")
        all_rows = sum(weights)
        own = weights[self._rank] or all_rows  # without a weight, nobody reads what this rank has
        shape = left.shape[1], right.shape[1]
        product = self._runner(one.function, None)
        if len(left) * all_rows > own * most_rows_by_slices(*shape):
            return self._sum(product([left, right])[0], product)
        return _Sum((self._shared(left), self._shared(right)), shape, product)

    def _shared(self, array: np.ndarray) -> np.ndarray:
        """Return a C-contiguous array, in the shared heap if there is memory."""
        is_there = array.flags.c_contiguous and self._heap.offset(array) is not None
        return array if is_there else copy_to_heap(array)

    def _value(self, key: int) -> Any:
        """Return the value of a variable: on the controller, the array that the others view, if they do.

        Another thread of the program may set the variable meanwhile.
        """
        var = self._variables[key]
        viewed = _graph.sync_of(var.container).viewed if self._is_controller else None
        return _graph.get_array(var) if viewed is None else viewed

    # -- after the ranks have met

    @property
    def lacks_places(self) -> bool:
        """Whether an array is in memory that other ranks cannot read; the same on all ranks."""
        n = 0 if self._prepared is None else len(self._prepared.sums)
        return bool((self._added[:, :n, :2] < 0).any())

    def reduce(self, context: RankContext) -> None:
        """Add the arrays by a collective; all ranks call this if `lacks_places`."""
        prepared = self._prepared
        assert prepared is not None
        n = len(prepared.sums)
        sums = context.combine(_REDUCTION, ("sum",) * n, [one.own() for one in prepared.sums], (True,) * n)
        updates = [
            one._replace(inputs=[("array", sums[it]) if kind == "sum" else (kind, it) for kind, it in one.inputs])
            for one in prepared.updates
        ]
        self._prepared = prepared._replace(updates=updates, sums=[])

    def carry_out(self) -> None:
        """Set the variables that this rank sets, and compute its range of the others."""
        with deferred_interrupts():
            self._notes[self._rank, _BEGUN] = 1
            self._set_others()
            self._work(self._rank)
            if not self._is_controller and self._prepared is not None:  # other ranks may still read the arrays of sums
                self._prepared = self._prepared._replace(outputs=[], updates=[])

    def finish(self) -> bool:
        """Complete a step, if a rank has begun it; only on the controller, when the others have answered or died.

        Returns
        -------
        bool
            Whether the step has happened.

        Raises
        ------
        TornUpdate
            If it cannot be completed.
        """
        if self._prepared is None or not self._notes[:, _BEGUN].any():
            self.forget()
            return False
        with deferred_interrupts():
            try:
                if self._notes[self._rank, _BEGUN] != _HAS_SET:
                    self._set_others()
                for rank in range(len(self._notes)):
                    self._work(rank)
            except Exception as error:
                raise TornUpdate(self._names()) from error
            finally:
                self.forget()
        return True

    def _set_others(self) -> None:
        assert self._prepared is not None
        step = self._prepared.step
        for key, value in zip(step.others, self._prepared.outputs):
            if self._is_controller or key not in step.adopted:
                _graph.set_array(self._variables[key], value)
        self._notes[self._rank, _BEGUN] = _HAS_SET

    def _work(self, rank: int) -> None:
        """Compute the range of a rank, from the piece on that it has not completed."""
        assert self._prepared is not None
        notes, totals = self._notes[rank], self._totals()
        done, noted = map(int, notes[[_DONE, _NOTED]])
        for number, (update, piece, stop) in enumerate(_pieces(self._prepared.updates, rank, len(self._notes)), 1):
            if number <= done:
                continue
            if number == noted:
                size = piece.stop - piece.start
                new = [self._at(notes[_FIRST + i], (size,), one.dtype) for i, one in enumerate(update.blocks)]
            elif number == -noted:
                raise MemoryError("the new values of some elements are lost")
            else:
                inputs = [
                    totals[it].at(piece, stop) if kind == "sum" else it if kind == "scalar" else it[piece]
                    for kind, it in update.inputs
                ]
                new = update.compute(inputs)
                self._note(notes, number, new)
            for block, value in zip(update.blocks, new):
                block[piece] = value
            notes[_DONE] = number

    def _note(self, notes: np.ndarray, number: int, new: list[np.ndarray]) -> None:
        """Note where the new values of a piece are."""
        for i, value in enumerate(new):
            offset = self._heap.offset(value) if value.flags.c_contiguous else None
            if offset is None:
                value = new[i] = self._log(i, value)
                offset = self._heap.offset(value)
            if offset is None:
                notes[_NOTED] = -number
                return
            notes[_FIRST + i] = offset
        notes[_NOTED] = number

    def _log(self, i: int, value: np.ndarray) -> np.ndarray:
        """Copy new values to memory that other ranks can read, if there is any."""
        log = self._logs.get((i, value.dtype))
        if log is None:
            log = np.empty(PIECE, value.dtype)
            if self._heap.offset(log) is not None:
                self._logs[i, value.dtype] = log
        log[: value.size] = value
        return log[: value.size]

    def _totals(self) -> list[_Total]:
        """Return the sums over the ranks that have rows."""
        assert self._prepared is not None
        sums, ranks = self._prepared.sums, [rank for rank, weight in enumerate(self._prepared.weights) if weight]
        return [_Total(one, [self._arrays_of(rank, i, one) for rank in ranks]) for i, one in enumerate(sums)]

    def _arrays_of(self, rank: int, i: int, one: _Sum) -> tuple[np.ndarray, ...]:
        """Return what a rank adds to a sum: a flat array, or two factors."""
        if rank == self._rank:
            return one.arrays
        *places, n_rows = self._added[rank, i]
        dtype = one.arrays[0].dtype
        if n_rows == _NO_FACTORS:
            return (self._at(places[0], (math.prod(one.shape),), dtype),)
        return tuple([self._at(place, (n_rows, n), dtype) for place, n in zip(places, one.shape)])

    def _at(self, offset: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        n_bytes = math.prod(shape) * dtype.itemsize
        return self._memory[offset : offset + n_bytes].view(dtype).reshape(shape)

    def _names(self) -> str:
        """Return the names of the variables that are updated by slices."""
        assert self._prepared is not None
        keys = dict.fromkeys(key for one in self._prepared.step.sliced for key in one.variables)
        return ", ".join(str(self._variables[key]) for key in keys)


def _pieces(updates: Sequence[_Update], rank: int, n_ranks: int) -> Iterator[tuple[_Update, slice, int]]:
    """Yield the pieces of a rank's ranges of all updates, each with the end of its range."""
    for update in updates:
        size = update.blocks[0].size
        share = shares(-(-size // _UNIT), n_ranks)[rank]
        stop = min(share.stop * _UNIT, size)
        for start in range(share.start * _UNIT, stop, PIECE):
            yield update, slice(start, min(start + PIECE, stop)), stop


class _Total:
    """Elements of a sum over the ranks.

    Parameters
    ----------
    one : _Sum
    of_ranks : sequence of tuple of arrays
        What each rank adds: a flat array, or two factors.
    """

    def __init__(self, one: _Sum, of_ranks: Sequence[tuple[np.ndarray, ...]]) -> None:
        self._arrays = [arrays[0] for arrays in of_ranks if len(arrays) == 1]
        self._factors = [arrays for arrays in of_ranks if len(arrays) == 2]
        self._sum, self._block, self._rows = one, np.empty(0), range(0)

    def at(self, piece: slice, stop: int) -> np.ndarray:
        """Return some elements. Products are computed in blocks, and none of them for rows from ``stop`` on."""
        arrays = [one[piece] for one in self._arrays]
        if self._factors:
            arrays.append(self._of_product(piece, stop))
        total = arrays[0]
        for i, array in enumerate(arrays[1:]):
            total = np.add(total, array, out=total if i else None)
        return total

    def _of_product(self, piece: slice, stop: int) -> np.ndarray:
        width = self._sum.shape[1]
        first, last = piece.start // width, -(-piece.stop // width)
        if not (self._rows.start <= first and last <= self._rows.stop):
            assert self._sum.product is not None
            last = max(last, min(first + _BLOCK // width, -(-stop // width)))
            left = np.concatenate([one[:, first:last] for one, _ in self._factors])
            self._block = np.asarray(self._sum.product([left, self._right])[0]).reshape(-1)
            self._rows = range(first, last)
        begin = self._rows.start * width
        return self._block[piece.start - begin : piece.stop - begin]

    @functools.cached_property
    def _right(self) -> np.ndarray:
        """All ranks' rows of the right factor."""
        return np.concatenate([one for _, one in self._factors])
