"""Execute a function call on one rank, on its shard of the data, at once or in slices.

In a sliced call, each rank computes its shard slice by slice, with the values of shared variables before the call. It
accumulates the results, and applies the updates once.

A rank without rows still takes part in a function that has collectives, because the other ranks would wait for it. It
computes on one row of another rank (of sliceable shared variables: on its own first row), has weight 0 in every
collective, and keeps only those updates that are results of collectives, which are the same on all ranks.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._backends import is_device_array, timed_machine, to_device, to_host
from synkhronos._collectives import Accumulator, DeviceAccumulator, ShapesDiffer, Workspace, accumulates
from synkhronos._graph.ops import RankContext, times_of_operands
from synkhronos._memory import SegmentTable
from synkhronos._native import native
from synkhronos._processes import COLLECTIVES, FUNCTION, SHUFFLE, ProcessGroup
from synkhronos._rank.collective_handlers import CollectiveHandlers
from synkhronos._rank.commands import Call, Step, TimeFunction
from synkhronos._rank.results import RowViews
from synkhronos._rank.steps import Steps
from synkhronos._utils import KeyedCache
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rows import Rows, Selection, pieces, take

_MOST_CALLS = 200  # that are timed at once
_LEAST_OF_LONG = 2  # if one takes longer than all should
_LONG = 10  # times that: one is enough


def borrowed_row(call: Call) -> Rows:
    """Return one row of the first rank that has rows of the scattered inputs; an empty range if no rank has."""
    for share in call.shares or ():
        if len(share):
            return Rows(share.start, share.start + 1)
    return Rows(0, 0)


@contextlib.contextmanager
def preserved(variables: Sequence[Any]) -> Iterator[None]:
    """Restore the values of shared variables at the end of a block."""
    values = [_graph.get_array(var).copy() for var in variables]
    try:
        yield
    finally:
        for var, value in zip(variables, values):
            _graph.set_array(var, value)


def call_in_slices(
    call: Call,
    n_points: int,
    run: Callable[[Rows, Any], list[Any]],
    rows: tuple[Rows, Selection | None],
    updated: Sequence[Any],
    follow: Callable[..., list[Any]],
) -> list[Any]:
    """Compute a shard in slices, accumulate the results, apply the updates once, and call the function that follows.

    Parameters
    ----------
    call : Call
    n_points : int
        Number of data points of this rank.
    run : callable
        ``run(part, some)`` computes on rows ``part`` of the scattered inputs and ``some`` of the sliceable shared
        variables. It returns the outputs, then the new values of ``updated``.
    rows : tuple
        This rank's rows of the scattered inputs, and of the sliceable shared variables (``None``: all rows, as they
        are).
    updated : list of shared variables
        Variables whose new values the function returns after its outputs.
    follow : callable
        ``follow(*entering)`` returns the outputs of the function in `Call.follow`.

    Returns
    -------
    list
        The outputs that the call asks for.
    """
    share, sliceable = rows
    parts = pieces(n_points, call.num_slices)
    sliced: list[Any] = [None] * len(parts)
    if sliceable is not None:
        sliced = [take(sliceable, part) for part in pieces(len(sliceable), len(parts))]
    modes = [mode or "avg" for mode in call.output_modes] if call.follow is None else list(call.follow.modes)
    names = [*(f"output {i}" for i in range(len(modes))), *(f"the update of {var}" for var in updated)]
    dtypes = [None] * len(modes) + [np.dtype(var.dtype) for var in updated]
    accumulators: list[Any] = []
    for part, some in zip(parts, sliced):
        results = run(Rows(share.start + part.start, share.start + part.stop), some)
        if not accumulators:
            accumulators = [
                _accumulator(result, mode, n_points, name, dtype)
                for result, mode, name, dtype in zip(results, [*modes, *call.update_modes], names, dtypes)
            ]
        for accumulator, result in zip(accumulators, results):
            accumulator.add(result, len(part))
    results = [accumulator.result() for accumulator in accumulators]
    results, values = results[: len(modes)], results[len(modes) :]
    if call.follow is not None:  # before the updates, because it uses the values before the call, too
        n_local = len(modes) - call.follow.n_entering
        results[n_local:] = follow(*map(to_host, results[n_local:]))
        results = [results[i] for i in call.follow.order]
    for var, value in zip(updated, values):
        _graph.set_array(var, value)
    return results


def _accumulator(result: Any, mode: str, total: int, name: str, dtype: np.dtype | None) -> Any:
    """Return an accumulator for results like this one: on the device if they are there and it supports the dtype."""
    if is_device_array(result) and accumulates(result.dtype, mode, dtype):
        return DeviceAccumulator(mode, total, name)
    return Accumulator(mode, total, name, dtype)


class Caller:
    """Executor of function calls on one rank.

    Parameters
    ----------
    group : ProcessGroup
    functions : dict of int to function
        Compiled functions by key. The caller sees later additions.
    segments : SegmentTable
    row_views : RowViews
    exchange : CollectiveHandlers
    workspace : Workspace
    heap : Heap
        The shared heap.

    Attributes
    ----------
    steps : Steps
    """

    def __init__(
        self,
        group: ProcessGroup,
        functions: dict[int, Any],
        segments: SegmentTable,
        row_views: RowViews,
        *,
        exchange: CollectiveHandlers,
        workspace: Workspace,
        heap: native.Heap,
    ) -> None:
        self._rank = group.world.first + group.rank
        self._is_controller = self._rank == group.world.master_rank
        self._functions = functions
        self._ready: KeyedCache[Callable[[], list[Any] | None]] = KeyedCache()  # by function
        self._runners: dict[tuple[int, tuple[int, ...] | None], Callable[[list[Any]], list[Any]]] = {}
        self._segments, self._own = segments, segments.own
        self._row_views = row_views
        self._exchange = exchange
        self._variables = exchange.variables
        self._timeline = group.timeline
        world = group.world
        transport, timeline = exchange.transport, group.timeline
        self._context = RankContext(self._rank, world.n_ranks, world.master_rank, transport, timeline)
        self._on_node = RankContext(group.rank, group.n_ranks, group.master_rank, transport.on_node, timeline)
        self.steps = Steps(
            group.rank,
            workspace.notes,
            heap,
            self._variables,
            runner=self.runner,
            leader=group.master_rank,
            is_controller=self._is_controller,
        )

    def call(self, command: Call) -> list[Any] | None:
        """Call a function on this rank's shard; return its outputs, or ``None`` on a rank that has none to return.

        The work that a command requires is prepared once, and again only if the command differs from the last command
        of its function.
        """
        execute = self._ready.get(command.function, command)
        if execute is None:
            execute = self._ready.put(command.function, command, self._prepare(command))
        if not self._own:
            return execute()
        try:
            return execute()
        finally:
            self._own.clear()

    def forget(self, function: int) -> None:
        """Forget a dropped function, and all prepared calls, since other functions may call this one."""
        self._ready.clear()
        self._runners = {key: runner for key, runner in self._runners.items() if key[0] != function}

    def forget_calls(self) -> None:
        """Forget all reductions over nodes, so that each is made once more before it begins early."""
        self._context.forget_calls()

    def runner(self, function: int, subset: tuple[int, ...] | None) -> Callable[[list[Any]], list[Any]]:
        """Return a callable that computes some outputs of a function."""
        key = function, subset
        if key not in self._runners:
            self._runners[key] = _graph.run_function(self._functions[function], subset)
        return self._runners[key]

    def time_function(self, command: TimeFunction) -> list[Any] | None:
        """Return the seconds of calls of a function on this rank alone; ``None`` if it does not take part.

        There are at least ``least`` calls, two long ones, or one very long one, and more, up to `_MOST_CALLS`, until
        they have taken ``seconds``. One more, before them, is not counted, because the backend may compile then.
        Collectives in the function have no effect.
        """
        if self._rank not in command.ranks:
            return None
        self._exchange.restore(keep=True)  # so that updates do not add up over all measurements
        run = self.runner(command.function, None)
        values = [np.array(self._segments.view(ref)) for ref in command.inputs]
        if command.takes_rows:
            values += map(np.asarray, (command.rows, 0, command.rows))
        cells = [self._variables[key].container.storage for key in command.sliceable]
        before = [cell[0] for cell in cells]
        try:
            for cell, value in zip(cells, before):
                cell[0] = np.take(value, np.resize(np.arange(len(value)), command.rows), axis=0)
            if command.of_operands:
                function = self._functions[command.function]
                return _times_of_operands(function, lambda: run(list(values)), command.seconds, command.least)
            return _seconds(lambda: run(list(values)), command.seconds, command.least)
        finally:
            with deferred_interrupts():
                for cell, value in zip(cells, before):
                    cell[0] = value

    def stepper(self, function: int, together: str | None) -> Callable[[list[Any]], list[Any]]:
        """Return a callable that computes all outputs of a function; `Exchange` has the meaning of ``together``.

        The ranks that compute together have equal weights.
        """
        run, context = self.runner(function, None), self._on_node if together == "node" else self._context
        if together is None:
            return run
        weights = (1,) * context.n_ranks
        return lambda values: context.execute(weights, lambda: run(values))

    def _prepare(self, command: Call) -> Callable[[], list[Any] | None]:
        """Return a callable that executes a command, any number of times."""
        is_absent = not (command.counts[self._rank] or command.all_compute or command.exact)
        if is_absent and not command.has_collectives:
            return lambda: None
        share = borrowed_row(command) if is_absent else command.shares[self._rank] if command.shares else Rows(0, 0)
        compute = self._in_one(command, share) if command.num_slices == 1 else self._in_slices(command, share)
        left = [self._variables[key] for key in command.kept] if is_absent else []
        is_controller, modes = self._is_controller, command.output_modes
        weights = _weights(command)

        def execute() -> list[Any] | None:
            if command.step is not None:
                outputs = self._in_steps(command.step, len(modes), weights, compute)
            elif not command.has_collectives:
                outputs = compute()
            elif left:
                with preserved(left):
                    outputs = self._context.execute(weights, compute)
            else:
                outputs = self._context.execute(weights, compute)
            if is_absent and not is_controller:
                return None
            if command.nccl:
                self._timeline.switch(COLLECTIVES)
                self._reduce_over_nccl(command, outputs)
            results = []
            for output, mode in zip(outputs, modes):
                if mode is None:
                    results.append(output if is_controller else None)
                else:
                    results.append(output if type(output) is np.ndarray else _array(output))
            return results

        return execute

    def _in_steps(
        self, step: Step, n_outputs: int, weights: tuple[int, ...], compute: Callable[[], list[Any]]
    ) -> list[Any]:
        """Compute outputs, and then updates that the function does not make itself."""

        def prepared() -> tuple[list[Any], tuple[int, ...]]:
            outputs = compute()
            weights = tuple(self._context.weights)  # the function may have divided the rows itself
            self.steps.prepare(step, outputs, n_outputs, weights)
            return outputs, weights

        outputs, weights = self._context.execute(weights, prepared)
        if self.steps.lacks_places:
            self._context.execute(weights, lambda: self.steps.reduce(self._context))
        self.steps.carry_out()
        return outputs[:n_outputs]

    def _in_one(self, command: Call, share: Rows) -> Callable[[], list[Any]]:
        """Return a callable that computes a full shard at once."""
        run = self._run_on(command)
        rows = command.rows[self._rank] if command.rows else None
        return lambda: run(share, None if rows is None else self._row_views.rows(rows))

    def _in_slices(self, command: Call, share: Rows) -> Callable[[], list[Any]]:
        """Return a callable that computes a shard slice by slice, and then the function that follows."""
        run = self._run_on(command)
        n_points = len(share) if command.shares else command.counts[self._rank]
        updated = [self._variables[key] for key in command.updated]
        replicated = command.inputs[command.n_scattered :]

        def run_slice(part: Rows, sliced: Selection | None) -> list[Any]:
            self._context.own = len(part)
            return run(part, sliced)

        def follow(*entering: Any) -> list[Any]:
            assert command.follow is not None
            self._context.own = self._context.weights[self._rank]
            after = self.runner(command.follow.function, command.follow.output_subset)
            numbers = _numbers(command, share) if command.exact else ()
            return after([*entering, *(self._segments.view(source.array) for source in replicated), *numbers])

        def compute() -> list[Any]:
            rows = self._row_views.rows(command.rows[self._rank]) if command.rows else None
            return call_in_slices(command, n_points, run_slice, (share, rows), updated, follow)

        return compute

    def _run_on(self, command: Call) -> Callable[[Rows, Selection | None], list[Any]]:
        """Return a callable that runs the function on rows of scattered inputs and of sliceable shared variables."""
        runner = self.runner(command.function, command.output_subset)
        n_scattered, starts = command.n_scattered, command.starts
        scattered = [(source, (command.function, i)) for i, source in enumerate(command.inputs[:n_scattered])]
        replicated = [source.array for source in command.inputs[n_scattered:]]
        view, take, timeline = self._segments.view, self._row_views.take, self._timeline

        def run(part: Rows, sliced: Selection | None) -> list[Any]:
            if timeline.on:
                timeline.switch(SHUFFLE)
            if starts is None:
                values = [take(source, part, key) for source, key in scattered]
            else:
                firsts = view(starts).tolist()
                values = [take(source, part, key, first) for (source, key), first in zip(scattered, firsts)]
            for ref in replicated:
                values.append(view(ref))
            if command.exact:
                values += _numbers(command, part)
            if sliced is not None:
                values += map(np.asarray, sliced.bounds) if isinstance(sliced, Rows) else (sliced,)
            if timeline.on:
                timeline.switch(FUNCTION)
            return runner(values)

        return run

    def _reduce_over_nccl(self, command: Call, outputs: list[Any]) -> None:
        """Reduce outputs to the controller over NCCL.

        Outputs whose shapes differ between ranks stay as they are: the controller then receives all of them and raises.
        """
        nccl = self._exchange.nccl
        assert nccl is not None
        by_op: dict[Any, list[int]] = {}
        for i in command.nccl:
            by_op.setdefault(command.output_modes[i], []).append(i)
        for op, positions in by_op.items():
            weights = None if command.all_compute else command.counts
            try:
                reduced = nccl.reduce([to_device(outputs[i]) for i in positions], op, weights, command.controller)
            except ShapesDiffer:
                continue
            for i, value in zip(positions, reduced or [None] * len(positions)):
                outputs[i] = value


def _weights(command: Call) -> tuple[int, ...]:
    """Return the weight of each rank in collectives.

    The weights are the counts of data points, unless `Call.all_compute` is set: then all ranks compute without rows,
    with equal weights. In an exact function each of them has the full result, so only the controller counts.
    """
    if not command.all_compute:
        return command.counts
    return tuple(int(rank == command.controller or not command.exact) for rank in range(len(command.counts)))


def _numbers(command: Call, part: Rows) -> list[np.ndarray]:
    """Return the extra inputs of exact functions: the total row count, a part's first row, and its row count."""
    return list(map(np.asarray, (sum(command.counts), part.start, len(part))))


