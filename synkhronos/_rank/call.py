"""A rank without data points in a function that has collectives: it takes part, for the others would wait.

It computes on a row of another rank's (of sliceable shared variables, on its own first one), is left out of every
collective, and stores only what comes of these: what is the same on all ranks.

A call in slices: each rank computes its share piece by piece, from the values before the call.

How one rank calls a function: on its share of the data, in slices, and with the other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._backends import is_device_array, to_device, to_host
from synkhronos._collectives import Accumulator, DeviceAccumulator, ShapesDiffer, accumulates
from synkhronos._graph.ops import Standing
from synkhronos._memory import SegmentTable
from synkhronos._processes import COLLECTIVES, FUNCTION, SHUFFLE, Team
from synkhronos._rank.collective_handlers import Exchange
from synkhronos._rank.commands import Call
from synkhronos._rank.results import Excerpts
from synkhronos._utils.rows import Rows, Selection, pieces, take

__all__ = ["Caller", "borrowed", "call_in_slices", "kept"]


def borrowed(call: Call) -> Rows:
    """A row of the first rank that has any, of the scattered inputs; none if there are none."""
    for share in call.shares or ():
        if len(share):
            return Rows(share.start, share.start + 1)
    return Rows(0, 0)


@contextlib.contextmanager
def kept(variables: Sequence[Any]) -> Iterator[None]:
    """Leave shared variables as they are, whatever is computed meanwhile."""
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
    """Compute in pieces, accumulate, apply the updates once, and do what follows; returns the outputs.

    Parameters
    ----------
    call : Call
    n_points : int
        How many data points there are.
    run : callable
        ``run(part, some)`` computes on rows of the scattered inputs, and of the sliceable shared variables.
    rows : tuple
        This rank's rows of both.
    updated : list of shared variables
        Those whose new values the function returns after its outputs.
    follow : callable
        ``follow(*entering)`` gives the outputs of the function in `Call.follow`.
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
    if call.follow is not None:  # from the values before the call, too
        n_local = len(modes) - call.follow.n_entering
        results[n_local:] = follow(*map(to_host, results[n_local:]))
        results = [results[i] for i in call.follow.order]
    for var, value in zip(updated, values):
        _graph.set_array(var, value)
    return results


def _accumulator(result: Any, mode: str, total: int, name: str, dtype: np.dtype | None) -> Any:
    """What accumulates results like this one: on the device where they are there and it can."""
    if is_device_array(result) and accumulates(result.dtype, mode, dtype):
        return DeviceAccumulator(mode, total, name)
    return Accumulator(mode, total, name, dtype)


