"""What a user sees of a division: where ranks meet, for the sake of what, and what was computed whole."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import theano

from synkhronos._exact.lines import line_of
from synkhronos._exact.meeting import Collective

__all__ = ["Entry", "Partition"]

_TITLES = ("collective", "variable", "bytes", "line", "why")


class Entry(NamedTuple):
    """One collective of an exact function.

    Attributes
    ----------
    collective : str
        ``"all-reduce (sum)"``, ``"all-gather"``, …
    variable : str
        What is reduced or gathered, as Theano names it.
    n_bytes : int or None
        Its size in bytes on each rank, where the graph tells it.
    line : str
        The line of the program where the variable was made: file, number and text; empty where that is not known.
    reason : str
        Why something is gathered.
    """

    collective: str
    variable: str
    n_bytes: int | None
    line: str
    reason: str


class Partition(list):
    """The collectives of an exact function, in the order of the user's graph: a list of `Entry`.

    Equal ones are merged afterwards, and those that do not depend on each other meet together.
    """

    def __init__(self, collectives: Sequence[Collective]) -> None:
        super().__init__(
            Entry(one.kind, str(one.variable), _n_bytes(one.variable), line_of(one.variable), one.reason)
            for one in collectives
        )

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (one.collective, one.variable, "" if one.n_bytes is None else str(one.n_bytes), one.line, one.reason)
            for one in self
        ]

    def __repr__(self) -> str:
        if not self:
            return "no collectives"
        rows = [_TITLES, *self._rows()]
        widths = [min(40, max(len(row[i]) for row in rows)) for i in range(len(_TITLES))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        def cells(row: tuple[str, ...], kind: str) -> str:
            return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row) + "</tr>"

        return "<table>" + cells(_TITLES, "th") + "".join(cells(row, "td") for row in self._rows()) + "</table>"


def _n_bytes(variable: Any) -> int | None:
    """The size of a variable whose shape its type tells."""
    is_known = isinstance(variable.type, theano.tensor.TensorType) and all(variable.broadcastable)
    return int(np.dtype(variable.dtype).itemsize) if is_known else None
