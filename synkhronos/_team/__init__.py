"""The processes of a session: forked, signalled, watched and stopped; they know neither graphs nor commands."""

from __future__ import annotations

from synkhronos._team.board import Sight
from synkhronos._team.lifeline import end_with, start_apart
from synkhronos._team.log import log
from synkhronos._team.overdue import check_exchange, check_machines
from synkhronos._team.patience import Patience
from synkhronos._team.signals import Barrier
from synkhronos._team.team import Team
from synkhronos._team.timeline import (
    CATEGORIES,
    COLLECTIVES,
    CONTROL,
    FUNCTION,
    OUTSIDE,
    SHUFFLE,
    STRAGGLING,
    TRANSFERS,
    Notes,
    Timeline,
    by_other_clock,
    spans,
)
from synkhronos._team.world import World, kind_of

__all__ = [
    "CATEGORIES",
    "COLLECTIVES",
    "CONTROL",
    "FUNCTION",
    "OUTSIDE",
    "SHUFFLE",
    "STRAGGLING",
    "TRANSFERS",
    "Barrier",
    "Notes",
    "Patience",
    "Sight",
    "Team",
    "Timeline",
    "World",
    "by_other_clock",
    "check_exchange",
    "check_machines",
    "end_with",
    "kind_of",
    "log",
    "spans",
    "start_apart",
]
