"""Measurements on a rank for predictions of training steps: seconds of functions and of all-reduces, values to restore.

A `KeepValues` command copies the values of variables, so that measured calls may change them. The next one restores
them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._collectives import HostTransport
from synkhronos._memory import SegmentTable
from synkhronos._rank.commands import KeepValues, TimeFunction, TimeReduction
from synkhronos._utils.interrupts import deferred_interrupts

_MOST_CALLS = 200


class Measurements:
    """Execution of the commands that measure, on one rank.

    Parameters
    ----------
    rank : int
    variables : VariableTable
    segments : SegmentTable
    transport : HostTransport
    runner : callable
        ``runner(function, subset)`` returns a callable that computes a function from a list of arrays.
    """

    def __init__(
        self,
        rank: int,
        variables: _graph.VariableTable,
        segments: SegmentTable,
        *,
        transport: HostTransport,
        runner: Callable[[int, Any], Callable[[list[Any]], list[Any]]],
    ) -> None:
        self._rank, self._variables, self._segments = rank, variables, segments
        self._transport, self._runner = transport, runner
        self._array = np.zeros(0, np.float32)  # other ranks may read it after an error
        self._kept: list[tuple[Any, Any, Any]] = []  # variables, their values, and copies of these

    def keep(self, command: KeepValues) -> None:
        """Copy the values of variables, or restore those that were copied."""
        if command.restore:
            self.restore()
        else:
            values = [(var, _graph.get_array(var)) for var in map(self._variables.__getitem__, command.variables)]
            self._kept = [(var, value, copy.deepcopy(value)) for var, value in values]

    def restore(self) -> None:
        """Give variables the values that they had: the same arrays, which the program may hold, with the same content.

        After an interrupt, it can be repeated.
        """
        with deferred_interrupts():
            for var, value, before in self._kept:
                if isinstance(value, np.ndarray) and value.flags.writeable:
                    np.copyto(value, before)
                    before = value
                var.container.storage[0] = before
            self._kept = []

    def time_function(self, command: TimeFunction) -> list[float] | None:
        """Return the seconds of calls of a function on this rank alone; ``None`` if it does not take part.

        There are at least ``least`` calls, and more, up to `_MOST_CALLS`, until they have taken ``seconds``. One more,
        before them, is not counted, because the backend may compile then. Collectives in the function have no effect.
        """
        if self._rank not in command.ranks:
            return None
        run = self._runner(command.function, None)
        values = [np.array(self._segments.view(ref)) for ref in command.inputs]
        if command.takes_rows:
            values += map(np.asarray, (command.rows, 0, command.rows))
        cells = [self._variables[key].container.storage for key in command.sliceable]
        before = [cell[0] for cell in cells]
        try:
            for cell, value in zip(cells, before):
                cell[0] = np.take(value, np.resize(np.arange(len(value)), command.rows), axis=0)
            return _seconds(lambda: run(list(values)), command.seconds, command.least)
        finally:
            with deferred_interrupts():
                for cell, value in zip(cells, before):
                    cell[0] = value

    def time_reduction(self, command: TimeReduction) -> list[float]:
        """Return the seconds of all-reduces of an array of float32, on this node or on all."""
        self._array = array = np.zeros(command.n_bytes // 4, np.float32)
        seconds = []
        for _ in range(command.repetitions):
            self._transport.barrier()
            start = time.perf_counter()
            if command.on_node:
                self._transport.all_reduce_on_node([array], "max")
            else:
                self._transport.all_reduce([array], "max", None)
            seconds.append(time.perf_counter() - start)
        return seconds


def _seconds(call: Callable[[], Any], seconds: float, least: int) -> list[float]:
    begin = time.perf_counter()
    call()
    found: list[float] = []
    while len(found) < least or (len(found) < _MOST_CALLS and time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found