class Caller:
    """Calls functions on one rank.

    Parameters
    ----------
    team : Team
    functions : dict
        By key.
    segments : SegmentTable
    excerpts : Excerpts
    exchange : Exchange
    """

    def __init__(
        self, team: Team, functions: dict[int, Any], segments: SegmentTable, excerpts: Excerpts, *, exchange: Exchange
    ) -> None:
        self._rank = team.world.first + team.rank
        self._is_master = self._rank == team.world.master_rank
        self._functions = functions
        self._ready: dict[int, tuple[Call, Callable[[], list[Any] | None]]] = {}  # by function
        self._runners: dict[tuple[int, tuple[int, ...] | None], Callable[[list[Any]], list[Any]]] = {}
        self._segments = segments
        self._excerpts = excerpts
        self._exchange = exchange
        self._variables = exchange.variables
        self._timeline = team.timeline
        world = team.world
        self._standing = Standing(self._rank, world.n_ranks, world.master_rank, exchange.transport, team.timeline)

    def call(self, command: Call) -> list[Any] | None:
        """Call a function on this rank's share; returns its outputs, ``None`` where a rank has none to give.

        What a command asks of this rank is made out once, when the command differs from the last one of its function.
        """
        last, execute = self._ready.get(command.function, (None, None))
        if execute is None or last is not command:
            execute = self._prepare(command)
            self._ready[command.function] = command, execute
        return execute()

    def forget(self, function: int) -> None:
        """The function is dropped, and maybe others that are called with it."""
        self._ready.clear()
        self._runners = {key: runner for key, runner in self._runners.items() if key[0] != function}

    def _runner(self, function: int, subset: tuple[int, ...] | None) -> Callable[[list[Any]], list[Any]]:
        """What calls a function for some of its outputs."""
        key = function, subset
        if key not in self._runners:
            self._runners[key] = _graph.run_function(self._functions[function], subset)
        return self._runners[key]

    def _prepare(self, command: Call) -> Callable[[], list[Any] | None]:
        """What executes a command, again and again."""
        is_absent = not (command.counts[self._rank] or command.everybody or command.exact)
        if is_absent and not command.meets:
            return lambda: None
        share = borrowed(command) if is_absent else command.shares[self._rank] if command.shares else Rows(0, 0)
        compute = self._in_one(command, share) if command.num_slices == 1 else self._in_slices(command, share)
        left = [self._variables[key] for key in command.kept] if is_absent else []
        is_master, modes = self._is_master, command.output_modes
        weights = _weights(command)

        def execute() -> list[Any] | None:
            if not command.meets:
                outputs = compute()
            elif left:
                with kept(left):
                    outputs = self._standing.execute(weights, compute)
            else:
                outputs = self._standing.execute(weights, compute)
            if is_absent and not is_master:
                return None
            if command.nccl:
                self._timeline.switch(COLLECTIVES)
                self._reduce_over_nccl(command, outputs)
            results = []
            for output, mode in zip(outputs, modes):
                if mode is None:
                    results.append(output if is_master else None)
                else:
                    results.append(output if type(output) is np.ndarray else _array(output))
            return results

        return execute

    def _in_one(self, command: Call, share: Rows) -> Callable[[], list[Any]]:
        """What computes a whole share at once."""
        run = self._run_on(command)
        rows = command.rows[self._rank] if command.rows else None
        return lambda: run(share, None if rows is None else self._excerpts.rows(rows))

    def _in_slices(self, command: Call, share: Rows) -> Callable[[], list[Any]]:
        """What computes a share slice by slice, and then what follows."""
        run = self._run_on(command)
        n_points = len(share) if command.shares else command.counts[self._rank]
        updated = [self._variables[key] for key in command.updated]
        whole = command.inputs[command.n_scattered :]

        def run_slice(part: Rows, sliced: Selection | None) -> list[Any]:
            self._standing.own = len(part)
            return run(part, sliced)

        def follow(*entering: Any) -> list[Any]:
            assert command.follow is not None
            self._standing.own = self._standing.weights[self._rank]
            after = self._runner(command.follow.function, command.follow.output_subset)
            numbers = _numbers(command, share) if command.exact else ()
            return after([*entering, *(self._segments.view(source.array) for source in whole), *numbers])

        def compute() -> list[Any]:
            rows = self._excerpts.rows(command.rows[self._rank]) if command.rows else None
            return call_in_slices(command, n_points, run_slice, (share, rows), updated, follow)

        return compute

    def _run_on(self, command: Call) -> Callable[[Rows, Selection | None], list[Any]]:
        """What calls the function on rows of the scattered inputs, and of the sliceable shared variables."""
        runner = self._runner(command.function, command.output_subset)
        n_scattered, starts = command.n_scattered, command.starts
        scattered = [(source, (command.function, i)) for i, source in enumerate(command.inputs[:n_scattered])]
        whole = [source.array for source in command.inputs[n_scattered:]]
        view, take, switch = self._segments.view, self._excerpts.take, self._timeline.switch

        def run(part: Rows, sliced: Selection | None) -> list[Any]:
            switch(SHUFFLE)
            if starts is None:
                values = [take(source, part, key) for source, key in scattered]
            else:
                firsts = view(starts).tolist()
                values = [take(source, part, key, first) for (source, key), first in zip(scattered, firsts)]
            for ref in whole:
                values.append(view(ref))
            if command.exact:
                values += _numbers(command, part)
            if sliced is not None:
                values += map(np.asarray, sliced.bounds) if isinstance(sliced, Rows) else (sliced,)
            switch(FUNCTION)
            return runner(values)

        return run

    def _reduce_over_nccl(self, command: Call, outputs: list[Any]) -> None:
        """Reduce outputs to the master, where their shapes allow it; else the master will get, and refuse, them all."""
        nccl = self._exchange.nccl
        assert nccl is not None
        by_op: dict[Any, list[int]] = {}
        for i in command.nccl:
            by_op.setdefault(command.output_modes[i], []).append(i)
        for op, positions in by_op.items():
            weights = None if command.everybody else command.counts
            try:
                reduced = nccl.reduce([to_device(outputs[i]) for i in positions], op, weights, command.master)
            except ShapesDiffer:
                continue
            for i, value in zip(positions, reduced or [None] * len(positions)):
                outputs[i] = value


def _weights(command: Call) -> tuple[int, ...]:
    """By which ranks count in collectives. Of no rows all do alike; but of an exact function each has the whole."""
    if not command.everybody:
        return command.counts
    return tuple(int(rank == command.master or not command.exact) for rank in range(len(command.counts)))


def _numbers(command: Call, part: Rows) -> list[np.ndarray]:
    """What exact functions are told: how many rows there are, the first one of a part, how many it has."""
    return list(map(np.asarray, (sum(command.counts), part.start, len(part))))


def _array(output: Any) -> Any:
    """An output as an array: outputs that are scalars come as such from some ops."""
    return output if output is None or is_device_array(output) else np.asarray(output)
