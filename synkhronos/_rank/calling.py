"""How one rank calls a function: on its share of the data, in slices, and with the other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos import _graphs
from synkhronos._collectives import ShapesDiffer
from synkhronos._inside import Standing
from synkhronos._memory import SegmentTable
from synkhronos._partition import Rows, Selection
from synkhronos._rank.absence import borrowed, kept
from synkhronos._rank.commands import Call
from synkhronos._rank.excerpts import Excerpts
from synkhronos._rank.exchange import Exchange
from synkhronos._rank.slices import call_in_slices
from synkhronos._team import COLLECTIVES, FUNCTION, SHUFFLE, Team

__all__ = ["Caller"]


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
        self._rank = team.rank
        self._is_master = team.rank == team.master_rank
        self._functions = functions
        self._segments = segments
        self._excerpts = excerpts
        self._exchange = exchange
        self._variables = exchange.variables
        self._timeline = team.timeline
        self._standing = Standing(
            team.rank, team.n_ranks, exchange.transport, team.timeline, tells=team.rank == team.master_rank
        )

    def call(self, command: Call) -> list[Any] | None:
        """Call a function on this rank's share; returns its outputs, ``None`` where a rank has none to give."""
        is_absent = not (command.counts[self._rank] or command.everybody or command.exact)
        if is_absent and not command.meets:
            return None
        function = self._functions[command.function]
        share = borrowed(command) if is_absent else command.shares[self._rank] if command.shares else Rows(0, 0)
        rows = self._excerpts.rows(command.rows[self._rank]) if command.rows else None
        n_scattered = command.n_scattered
        scattered = command.inputs[:n_scattered]
        whole = [self._segments.view(source.array) for source in command.inputs[n_scattered:]]
        subset = None if command.output_subset is None else list(command.output_subset)

        def numbers(part: Rows) -> tuple[int, ...]:
            return sum(command.counts), part.start, len(part)

        def run(part: Rows, sliced: Selection | None) -> list[Any]:
            self._timeline.switch(SHUFFLE)
            inputs = [self._excerpts.view(source, part, (command.function, i)) for i, source in enumerate(scattered)]
            extra: tuple[Any, ...] = () if sliced is None else sliced.bounds if isinstance(sliced, Rows) else (sliced,)
            if command.exact:
                extra = (*numbers(part), *extra)
            self._timeline.switch(FUNCTION)
            if command.num_slices > 1:
                self._standing.own = len(part)
            return function(*inputs, *whole, *extra, output_subset=subset)

        def follow(*entering: Any) -> list[Any]:
            assert command.follow is not None
            some = command.follow.output_subset
            of_these = None if some is None else list(some)
            self._standing.own = self._standing.weights[self._rank]
            extra = numbers(share) if command.exact else ()
            return self._functions[command.follow.function](*entering, *whole, *extra, output_subset=of_these)

        def compute() -> list[Any]:
            if command.num_slices == 1:
                return run(share, rows)
            n_points = len(share) if command.shares else command.counts[self._rank]
            updated = [self._variables[key] for key in command.updated]
            return call_in_slices(command, n_points, run, (share, rows), updated, follow)

        if not command.meets:
            outputs = compute()
        else:
            with kept([self._variables[key] for key in command.kept] if is_absent else ()):
                outputs = self._standing.execute(command.counts, compute)
        if is_absent and not self._is_master:
            return None
        if command.nccl:
            self._timeline.switch(COLLECTIVES)
            self._reduce_over_nccl(command, outputs)
        return [
            None if mode is None and not self._is_master else output if mode is None else _array(output)
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
