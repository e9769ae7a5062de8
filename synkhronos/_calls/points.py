"""How many data points each rank computes on, and which rows of the sliceable shared variables these are."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos._calls.selecting import Selector
from synkhronos._graph import Graph
from synkhronos._session import Session
from synkhronos._utils.rows import Rows, Selection, select_per_rank

__all__ = ["count_points", "lend_rows", "rows_on_ranks", "sliceable_rows"]


def sliceable_rows(session: Session, graph: Graph, batch_s: Any, num_slices: int) -> list[Selection] | None:
    """The rows of the sliceable shared variables on each rank; ``None`` for all, as they are."""
    if not graph.sliceable_shareds:
        if batch_s is not None:
            raise ValueError("batch_s was given, but the function was built without sliceable_shareds")
        return None
    if batch_s is None and num_slices == 1:
        return None
    rows = select_per_rank(batch_s, rows_on_ranks(session, graph))
    if all(isinstance(one, Rows) for one in rows):
        return rows
    return [np.arange(*one.bounds, dtype=np.int64) if isinstance(one, Rows) else one for one in rows]


def rows_on_ranks(session: Session, graph: Graph) -> list[int]:
    """The number of rows of the sliceable shared variables on each rank, which must agree between them."""
    unknown = [var for var in graph.sliceable_shareds if session.replica.variables.key(var) is None]
    if unknown:  # a function that uses their lengths alone does not bring them to the ranks
        session.distribute_variables(unknown)
    shapes = session.shapes(graph.sliceable_shareds)
    for rank, on_rank in enumerate(shapes):
        if len({shape[0] for shape in on_rank}) > 1:
            raise ValueError(
                f"sliceable_shareds have different lengths on rank {rank}: {[shape[0] for shape in on_rank]}"
            )
    return [on_rank[0][0] for on_rank in shapes]


def count_points(
    session: Session, graph: Graph, selector: Selector, rows: list[Selection] | None, num_slices: int
) -> tuple[tuple[int, ...], bool]:
    """How many data points each rank computes on, and whether ranks without any compute all the same."""
    if selector.shares is not None:
        counts = selector.counts
        if rows is not None and num_slices > 1 and counts != tuple(map(len, rows)):
            raise ValueError(
                "num_slices: scattered inputs and sliceable shared variables are sliced together and need as many "
                f"rows on each rank; got {counts} and {tuple(map(len, rows))}"
            )
    elif rows is not None:
        counts = tuple(len(one) for one in rows)
    elif graph.sliceable_shareds:
        counts = tuple(rows_on_ranks(session, graph))
    else:
        return (1,) * session.n_ranks, False
    return counts, not any(counts)


def lend_rows(session: Session, graph: Graph, rows: list[Selection], counts: tuple[int, ...]) -> list[Selection]:
    """The rows, but for ranks without data points that pick none: their own first one, on which they can compute."""
    lent: list[Selection] = [Rows(0, min(1, length)) for length in rows_on_ranks(session, graph)]
    if not isinstance(rows[0], Rows):
        lent = [np.arange(len(one), dtype=np.int64) for one in lent]
    return [one if count or len(one) else own for one, own, count in zip(rows, lent, counts)]
