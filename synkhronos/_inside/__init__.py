"""Collectives inside a function: the ops, what they must know at run time, and what the optimizer makes of them."""

from __future__ import annotations

from synkhronos._inside.controller import broadcast_outputs
from synkhronos._inside.counting import Counted
from synkhronos._inside.cutting import Cut, cut
from synkhronos._inside.expressions import averaged, gathered, reduced, summed
from synkhronos._inside.looking import (
    after_meetings,
    collectives_of,
    depends_on,
    expresses_meetings,
    meets,
    meets_in_a_loop,
)
from synkhronos._inside.ops import UNNUMBERED, Collective
from synkhronos._inside.standing import Standing

__all__ = [
    "UNNUMBERED",
    "Collective",
    "Counted",
    "Cut",
    "Standing",
    "after_meetings",
    "averaged",
    "broadcast_outputs",
    "collectives_of",
    "cut",
    "depends_on",
    "expresses_meetings",
    "gathered",
    "meets",
    "meets_in_a_loop",
    "reduced",
    "summed",
]
