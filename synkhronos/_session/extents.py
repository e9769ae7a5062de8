"""The shapes of shared variables on the ranks, as far as the master knows them without asking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos import _graph
from synkhronos._rank import AllReduce, Call, Command, Digest, Get, InOrder, Record, Reduce, Replica, Settle, Shapes
from synkhronos._session.parts import Sequencer

__all__ = ["Extents"]

#: What changes no shapes; a `Call` changes those of the variables that it updates.
_KEEPING = (AllReduce, Digest, Get, Record, Reduce, Settle, Shapes)


class Extents:
    """Shapes are asked for once, and known until a command may have changed them, or the master's own differ.

    Workers that take the place of dead ones are given functions, and that is such a command.

    Parameters
    ----------
    sequencer : Sequencer
    replica : Replica
        The master's.
    master_rank : int
    """

    def __init__(self, sequencer: Sequencer, replica: Replica, master_rank: int) -> None:
        self._sequencer, self._replica, self._master_rank = sequencer, replica, master_rank
        self._known: dict[tuple[int, ...], list[list[tuple[int, ...]]]] = {}

    def of(self, variables: Sequence[Any]) -> list[list[tuple[int, ...]]]:
        """For each rank, the shapes of shared variables there."""
        self._sequencer.check_first(Shapes.__name__)
        keys = self._replica.variables.keys_of(variables)
        known = self._known.get(keys)
        if known is None or known[self._master_rank] != [_graph.get_array(var).shape for var in variables]:
            known = self._known[keys] = self._sequencer.run(Shapes(keys))
        return known

    def see(self, command: Command) -> None:
        """Forget what a command may change."""
        for part in command.parts if isinstance(command, InOrder) else (command,):
            if not self._known:
                return
            if isinstance(part, Call):
                changed = self._updated(part)
                self._known = {keys: shapes for keys, shapes in self._known.items() if changed.isdisjoint(keys)}
            elif not isinstance(part, _KEEPING):
                self._known = {}

    def _updated(self, call: Call) -> set[Any]:
        keys = (call.function, *(() if call.follow is None else (call.follow.function,)))
        functions = [self._replica.functions[key] for key in keys]
        updated = [var for function in functions for var in _graph.updated_variables(function)]
        return {*call.updated, *map(self._replica.variables.key, updated)}
