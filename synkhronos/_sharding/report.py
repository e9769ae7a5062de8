"""Report of the collectives of an exact function (``f.partition``): a table, and a drawing of the graph by Graphviz."""

from __future__ import annotations

import collections
import html
import math
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._backends import Constant, TensorType, io_toposort
from synkhronos._graph.ops import UNNUMBERED, collectives_of
from synkhronos._sharding.placements import Partial, Shard, line_of
from synkhronos._sharding.propagate import Propagation
from synkhronos._sharding.rank_ops import CollectiveRecord

_PRODUCTS = ("Dot", "BatchedDot", "AbstractConv")  # beginnings of the names of operations
_HOW = {"rows": "by rows", "sum over rows": "as a sum over rows", "in full": "in full"}
_MOST_NAMES = 8
_TITLES = ("meeting", "collective", "variable", "bytes", "line", "why")


class Entry(NamedTuple):
    """One collective of an exact function.

    Attributes
    ----------
    collective : str
        ``"all-reduce (sum)"``, ``"all-gather"``, …; ``"sum in slices"`` for a gradient that each rank adds only in the
        range of elements that it updates; ``"product in slices (up to N rows)"`` for one that each rank computes in its
        range from all ranks' rows, if there are at most N.
    variable : str
        The variable that is reduced or gathered, as the backend names it.
    n_bytes : int or None
        Size of the result on each rank in bytes, as it was in the first call. Before that call and in loops, it is
        known only if all axes of the variable are broadcastable.
    line : str
        The line of the program that created the variable: file, number and text; empty if it is not known.
    reason : str
        Why the variable is gathered.
    meeting : int or None
        Collectives with the same number run together, in the order of the numbers; ``None`` in loops, and if the graph
        was not optimized.
    pieces : tuple of int
        On several nodes: numbers of the pieces in which the variable was exchanged while later ones were computed, in
        the last call. Variables with equal numbers share a piece. Empty if it was exchanged when all existed.
    """

    collective: str
    variable: str
    n_bytes: int | None
    line: str
    reason: str
    meeting: int | None
    pieces: tuple[int, ...] = ()


class Division(NamedTuple):
    """How the ranks divide a product of matrices, or a convolution, with the plan ``"rows"``.

    Attributes
    ----------
    variable : str
        The result, as the backend names it.
    how : str
        ``"rows"``: each rank computes its rows of the result. ``"sum over rows"``: each rank computes an array of the
        full shape from its rows, and these are added. ``"in full"``: each rank computes the full result, because no
        operand has rows, or the rows were gathered.
    line : str
        As for `Entry`.
    """

    variable: str
    how: str
    line: str


class Prediction(NamedTuple):
    """Predicted seconds of a call with each plan.

    Attributes
    ----------
    n_rows : int
        Number of rows, rounded: nearby numbers have one prediction. 0 for a function without scattered inputs.
    rows, controller : float
        Seconds if every rank computes its rows, and if the controller computes all; ``controller`` is infinite if the
        plan is clear without it.
    source : str
        ``"model"``: the cost model; ``"timed"``: measured times of the function; ``"unknown"``: the model lacks an
        operation, and the function cannot be timed, so ``controller`` is infinite.
    """

    n_rows: int
    rows: float
    controller: float
    source: str

    def __str__(self) -> str:
        of = f"plan of about {self.n_rows} rows" if self.n_rows else "plan"
        if self.source == "unknown":
            return f"{of}: rows; times are unknown"
        if math.isinf(self.controller):
            return f"{of}: rows; rows {1e3 * self.rows:.3g} ms ({self.source}), many times as long as a command"
        plan = "controller" if self.controller <= self.rows else "rows"
        times = f"rows {1e3 * self.rows:.3g} ms, controller {1e3 * self.controller:.3g} ms"
        return f"{of}: {plan}; {times} ({self.source})"


