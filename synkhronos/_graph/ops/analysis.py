"""Find the collectives of a graph, and cut a graph in two at its collectives for calls in slices.

A graph can be cut if no data points are needed after a collective. The first part is computed slice by slice, and the
values that enter collectives are accumulated over slices by the collectives' own ops. This is exact: for example, a
weighted average of averages is the average of all. The second part contains the collectives and everything that depends
on them. It is computed once, so ranks may have different numbers of slices. It also computes values that enter a
collective but do not depend on data points, because slicing does not divide these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._backends import ancestors, clone, io_toposort, ops, retyped
from synkhronos._collectives import result_dtype
from synkhronos._graph.ops.collective_op import Collective
from synkhronos._graph.ops.rank_context import GATHER, RankConstant


def compiled_has_collectives(function: Any) -> bool:
    """Return whether a compiled function has collectives or rank constants, in inner graphs too.

    A gradient of a collective may have rank constants, but no collectives.
    """
    return any(_needs_context(node.op) for node in function.maker.fgraph.apply_nodes)


def collectives_of(function: Any) -> list[Collective]:
    """Return the collectives of a compiled function in their order of execution, except for those in inner graphs."""
    ops = [node.op for node in function.maker.fgraph.toposort() if isinstance(node.op, Collective)]
    return sorted(ops, key=lambda op: op.number)


def after_collectives(expressions: Iterable[Any]) -> set[Any]:
    """Return all variables in the graph of some expressions that depend on collectives."""
    found: set[Any] = set()
    for node in io_toposort([], list(expressions)):
        if isinstance(node.op, Collective) or _has_inner_collectives(node.op) or not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def has_collectives_in_loop(expressions: Iterable[Any]) -> bool:
    """Return whether expressions have collectives in inner graphs, of a Scan or an `OpFromGraph`."""
    return any(map(_has_inner_collectives, _ops_of(expressions)))


def depends_on(expression: Any, variables: Iterable[Any], *, or_rank: bool = True, but_for: Iterable[Any] = ()) -> bool:
    """Return whether an expression depends on some of the variables, or on the rank, other than through collectives.

    Parameters
    ----------
    expression : variable
    variables : iterable of variables
    or_rank : bool
        Whether to count a dependency on rank constants.
    but_for : iterable of variables
        Variables through which dependencies do not count.
    """
    sought, seen = set(variables), set(but_for)
    waiting = [expression]
    while waiting:
        var = waiting.pop()
        if var in sought or (or_rank and var.owner is not None and isinstance(var.owner.op, RankConstant)):
            return True
        if var in seen or var.owner is None or isinstance(var.owner.op, Collective):
            continue
        seen.add(var)
        waiting += var.owner.inputs
    return False


def _ops_of(expressions: Iterable[Any]) -> Iterator[Any]:
    return (var.owner.op for var in ancestors(list(expressions)) if var.owner is not None)


def _needs_context(op: Any) -> bool:
    return isinstance(op, (Collective, RankConstant)) or _has_inner_collectives(op)


def _has_inner_collectives(op: Any) -> bool:
    """Return whether the inner graph of an operation, such as a Scan, has collectives or rank constants."""
    return has_collectives(ops.inner_outputs(op))


def has_collectives(expressions: Iterable[Any]) -> bool:
    """Return whether expressions have collectives or rank constants, in inner graphs too."""
    return any(map(_needs_context, _ops_of(expressions)))


class Cut(NamedTuple):
    """Result of `cut`: the two parts of a graph."""

    before: list[int]  # positions of the expressions that the first part computes, slice by slice
    entering: list[Any]  # values that enter collectives, which the first part computes, too
    ops: list[str]  # op of the collective of each of these
    inputs: list[Any]  # inputs of the second part: the accumulated values of `entering`
    after: dict[int, Any]  # the other expressions by position, computed from `inputs` by the second part


def cut(
    expressions: Sequence[Any], names: Sequence[str], varying: Sequence[Any], common: Sequence[Any] = ()
) -> Cut | None:
    """Cut expressions at their collectives.

    Parameters
    ----------
    expressions : list of variables
    names : list of str
        Names of the expressions in messages.
    varying : list of variables
        Variables that differ between ranks or slices.
    common : list of variables
        Variables that are computed from those of ``varying``, but are equal on all ranks and in all slices.

    Returns
    -------
    Cut or None
        ``None`` if there are no collectives.

    Raises
    ------
    ValueError
        If data points are needed together with the result of a collective, or there is a collective in a loop.
    """
    if has_collectives_in_loop(expressions):
        raise ValueError(
            "num_slices: a function with collectives in a loop cannot be computed in slices; call it without"
        )
    nodes = {var.owner: None for var in ancestors(list(expressions)) if var.owner is not None}
    collectives = [node for node in nodes if isinstance(node.op, Collective)]
    if not collectives:
        return None
    entering: dict[tuple[Any, str], Any] = {}
    replace: dict[Any, Any] = {}
    for node in collectives:
        for x, op, y in zip(node.inputs, node.op.ops, node.outputs):
            if not depends_on(x, varying, or_rank=False, but_for=common):
                continue
            if _has_collectives(x):
                raise ValueError(
                    "num_slices: a collective of this function needs data points and the result of another, which is "
                    "available only after all slices; call it without num_slices"
                )
            if (x, op) not in entering:
                dtype = x.dtype if op == GATHER else str(result_dtype(np.dtype(x.dtype), op))
                entering[x, op] = retyped(y, dtype)()
            replace[y] = Collective((op,))(entering[x, op])
    before = [
        i for i, expression in enumerate(expressions) if depends_on(expression, varying, or_rank=False, but_for=common)
    ]
    for i in before:
        if _has_collectives(expressions[i]):
            raise ValueError(
                f"num_slices: {names[i]} needs data points and the result of a collective, which is available only "
                "after all slices; call the function without num_slices"
            )
    rest = [i for i in range(len(expressions)) if i not in before]
    for one in common:
        if depends_on(one, varying, or_rank=False):
            replace[one] = entering[one, "max"] = one.type()
    after = clone([expressions[i] for i in rest], replace=replace, share_inputs=True)
    variables, ops = [x for x, _ in entering], [op for _, op in entering]
    return Cut(before, variables, ops, list(entering.values()), dict(zip(rest, after)))


def _has_collectives(expression: Any) -> bool:
    return any(isinstance(op, Collective) for op in _ops_of([expression]))
