"""Updates by slices, which happen completely or not at all: each rank computes new values for its range of elements.

All ranks compute what the updates need, and then meet. From then on the step happens. Each rank computes its range
piece by piece, and copies the new values of a piece over the old ones, in the controller's memory. In shared memory it
notes where the new values are before it copies them. If a rank ends within the step, the controller does the rest: what
the new values are computed from is still in the shared heap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos import _graph
from synkhronos._collectives import NOTES
from synkhronos._graph.ops import RankContext
from synkhronos._native import native
from synkhronos._rank.commands import SlicedUpdate, Step
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rows import shares

#: Elements that are computed at once: few enough for their new values to be in the cache when they are copied.
PIECE = 64 * 1024
_UNIT = 1024  # elements: ranges of ranks are multiples of it
#: Columns of a rank's notes: whether it has begun the step; numbers of pieces that are complete, and whose new values
#: have been noted (negative: they are in private memory, and lost if the rank dies); then the places of these values,
#: and of the rank's partial arrays.
_BEGUN, _DONE, _NOTED, _FIRST = 0, 1, 2, 3
_HAS_SET = 2  # in the column `_BEGUN`: the rank has set the variables that it sets
MOST_VALUES = 64  # of a `SlicedUpdate`
_PLACES = _FIRST + MOST_VALUES
MOST_PARTIALS = NOTES - _PLACES


_REDUCTION = -3  # number of the collective of `Steps.reduce`


class TornUpdate(Exception):
    """An update has changed a part of its variables, which the message names, and cannot be completed."""


class _Update(NamedTuple):
    """A `SlicedUpdate` with its arrays on one rank."""

    compute: Callable[[list[Any]], list[Any]]
    blocks: list[np.ndarray]  # of the variables, flat
    inputs: list[tuple[str, Any]]  # flat; for a partial array, its position among those


class _Prepared(NamedTuple):
    step: Step
    outputs: list[Any]
    updates: list[_Update]
    partials: list[np.ndarray]  # which other ranks read
    weights: Sequence[int]


class Steps:
    """Execution of steps on one rank.

    Parameters
    ----------
    rank : int
    notes : int64 array of shape (n_ranks, NOTES)
        See `Workspace`.
    heap : Heap
    variables : VariableTable
    runner : callable
        ``runner(function, None)`` returns a callable that computes the outputs of a function.
    is_controller : bool
    """

    def __init__(
        self,
        rank: int,
        notes: np.ndarray,
        heap: native.Heap,
        variables: _graph.VariableTable,
        *,
        runner: Callable[[int, None], Callable[[list[Any]], list[Any]]],
        is_controller: bool,
    ) -> None:
        self._rank, self._notes, self._heap = rank, notes, heap
        self._variables, self._runner, self._is_controller = variables, runner, is_controller
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
        """Note where this rank's partial arrays are, before the ranks meet.

        Raises
        ------
        ValueError
            If shapes differ that must be equal.
        """
        given = outputs[n_wanted:]
        arrays = [np.asarray(value) for value in given]
        partials: list[np.ndarray] = []
        places: dict[int, int] = {}  # of partial arrays, by their positions in the outputs
        updates = [self._update(one, arrays, partials, places) for one in step.sliced]
        if self._is_controller:
            self._notes[:, :_FIRST] = 0
        own = self._notes[self._rank]
        for i, array in enumerate(partials):
            offset = self._heap.offset(array)
            own[_PLACES + i] = -1 if offset is None else offset
        self._prepared = _Prepared(step, arrays, updates, partials, weights)

    def _update(
        self, one: SlicedUpdate, arrays: list[Any], partials: list[np.ndarray], places: dict[int, int]
    ) -> _Update:
        blocks = list(map(self._value, one.variables))
        shape = blocks[0].shape
        inputs: list[tuple[str, Any]] = []
        for kind, number in one.inputs:
            array = self._value(number) if kind == "value" else arrays[number]
            if kind == "scalar":
                inputs.append((kind, array))
                continue
            if array.shape != shape:
                names = ", ".join(str(self._variables[key]) for key in one.variables)
                raise ValueError(f"an update of {names}, of shape {shape}, got an array of shape {array.shape}")
            if kind != "partial":
                inputs.append((kind, np.ascontiguousarray(array).reshape(-1)))
                continue
            if number not in places:
                flat = np.ascontiguousarray(array).reshape(-1)
                places[number] = len(partials)
                partials.append(flat if self._heap.offset(flat) is not None else flat.copy())
            inputs.append((kind, places[number]))
        flat_blocks = [self._at(self._heap.offset(block), block.size, block.dtype) for block in blocks]
        return _Update(self._runner(one.function, None), flat_blocks, inputs)

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
        """Whether a partial array is in memory that other ranks cannot read; the same on all ranks."""
        n = 0 if self._prepared is None else len(self._prepared.partials)
        return bool((self._notes[:, _PLACES : _PLACES + n] < 0).any())

    def reduce(self, context: RankContext) -> None:
        """Add the partial arrays by a collective; all ranks call this if `lacks_places`."""
        prepared = self._prepared
        assert prepared is not None
        n = len(prepared.partials)
        sums = context.combine(_REDUCTION, ("sum",) * n, prepared.partials, (True,) * n)
        updates = [
            one._replace(inputs=[("array", sums[it]) if kind == "partial" else (kind, it) for kind, it in one.inputs])
            for one in prepared.updates
        ]
        self._prepared = prepared._replace(updates=updates, partials=sums)

    def carry_out(self) -> None:
        """Set the variables that this rank sets, and compute its range of the others."""
        with deferred_interrupts():
            self._notes[self._rank, _BEGUN] = 1
            self._set_others()
            self._work(self._rank)
            if not self._is_controller and self._prepared is not None:  # other ranks may still read partial arrays
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
        notes, partials = self._notes[rank], self._partials()
        done, noted = map(int, notes[[_DONE, _NOTED]])
        for number, (update, piece) in enumerate(_pieces(self._prepared.updates, rank, len(self._notes)), 1):
            if number <= done:
                continue
            if number == noted:
                size = piece.stop - piece.start
                new = [self._at(notes[_FIRST + i], size, one.dtype) for i, one in enumerate(update.blocks)]
            elif number == -noted:
                raise MemoryError("the new values of some elements are lost")
            else:
                new = _computed(update, piece, partials)
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

    def _partials(self) -> list[list[np.ndarray]]:
        """Return the flat partial arrays of the ranks that have rows."""
        assert self._prepared is not None
        offsets = self._notes[:, _PLACES:]
        ranks = [rank for rank, weight in enumerate(self._prepared.weights) if weight]
        return [
            [array if rank == self._rank else self._at(offsets[rank, i], array.size, array.dtype) for rank in ranks]
            for i, array in enumerate(self._prepared.partials)
        ]

    def _at(self, offset: Any, size: int, dtype: np.dtype) -> np.ndarray:
        return self._memory[offset : offset + size * dtype.itemsize].view(dtype)

    def _names(self) -> str:
        """Return the names of the variables that are updated by slices."""
        assert self._prepared is not None
        keys = dict.fromkeys(key for one in self._prepared.step.sliced for key in one.variables)
        return ", ".join(str(self._variables[key]) for key in keys)


def _pieces(updates: Sequence[_Update], rank: int, n_ranks: int) -> Iterator[tuple[_Update, slice]]:
    """Yield the pieces of a rank's ranges of all updates."""
    for update in updates:
        size = update.blocks[0].size
        share = shares(-(-size // _UNIT), n_ranks)[rank]
        stop = min(share.stop * _UNIT, size)
        for start in range(share.start * _UNIT, stop, PIECE):
            yield update, slice(start, min(start + PIECE, stop))


def _computed(update: _Update, piece: slice, partials: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return the new values of one piece."""
    inputs = []
    for kind, it in update.inputs:
        if kind == "partial":
            inputs.append(_sum([one[piece] for one in partials[it]]))
        else:
            inputs.append(it if kind == "scalar" else it[piece])
    return update.compute(inputs)


def _sum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of arrays, added in order."""
    total = arrays[0]
    for i, array in enumerate(arrays[1:]):
        total = np.add(total, array, out=total if i else None)
    return total
