"""The flag by which ranks are told that one of them has failed, on all machines."""

from __future__ import annotations

from synkhronos._nodes.line import Line
from synkhronos._processes import Team

__all__ = ["FleetSignals"]


class FleetSignals:
    """What the dispatcher asks of `Signals`, for all machines."""

    def __init__(self, team: Team, line: Line) -> None:
        self._signals, self._line = team.signals, line
        self.reset = team.signals.reset

    @property
    def aborted(self) -> bool:
        return self._signals.aborted

    def abort(self) -> None:
        self._line.abort()
        self._signals.abort()
