"""The processes of a session: forked, signalled, watched and stopped; they know neither graphs nor commands."""

from __future__ import annotations

from synkhronos._team.board import Sight
from synkhronos._team.log import log
from synkhronos._team.signals import Barrier
from synkhronos._team.team import Team
from synkhronos._team.timeline import (
    CATEGORIES,
    COLLECTIVES,
    CONTROL,
    FUNCTION,
    SHUFFLE,
    TRANSFERS,
    Notes,
    Timeline,
    spans,
)

__all__ = [
    "CATEGORIES",
    "COLLECTIVES",
    "CONTROL",
    "FUNCTION",
    "SHUFFLE",
    "TRANSFERS",
    "Barrier",
    "Notes",
    "Sight",
    "Team",
    "Timeline",
    "log",
    "spans",
]