class Partition(list):
    """The collectives of an exact function, as it is executed with the plan ``"rows"``: a list of `Entry`.

    Equal collectives are merged, and those that do not depend on each other run together.

    Parameters
    ----------
    collectives : list of CollectiveRecord
        Labeled by their positions; see `label`.
    compiled : compiled function
    draw : callable
        ``draw(path)`` draws the graph.
    plans : list of Prediction
    products : list of Division
    updates : list of str
    sums : list of (CollectiveRecord, str, int)
        All-reduces in whose place each rank computes a range of elements, with how it does it, and the bytes of arrays.

    Attributes
    ----------
    plans : list of Prediction
        One for each number of rows for which the plan was chosen by cost, in the order of the calls.
    products : list of Division
        How the matrix products and convolutions of the program's graph are divided.
    updates : list of str
        Names of the variables that are updated by slices.
    """

    def __init__(
        self,
        collectives: Sequence[CollectiveRecord],
        compiled: Any,
        draw: Callable[[str], None],
        *,
        plans: Sequence[Prediction],
        products: Sequence[Division],
        updates: Sequence[str],
        sums: Sequence[tuple[CollectiveRecord, str, int]],
    ) -> None:
        super().__init__()
        self.plans, self.products, self.updates = list(plans), list(products), list(updates)
        self._draw = draw
        for op in collectives_of(compiled):
            sizes = op.n_bytes or (None,) * len(op.labels)
            number = None if op.number == UNNUMBERED else op.number  # the graph was not optimized
            pieces = op.pieces or ((),) * len(op.labels)
            self += [
                _entry(collectives[label], n_bytes, number)._replace(pieces=some)
                for label, n_bytes, some in zip(op.labels, sizes, pieces)
            ]
        self += [_entry(one, None, None) for one in collectives if one.is_in_loop]
        self += [_entry(one._replace(kind=kind), n_bytes, None) for one, kind, n_bytes in sums]

    def picture(self, path: str) -> None:
        """Draw the program's graph, colored by the placement of each value, with its collectives.

        Parameters
        ----------
        path : str
            Path of the file. Its suffix selects the format: ``".dot"`` (text), or a format of Graphviz, such as
            ``".svg"``.

        Raises
        ------
        RuntimeError
            If Graphviz is needed and is not installed, or fails.
        """
        self._draw(str(path))

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table. It has a column of pieces if there are any."""
        rows: list[tuple[str, ...]] = [_TITLES]
        rows += [tuple("" if cell is None else str(cell) for cell in (one.meeting, *one[:-2])) for one in self]
        if any(one.pieces for one in self):
            cells = ["pieces", *(f"{min(one.pieces)}-{max(one.pieces)}" if one.pieces else "" for one in self)]
            rows = [(*row[:-2], cell, *row[-2:]) for row, cell in zip(rows, cells)]
        return rows

    def _sum(self) -> str:
        sizes = [one.n_bytes for one in self]
        n_meetings = len({one.meeting for one in self} - {None})
        known = sum(size for size in sizes if size is not None)
        more = ", and what is not known: before the first call, and in loops" if None in sizes else ""
        return f"collectives: {len(self)}; meetings: {n_meetings}; bytes: {known}{more}"

    def _more(self) -> list[str]:
        """Return the lines below the table."""
        counts = collections.Counter(one.how for one in self.products)
        lines = []
        if counts:
            lines.append("products and convolutions: " + ", ".join(f"{n} {_HOW[how]}" for how, n in counts.items()))
        if self.updates:
            names = ", ".join(self.updates[:_MOST_NAMES])
            more = f" and {len(self.updates) - _MOST_NAMES} others" if len(self.updates) > _MOST_NAMES else ""
            lines.append(f"updated by slices: {names}{more}")
        return [*lines, *map(str, self.plans)]

    def __repr__(self) -> str:
        if not self:
            return "\n".join(["no collectives", *self._more()])
        rows = self._rows()
        widths = [min(40, max(map(len, column))) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, self._sum(), *self._more()])

    def _repr_html_(self) -> str:
        def cells(row: tuple[str, ...], kind: str) -> str:
            return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row) + "</tr>"

        titles, *rows = self._rows()
        body = cells(titles, "th") + "".join(cells(row, "td") for row in rows)
        more = "".join(f"<div>{html.escape(one)}</div>" for one in self._more())
        return f"<table><caption>{self._sum()}</caption>{body}</table>{more}"


def _entry(one: CollectiveRecord, n_bytes: int | None, meeting: int | None) -> Entry:
    size = _n_bytes(one.variable) if n_bytes is None else n_bytes
    return Entry(one.kind, str(one.variable), size, line_of(one.variable), one.reason, meeting)


def products_of(propagation: Propagation, outputs: Sequence[Any]) -> list[Division]:
    """Return how the products and convolutions are divided in the user's graph that computes some variables."""
    found = []
    for node in io_toposort([], list(outputs)):
        op = getattr(node.op, "core_op", node.op)
        if type(op).__name__.startswith(_PRODUCTS) and propagation.knows(node.outputs[0]):
            placement = propagation.placement(node.outputs[0])
            how = "rows" if isinstance(placement, Shard) else "in full"
            how = "sum over rows" if isinstance(placement, Partial) else how
            found.append(Division(str(node.outputs[0]), how, line_of(node.outputs[0])))
    return found


