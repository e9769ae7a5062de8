"""Calls that differ from the last one in nothing but the contents of arrays: what these ask of the ranks is known.

The contents are those of `Data`, which each rank reads for itself, and those of what is staged: NumPy inputs, index
lists, and where slices begin. What is staged is overwritten by whatever any thread stages next, so it is staged anew
for each call, in the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._calls.arguments import Input
from synkhronos._calls.selecting import choose
from synkhronos._data import Data
from synkhronos._memory import ArrayRef
from synkhronos._rank import Call
from synkhronos._session import Session
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.rows import Rows, Selection

__all__ = ["LastCall", "Sight", "look_at"]


class Sight(NamedTuple):
    """A call as far as it can be repeated: all that it depends on, and what is staged for it."""

    signature: tuple[Any, ...]
    contents: Sequence[np.ndarray]


def look_at(values: Sequence[Any], batch: Any, scattered: Sequence[Input], *options: Any) -> Sight | None:
    """What a call depends on; ``None`` if there is more to look into.

    Parameters
    ----------
    values : sequence
        The inputs.
    batch : Any
        As given by the user.
    scattered : sequence of Input
        The first ones, which `batch` is for.
    *options : hashable
        What else was asked for.
    """
    picks = batch is not None and type(batch) is not int
    if picks and not (scattered and isinstance(batch, (slice, list, np.ndarray))):
        return None
    signature: list[Any] = [*options, type(batch) if picks else batch]
    contents: list[np.ndarray] = []
    for value in values:
        if isinstance(value, Data):
            signature += value.ref, value.minibatch
        elif type(value) is np.ndarray and batch is None:
            signature += value.shape, value.dtype
            contents.append(value)
        else:
            return None
    if picks:
        selected: dict[int, Selection] = {}
        lists: list[np.ndarray] = []
        starts = [0] * len(scattered)
        moves = False
        for i, one in enumerate(scattered):
            try:
                rows = choose(values[i], batch, selected, one)
            except (TypeError, ValueError, IndexError) as error:  # which whoever plans the call will raise
                let_interrupts_pass(error)
                return None
            signature.append(len(rows))
            if isinstance(rows, Rows):
                starts[i], moves = rows.start, True
            else:
                if not any(rows is other for other in lists):
                    lists.append(rows)
                signature.append(("list", next(place for place, other in enumerate(lists) if rows is other)))
        contents = [*lists, *contents]
        if moves and type(batch) is slice:
            contents.append(np.array(starts, np.int64))
    return Sight(tuple(signature), contents)


class LastCall:
    """The last call of a function, to be given again."""

    def __init__(self) -> None:
        self._signature: tuple[Any, ...] | None = None
        self._call: Call | None = None
        self._refs: Sequence[ArrayRef] = ()
        self._rows: list[Selection] | None = None

    def keep(self, sight: Sight | None, call: Call, refs: Sequence[ArrayRef], rows: list[Selection] | None) -> None:
        """Remember a call, where what it needs was staged, and the rows of the sliceable shared variables."""
        self._signature = None if sight is None else sight.signature
        self._call, self._refs, self._rows = call, refs, rows

    def find(self, session: Session, sight: Sight) -> tuple[Call | None, list[Selection] | None]:
        """The last call and its rows if it was like this one, with what it needs staged anew, in the same places."""
        if sight.signature == self._signature and (not sight.contents or session.restage(self._refs, sight.contents)):
            return self._call, self._rows
        return None, None
