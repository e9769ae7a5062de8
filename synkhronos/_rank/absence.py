"""A rank without data points in a function that has collectives: it takes part, for the others would wait.

It computes on a row of another rank's (of sliceable shared variables, on its own first one), is left out of every
collective, and stores only what comes of these: what is the same on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from synkhronos import _graph
from synkhronos._rank.commands import Call
from synkhronos._utils.rows import Rows

__all__ = ["borrowed", "kept"]


def borrowed(call: Call) -> Rows:
    """A row of the first rank that has any, of the scattered inputs; none if there are none."""
    for share in call.shares or ():
        if len(share):
            return Rows(share.start, share.start + 1)
    return Rows(0, 0)


@contextlib.contextmanager
def kept(variables: Sequence[Any]) -> Iterator[None]:
    """Leave shared variables as they are, whatever is computed meanwhile."""
    values = [_graph.get_array(var).copy() for var in variables]
    try:
        yield
    finally:
        for var, value in zip(variables, values):
            _graph.set_array(var, value)
