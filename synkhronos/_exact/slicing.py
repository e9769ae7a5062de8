"""Whether a divided graph can be computed in slices: where all collectives come last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._engine import ancestors
from synkhronos._exact.lines import described
from synkhronos._exact.placements import Replicate
from synkhronos._exact.walk import Walk
from synkhronos._inside import after_meetings

__all__ = ["why_not_sliced"]

_REMEDY = "Call it without slices, with a smaller batch"


def why_not_sliced(walk: Walk, needed: Sequence[Any], drawn: Sequence[Any], is_given: bool) -> str:
    """What keeps a function from being computed in slices; empty if nothing does.

    Parameters
    ----------
    walk : Walk
    needed : list of variables
        What the divided graph computes.
    drawn : list of shared variables
        States of random streams that are common to all ranks.
    is_given : bool
        Whether calls tell the rows.
    """
    if drawn:
        return f'num_slices: {drawn[0]} is drawn from for all rows at once. {_REMEDY}, or build it with random="own"'
    if not is_given:
        return "num_slices: the function has no scattered inputs and variables, whose rows could be sliced"
    found, after = set(ancestors(list(needed))), after_meetings(needed)
    for variable, new in walk.items():
        if new in found and new in after and not isinstance(walk.placement(variable), Replicate):
            return (
                f"num_slices: {described(variable)} has rows, and needs what the ranks make together of all rows, "
                f"which is not there before all slices are computed. {_REMEDY}"
            )
    return ""