def _array(output: Any) -> Any:
    """Return an output as an array; some ops return NumPy scalars."""
    return output if output is None or is_device_array(output) else np.asarray(output)


def _times_of_operands(function: Any, call: Callable[[], Any], seconds: float, least: int) -> list[tuple[float, float]]:
    """Return `times_of_operands` by the medians of calls; an empty list if the backend does not time Apply nodes."""
    vm = timed_machine(function)
    if vm is None:
        return []
    before = vm.time_thunks, list(vm.call_times), list(vm.call_counts)
    found: list[list[float]] = []

    def timed() -> None:
        vm.call_times[:] = [0.0] * len(vm.nodes)
        call()
        found.append(list(vm.call_times))

    try:
        vm.time_thunks = True
        _seconds(timed, seconds, least)
    finally:
        with deferred_interrupts():
            vm.time_thunks, vm.call_times[:], vm.call_counts[:] = before
    medians = map(statistics.median, zip(*found[1:]))  # the backend may compile in the first call
    return times_of_operands(function, dict(zip(vm.nodes, medians)))


def _seconds(call: Callable[[], Any], seconds: float, least: int) -> list[float]:
    begin = time.perf_counter()
    call()
    first = time.perf_counter() - begin
    if first > seconds:
        least = min(least, _LEAST_OF_LONG if first < _LONG * seconds else 1)
    found: list[float] = []
    while len(found) < least or (len(found) < _MOST_CALLS and time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found
