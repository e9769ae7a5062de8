"""What one rank holds (functions, shared variables, data), and how it executes a command on them.

The same code runs on every rank, the master included; only the master's functions are compiled rather than unpickled,
and its results are used where they are instead of being published.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from synkhronos import _graphs
from synkhronos._arena import Arena
from synkhronos._collectives import Accumulator, SharedMemoryTransport
from synkhronos._devices import ThreadLimits
from synkhronos._partition import Rows, Selection, pieces, take
from synkhronos._protocol import (
    AllGather,
    AllReduce,
    Arrays,
    Call,
    Command,
    Get,
    Load,
    Put,
    RowsRef,
    Settle,
    Shapes,
    Source,
)
from synkhronos._segments import FileRef, SegmentRef, SegmentTable, aligned

__all__ = ["Replica"]

Values = list[Optional[np.ndarray]]


class Replica:
    """One rank's functions, shared variables and data.

    Parameters
    ----------
    rank, n_ranks : int
    stream : int
        Which of its own random streams this rank uses; 0 is the master's, as the user made them.
    segments : SegmentTable
    variables : VariableTable
    transport : SharedMemoryTransport
    """

    def __init__(
        self,
        rank: int,
        n_ranks: int,
        stream: int,
        segments: SegmentTable,
        variables: _graphs.VariableTable,
        transport: SharedMemoryTransport,
    ) -> None:
        self.rank = rank
        self.n_ranks = n_ranks
        self.stream = stream
        self.is_master = stream == 0
        self.segments = segments
        self.variables = variables
        self.functions: dict[int, Any] = {}
        self.outbox = Arena(segments)
        self.thread_limits = ThreadLimits(n_ranks)
        self._transport = transport
        self._excerpts: dict[tuple[int, int], np.ndarray] = {}
        self._handlers: dict[type, Callable[[Any], Any]] = {
            Settle: lambda command: None,
            Load: self._load,
            Call: self._call,
            Get: self._get,
            Put: self._put,
            AllReduce: self._all_reduce,
            AllGather: self._all_gather,
            Shapes: self._shapes,
        }

    def execute(self, command: Command) -> Any:
        """Carry out one command; returns arrays for `Call` and `Get`, else metadata or ``None``."""
        self._transport.restart()
        return self._handlers[type(command)](command)

    def attach(self, refs: Sequence[SegmentRef | FileRef]) -> None:
        """Map what the master has made: all that can be mapped, before an exception for what cannot."""
        failed: Exception | None = None
        for ref in refs:
            try:
                self.segments.attach(ref)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def forget(self, segments: Sequence[str], functions: Sequence[int], variables: Sequence[int]) -> None:
        """Drop what the master has dropped."""
        for segment in segments:
            self.segments.release(segment)
        for function in functions:
            self.functions.pop(function, None)
            self._excerpts = {key: buffer for key, buffer in self._excerpts.items() if key[0] != function}
        for variable in variables:
            self.variables.drop(variable)
        if (functions or variables) and not self.is_master:
            gc.collect()  # compiled functions are cycles, and may hold much memory

    def publish(self, values: Values) -> Arrays:
        """Put arrays where the other ranks can see them."""
        if all(value is None for value in values):
            return Arrays(None, [None] * len(values))
        self.outbox.reserve(sum(aligned(value.nbytes) for value in values if value is not None))
        return Arrays(self.outbox.ref, [None if value is None else self.outbox.place(value) for value in values])

    # -- functions

    def _load(self, command: Load) -> None:
        if not self.is_master and (command.ranks is None or self.rank in command.ranks):
            bundle = _graphs.Bundle(
                self.segments.view(command.pickled).tobytes(), [self.segments.view(ref) for ref in command.buffers], {}
            )
            stream = 0 if command.replicate_rng else self.stream
            self.functions.update(_graphs.load(bundle, self.variables, stream))
        self.thread_limits.apply()  # compiled functions may have brought a BLAS library with them

    def _call(self, command: Call) -> Values | None:
        if not command.counts[self.rank] and not command.everybody:
            return None
        function = self.functions[command.function]
        share = command.shares[self.rank] if command.shares else Rows(0, 0)
        rows = self._rows(command.rows[self.rank]) if command.rows else None
        n_scattered = command.n_scattered
        whole = [self.segments.view(source.array) for source in command.inputs[n_scattered:]]

        def run(part: Rows, sliced: Selection | None) -> list[Any]:
            inputs = [
                self._excerpt(source, part, (command.function, i))
                for i, source in enumerate(command.inputs[:n_scattered])
            ]
            extra: tuple[Any, ...] = () if sliced is None else tuple(sliced) if isinstance(sliced, Rows) else (sliced,)
            subset = None if command.output_subset is None else list(command.output_subset)
            return function(*inputs, *whole, *extra, output_subset=subset)

        outputs = run(share, rows) if command.num_slices == 1 else self._call_sliced(command, run, share, rows)
        return [
            None if mode is None and not self.is_master else output if mode is None else np.asarray(output)
            for output, mode in zip(outputs, command.output_modes)
        ]

    def _call_sliced(
        self, command: Call, run: Callable[..., list[Any]], share: Rows, rows: Selection | None
    ) -> list[Any]:
        """Compute in pieces from the values before the call, accumulate, and apply the updates once."""
        total = command.counts[self.rank]
        n_points = len(share) if command.shares else total
        parts = pieces(n_points, command.num_slices)
        sliced = [None] * len(parts) if rows is None else [take(rows, part) for part in pieces(len(rows), len(parts))]
        modes = [mode or "avg" for mode in command.output_modes]
        names = [f"output {i}" for i in range(len(modes))] + [
            f"the update of {self.variables[key]}" for key in command.updated
        ]
        updated = [self.variables[key] for key in command.updated]
        dtypes = [None] * len(modes) + [np.dtype(var.dtype) for var in updated]
        accumulators = [
            Accumulator(mode, n_points, name, dtype)
            for mode, name, dtype in zip([*modes, *command.update_modes], names, dtypes)
        ]
        for part, some in zip(parts, sliced):
            results = run(Rows(share.start + part.start, share.start + part.stop), some)
            for accumulator, result in zip(accumulators, results):
                accumulator.add(result, len(part))
        results = [accumulator.result() for accumulator in accumulators]
        for var, value in zip(updated, results[len(modes) :]):
            _graphs.set_array(var, value)
        return results[: len(modes)]

    def _rows(self, rows: RowsRef) -> Selection:
        return rows if isinstance(rows, Rows) else self.segments.view(rows)

    def _excerpt(self, source: Source, part: Rows, key: tuple[int, int] | None = None) -> np.ndarray:
        """Rows ``part`` of what ``source`` selects: a view where they are contiguous, else copied.

        With a ``key`` the copy goes to a buffer that the next excerpt of that key overwrites.
        """
        data = self.segments.view(source.array)
        if source.rows is None:
            return data
        rows = take(self._rows(source.rows), part)
        if isinstance(rows, Rows):
            return data[rows.start : rows.stop]
        if key is None:
            return data.take(rows, axis=0, mode="clip")
        buffer = self._excerpts.get(key)
        if (
            buffer is None
            or len(buffer) < len(rows)
            or buffer.shape[1:] != data.shape[1:]
            or buffer.dtype != data.dtype
        ):
            buffer = self._excerpts[key] = np.empty((len(rows), *data.shape[1:]), data.dtype)
        # the indexes were checked by the master; mode="raise" would make take() copy twice
        return np.take(data, rows, axis=0, out=buffer[: len(rows)], mode="clip")

    # -- shared variables

    def _get(self, command: Get) -> Any | None:
        if command.ranks is not None and self.rank not in command.ranks:
            return None
        values = [_graphs.get_array(self.variables[key]) for key in command.variables]
        return self.publish(values) if command.publish and self.is_master else values

    def _put(self, command: Put) -> None:
        if command.ranks is not None and self.rank not in command.ranks:
            return
        for i, (key, source) in enumerate(zip(command.variables, command.sources)):
            part = command.shares[i][self.rank] if command.shares is not None else Rows(0, 0)
            if command.shares is None and source.rows is not None:
                part = Rows(0, len(self._rows(source.rows)))
            _graphs.copy_array(self.variables[key], self._excerpt(source, part))

    def _all_reduce(self, command: AllReduce) -> None:
        variables = [self.variables[key] for key in command.variables]
        arrays = [_graphs.get_array(var) for var in variables]
        in_place = [array.flags.c_contiguous and array.flags.writeable for array in arrays]
        work = [array if fits else np.array(array, order="C") for array, fits in zip(arrays, in_place)]
        self._transport.all_reduce(work, command.op, command.weights)
        for var, array, fits in zip(variables, work, in_place):
            if not fits:
                _graphs.set_array(var, array)

    def _all_gather(self, command: AllGather) -> None:
        for segment in command.segments:
            self.segments.attach(segment)
        own = self.outbox.ref
        for key, refs in zip(command.variables, command.arrays):
            value = np.concatenate([self.segments.view(ref) for ref in refs])
            _graphs.set_array(self.variables[key], value)
        for segment in command.segments:
            if not self.is_master and (own is None or segment.key != own.key):
                self.segments.release(segment.key)

    def _shapes(self, command: Shapes) -> list[tuple[int, ...]]:
        return [_graphs.get_array(self.variables[key]).shape for key in command.variables]