def _n_bytes(variable: Any) -> int | None:
    """Return the size in bytes of a variable with broadcastable axes only, else ``None``."""
    is_known = isinstance(variable.type, TensorType) and all(variable.broadcastable)
    return int(np.dtype(variable.dtype).itemsize) if is_known else None


_COLOURS = {"replicated": "#e0e0e0", "sharded": "#9ecae1", "partial": "#fdd0a2"}
_MEETING = "#cb181d"


def draw(propagation: Propagation, outputs: Sequence[Any], path: str) -> None:
    """Draw the graph that computes some variables.

    Parameters
    ----------
    propagation : Propagation
        The propagation through this graph.
    outputs : sequence of variables
        Variables of the user's graph.
    path : str
        See `Partition.picture`.

    Raises
    ------
    RuntimeError
        If Graphviz is needed and is not installed, or fails.
    """
    text = "\n".join(_lines(propagation, outputs)) + "\n"
    kind = os.path.splitext(path)[1].lstrip(".") or "dot"
    if kind == "dot":
        with open(path, "w") as file:
            file.write(text)
        return
    program = shutil.which("dot")
    if program is None:
        raise RuntimeError(
            f"picture: {path} needs the program dot of Graphviz (apt install graphviz), which was not found; a "
            "path that ends in .dot does not need it"
        )
    done = subprocess.run([program, f"-T{kind}", "-o", path], input=text, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"picture: dot failed for {path}: {done.stderr.strip()}")


def _lines(propagation: Propagation, outputs: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of the drawing in Graphviz's DOT language."""
    yield 'digraph partition {\nnode [style=filled, fontname="sans-serif", shape=box];'
    for what, colour in _COLOURS.items():
        yield f'"{what}" [fillcolor="{colour}"];'
    yield f'"ranks meet" [fillcolor=white, color="{_MEETING}", penwidth=3];'
    kinds = {one.variable: one.kind for one in propagation.collectives}
    names: dict[Any, str] = {}
    # and the variables whose partial inputs are all reduced, which are no longer partial
    reduced: set[Any] = set(kinds)

    def box(title: str, variable: Any) -> str:
        meeting, colour = kinds.get(variable, ""), _COLOURS.get(_kind(propagation, variable, kinds, reduced), "white")
        lines = [title, str(variable.name) if variable.name and variable.name != title else "", meeting]
        label = "\\n".join(line.replace("\\", "").replace('"', "'") for line in lines if line)
        border = f', color="{_MEETING}", penwidth=3' if meeting else ""
        return f'{names[variable]} [label="{label}", fillcolor="{colour}"{border}];'

    for node in io_toposort([], list(outputs)):
        known = filter(propagation.knows, node.inputs)
        sums = [one for one in known if isinstance(propagation.placement(one), Partial)]
        if sums and reduced.issuperset(sums):
            reduced.update(node.outputs)
        for variable in node.inputs:
            if variable.owner is None and variable not in names and not isinstance(variable, Constant):
                names[variable] = f"v{len(names)}"
                yield box(str(variable), variable)
        own = f"v{len(names)}"
        names.update(dict.fromkeys(node.outputs, own))
        names[node] = own
        yield box(str(node.op), node.outputs[0])
        yield from (f"{names[one]} -> {own};" for one in node.inputs if one in names)
    yield "}"


def _kind(propagation: Propagation, variable: Any, kinds: dict[Any, str], reduced: set[Any]) -> str:
    """Return the legend entry for a value's placement, before it is reduced."""
    if not propagation.knows(variable):
        return ""
    placement = propagation.placement(variable)
    if isinstance(placement, Shard):
        return "sharded"
    is_partial = isinstance(placement, Partial) and (variable in kinds or variable not in reduced)
    return "partial" if is_partial else "replicated"
