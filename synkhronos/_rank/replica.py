"""What one rank holds (functions, shared variables, data), and how it executes a command on them.

The same code runs on every rank, the master included; only the master's functions are compiled rather than unpickled,
and its results are used where they are instead of being published.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _graphs
from synkhronos._collectives import ShapesDiffer, Workspace, connect
from synkhronos._core import native
from synkhronos._inside import Standing
from synkhronos._memory import Passage, SegmentRef, SegmentTable, look_at_free_memory
from synkhronos._partition import Rows, Selection
from synkhronos._rank.absence import borrowed, kept
from synkhronos._rank.commands import Bind, Call, Command, Connect, Get, Load, Record, Settle, Shapes
from synkhronos._rank.excerpts import Excerpts
from synkhronos._rank.exchange import Exchange
from synkhronos._rank.publishing import Publisher
from synkhronos._rank.slices import call_in_slices
from synkhronos._rank.threads import ThreadLimits
from synkhronos._team import COLLECTIVES, CONTROL, FUNCTION, SHUFFLE, TRANSFERS, Notes, Team

__all__ = ["Replica"]


class Replica:
    """One rank's functions, shared variables and data.

    Parameters
    ----------
    team : Team
        As this rank sees it.
    workspace : Workspace
        Where the ranks' collectives work.
    segments : SegmentTable
    variables : VariableTable
    regions : Regions
        Where this rank has its region.
    """

    def __init__(
        self,
        team: Team,
        workspace: Workspace,
        segments: SegmentTable,
        variables: _graphs.VariableTable,
        regions: native.Regions,
    ) -> None:
        self.rank = team.rank
        self.n_ranks = team.n_ranks
        self.is_master = team.rank == team.master_rank
        self.segments = segments
        self.variables = variables
        self.regions = regions
        self.functions: dict[int, Any] = {}
        self.thread_limits = ThreadLimits(team.n_ranks, quiet=not self.is_master)
        self.context: Any = None  # of the rank's GPU
        self._team = team
        self._timeline = team.timeline
        self._excerpts = Excerpts(segments)
        self._exchange = Exchange(team, workspace, variables, self._excerpts, regions=regions)
        self._standing = Standing(
            team.rank, team.n_ranks, self._exchange.transport, team.timeline, tells=self.is_master
        )
        self._publisher = Publisher(workspace, regions, team.rank)
        self.read = self._publisher.read
        self._handlers: dict[type, Callable[[Any], Any]] = {
            Settle: self._settle,
            Record: self._record,
            Bind: self._bind,
            Connect: self._connect,
            Load: self._load,
            Call: self._call,
            **self._exchange.handlers,
        }

    def describe(self, command: Command) -> str:
        """A command in a word or two: its kind, and the name of the function that it calls."""
        function = self.functions[command.function].name if isinstance(command, Call) else None
        return f"{type(command).__name__} {function or ''}".rstrip()

    def execute(self, command: Command) -> Any:
        """Carry out one command, in memory of this rank's region.

        Returns arrays for `Call`, `Get` and `Reduce`, from workers as `Arrays`, else metadata or ``None``.
        """
        if self.regions.short:
            look_at_free_memory(self.regions, self.n_ranks)
        return self.regions.call(self._execute, command)

    def _execute(self, command: Command) -> Any:
        kind = type(command)
        if self._timeline.tracing:
            self._timeline.name(self.describe(command))
        self._exchange.restart()
        self._publisher.forget()
        self._timeline.switch(COLLECTIVES if kind in self._exchange.handlers and kind is not Shapes else CONTROL)
        try:
            result = self._handlers[kind](command)
            if self.is_master or result is None or kind not in (Call, Get):
                return result
            self._timeline.switch(TRANSFERS)
            return self._publisher.publish(result)
        finally:
            self._timeline.switch(CONTROL)

    def _settle(self, command: Settle) -> None:
        if command.trim:
            self.regions.trim()

    def _record(self, command: Record) -> Notes | None:
        if not command.on:
            return self._timeline.stop()
        self._timeline.start(command.room)
        return None

    def attach(self, refs: Sequence[SegmentRef], passage: Passage) -> None:
        """Map what the master has made: all that can be mapped, before an exception for what cannot."""
        failed: Exception | None = None
        for ref in refs:
            try:
                if ref.key not in self.segments:  # it may be inherited
                    self.segments.add(ref.key, passage.map(ref))
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
            self._excerpts.forget(function)
        for variable in variables:
            self.variables.drop(variable)
        if (functions or variables) and not self.is_master:
            gc.collect()  # compiled functions are cycles, and may hold much memory

    # -- the device

    def _bind(self, command: Bind) -> None:
        self.context = _graphs.bind(command.devices[self.rank], self.rank, quiet=not self.is_master)

    def _connect(self, command: Connect) -> None:
        self._exchange.meet_in_nccl(connect(self.context, command.clique, self.n_ranks, self.rank))

    # -- functions

    def house(self, variables: Sequence[Any]) -> None:
        """Have the values of shared variables in this rank's region, from where other ranks can read them."""
        self.regions.call(self._exchange.house, variables)

    def _load(self, command: Load) -> None:
        if not self.is_master and (command.ranks is None or self.rank in command.ranks):
            bundle = _graphs.Bundle(
                self.segments.view(command.pickled).tobytes(), [self.segments.view(ref) for ref in command.buffers], {}
            )
            # 0 is the master's stream, as the user made it
            stream = 0 if command.replicate_rng else (self.rank - self._team.master_rank) % self.n_ranks
            self.functions.update(_graphs.load(bundle, self.variables, stream))
        self.thread_limits.apply()  # compiled functions may have brought a BLAS library with them

    def _call(self, command: Call) -> list[Any] | None:
        is_absent = not (command.counts[self.rank] or command.everybody or command.exact)
        if is_absent and not command.meets:
            return None
        function = self.functions[command.function]
        share = borrowed(command) if is_absent else command.shares[self.rank] if command.shares else Rows(0, 0)
        rows = self._excerpts.rows(command.rows[self.rank]) if command.rows else None
        n_scattered = command.n_scattered
        scattered = command.inputs[:n_scattered]
        whole = [self.segments.view(source.array) for source in command.inputs[n_scattered:]]
        subset = None if command.output_subset is None else list(command.output_subset)

        def run(part: Rows, sliced: Selection | None) -> list[Any]:
            self._timeline.switch(SHUFFLE)
            inputs = [self._excerpts.take(source, part, (command.function, i)) for i, source in enumerate(scattered)]
            extra: tuple[Any, ...] = () if sliced is None else sliced.bounds if isinstance(sliced, Rows) else (sliced,)
            if command.exact:
                extra = (sum(command.counts), part.start, len(part))
            self._timeline.switch(FUNCTION)
            return function(*inputs, *whole, *extra, output_subset=subset)

        def compute() -> list[Any]:
            if command.num_slices == 1:
                return run(share, rows)
            n_points = len(share) if command.shares else command.counts[self.rank]
            return call_in_slices(
                command, n_points, run, (share, rows), [self.variables[key] for key in command.updated]
            )

        if not command.meets:
            outputs = compute()
        else:
            with kept([self.variables[key] for key in command.kept] if is_absent else ()):
                outputs = self._standing.execute(command.counts, compute)
        if is_absent and not self.is_master:
            return None
        if command.nccl:
            self._timeline.switch(COLLECTIVES)
            self._reduce_over_nccl(command, outputs)
        return [
            None if mode is None and not self.is_master else output if mode is None else _array(output)
            for output, mode in zip(outputs, command.output_modes)
        ]

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
                reduced = nccl.reduce([_graphs.to_device(outputs[i]) for i in positions], op, weights, command.master)
            except ShapesDiffer:
                continue
            for i, value in zip(positions, reduced or [None] * len(positions)):
                outputs[i] = value


def _array(output: Any) -> Any:
    """An output as an array: outputs that are scalars come as such from some ops."""
    return output if output is None or _graphs.is_device_array(output) else np.asarray(output)
