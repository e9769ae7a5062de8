"""Scan: its steps are divided by the same rules, once it is known where the rows of its states are.

The placements of the states are found by trying: what begins in rows, or becomes that in a step, stays in rows, if each
step leaves it so; a sum over rows that steps only add to waits for the end of the loop; all other states are whole.
Each try walks over a step anew. A state gets rows once and loses them once, so that tries come to an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import ops
from synkhronos._exact.nodes import copied
from synkhronos._exact.placements import Partial, Placed, Placement, Replicate, Shard
from synkhronos._exact.rules.reductions import is_summed
from synkhronos._exact.rules.steps import Steps
from synkhronos._exact.walk import Rule, Walk

__all__ = ["RULES"]


def _scan(walk: Walk, node: Any) -> str | Sequence[Placed]:
    loop = ops.read_loop(node)
    mapped = _mapped(walk, node, loop)
    return mapped if mapped is not None else _settled(walk, node, loop).scan()


def _settled(walk: Walk, node: Any, loop: Any) -> Steps:
    """The steps, walked over with placements of the states that they keep."""
    n_gathered = len(walk.gathered)
    states = [outer for _, outer in loop.states]
    placements: list[Placement] = [_inside(walk.placement(outer)) for outer in states]
    fixed: set[int] = set()  # states that turned out to be whole
    may_wait = True
    while True:
        del walk.gathered[n_gathered:]
        steps = Steps(walk, node, loop, placements)
        rows = {i: steps.rows_of(i) for i in range(len(states)) if i not in fixed}
        changes: dict[int, Placement] = {
            i: shard for i, shard in rows.items() if shard is not None and not isinstance(placements[i], Shard)
        }
        if not changes:
            wrong = [i for i in range(len(states)) if not steps.keeps(i)]
            fixed.update(wrong)
            changes = dict.fromkeys(wrong, Replicate())
        if not changes and may_wait:
            may_wait = False
            changes = {
                i: Partial()
                for i, outer in enumerate(states)
                if i not in fixed and is_summed(outer) and not isinstance(placements[i], Shard) and steps.meets_for(i)
            }
        if not changes:
            return steps
        placements = [changes.get(i, placement) for i, placement in enumerate(placements)]


def _inside(placement: Placement) -> Placement:
    """Where the rows of one entry of a state are, or of a sequence, at first: sums are whole."""
    is_inside = isinstance(placement, Shard) and placement.axis > 0
    return placement.moved(placement.axis - 1) if is_inside else Replicate()  # type: ignore[union-attr]


def _mapped(walk: Walk, node: Any, loop: Any) -> Sequence[Placed] | None:
    """A map over the rows, whose steps are independent of each other: each rank maps its own."""
    lengths, sequences = walk.lengths, [outer for _, outer in loop.sequences]
    placements = [walk.placement(one) for one in sequences]
    shard = next((one for one in placements if isinstance(one, Shard) and one.axis == 0), None)
    if shard is None or loop.shared or loop.is_while or loop.states:
        return None
    if any(lengths.scalar(one) != shard.length for one in [loop.n_steps, *loop.lengths]):
        return None
    if any(lengths.dims(one)[0] != shard.length for one in sequences):
        return None
    here = lengths.here(shard.outer.times(shard.inner))
    inputs = [
        here,
        *(walk.part(one, shard) for one in sequences),
        *[here] * len(loop.lengths),
        *(walk.whole(outer, "what all steps of a map over rows need") for _, outer in loop.others),
    ]
    return [Placed(output, shard) for output in copied(node, inputs)]


RULES: dict[type, Rule] = {ops.Scan: _scan}
