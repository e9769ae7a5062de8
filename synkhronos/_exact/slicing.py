"""Whether a divided graph can be computed in slices: where all collectives come last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import ancestors, io_toposort, ops
from synkhronos._exact.lines import described
from synkhronos._exact.placements import Replicate
from synkhronos._exact.walk import Walk
from synkhronos._graph.ops import after_meetings

__all__ = ["why_not_sliced"]

_REMEDY = "Call it without slices, with a smaller batch"


def why_not_sliced(walk: Walk, needed: Sequence[Any], drawn: Sequence[Any], is_given: bool, random: str) -> str:
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
    random : str
        ``"serial"`` or ``"own"``, as the function was built.
    """
    if drawn:
        remedy = "" if random == "own" else ', or, if there is a draw for each row, build it with random="own"'
        return f"num_slices: {_draw_of(drawn[0], needed)} is drawn for all rows at once. {_REMEDY}{remedy}"
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


def _draw_of(state: Any, needed: Sequence[Any]) -> str:
    """Describe what is drawn from a stream, by the program's line."""
    for node in io_toposort([], list(needed)):
        if state in node.inputs:
            return described(node.outputs[-1 if type(node.op) in ops.DRAWS else 0])
    return described(state)
