"""A graph in two, for calls in slices: what each rank computes on its data points, and what all make of that together.

Where collectives come last, the first part can be computed slice by slice, and what enters the collectives accumulated
by their own ops: averages of averages, weighted, are averages of the whole. The second part, with the collectives and
all that follows, is then computed once; so it is no matter how many slices a rank has. What enters a collective and
needs no data point is computed there, too: a slice would be no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._backends import ancestors, clone, retyped
from synkhronos._collectives import result_dtype
from synkhronos._inside.looking import depends_on, meets_within
from synkhronos._inside.ops import Collective
from synkhronos._inside.standing import GATHER

__all__ = ["Cut", "cut"]


class Cut(NamedTuple):
    """What `cut` makes of some expressions."""

    before: list[int]  # the expressions, by position, that are computed slice by slice
    entering: list[Any]  # what enters the collectives
    ops: list[str]  # of these
    inputs: list[Any]  # variables for what comes of them
    after: dict[int, Any]  # the other expressions, of the inputs


def cut(
    expressions: Sequence[Any], names: Sequence[str], apart: Sequence[Any], common: Sequence[Any] = ()
) -> Cut | None:
    """Cut expressions where they enter collectives; ``None`` if there are none.

    Parameters
    ----------
    expressions : list of variables
    names : list of str
        What they are called in messages.
    apart : list of variables
        What is not the same on all ranks, and not in all slices.
    common : list of variables
        What is, though it is computed of that.

    Raises
    ------
    ValueError
        If collectives of data points do not come last.
    """
    nodes = {var.owner: None for var in ancestors(list(expressions)) if var.owner is not None}
    if any(meets_within(node.op) for node in nodes):
        raise ValueError("num_slices: a function with collectives in a loop cannot be computed in slices")
    collectives = [node for node in nodes if isinstance(node.op, Collective)]
    if not collectives:
        return None
    entering: dict[tuple[Any, str], Any] = {}
    replace: dict[Any, Any] = {}
    for node in collectives:
        for x, op, y in zip(node.inputs, node.op.ops, node.outputs):
            if not depends_on(x, apart, or_rank=False, but_for=common):
                continue
            if _has_collectives(x):
                raise ValueError(
                    "num_slices: a collective of this function needs data points and the result of another, which is "
                    "there when all slices are computed. Call it without slices"
                )
            if (x, op) not in entering:
                dtype = x.dtype if op == GATHER else str(result_dtype(np.dtype(x.dtype), op))
                entering[x, op] = retyped(y, dtype)()
            replace[y] = Collective((op,))(entering[x, op])
    before = [
        i for i, expression in enumerate(expressions) if depends_on(expression, apart, or_rank=False, but_for=common)
    ]
    for i in before:
        if _has_collectives(expressions[i]):
            raise ValueError(
                f"num_slices: {names[i]} needs data points and the result of a collective, which is there when all "
                "slices are computed. Call the function without slices"
            )
    rest = [i for i in range(len(expressions)) if i not in before]
    for one in common:
        if depends_on(one, apart, or_rank=False):
            replace[one] = entering[one, "max"] = one.type()
    after = clone([expressions[i] for i in rest], replace=replace, share_inputs=True)
    variables, ops = [x for x, _ in entering], [op for _, op in entering]
    return Cut(before, variables, ops, list(entering.values()), dict(zip(rest, after)))


def _has_collectives(expression: Any) -> bool:
    return any(var.owner is not None and isinstance(var.owner.op, Collective) for var in ancestors([expression]))
