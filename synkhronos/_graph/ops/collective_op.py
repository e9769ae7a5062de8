"""The op: a collective in a graph.

It is never executed while a function is compiled, where one process would be alone with it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._backends import Apply, Op, T, length_along, retyped
from synkhronos._collectives import OPS, result_dtype
from synkhronos._graph.ops.gradients import gradient
from synkhronos._graph.ops.rank_context import BROADCAST, GATHER, current

__all__ = ["UNNUMBERED", "Collective"]

UNNUMBERED = -1

#: The ops that take rows as they are.
_OF_ROWS = (GATHER, BROADCAST)

_contiguous = functools.partial(np.asarray, order="C")


class Collective(Op):
    """Reductions of some arrays over the ranks, and gatherings of others, in one meeting.

    Output i is what the ranks have as input i, reduced or gathered by ``ops[i]``.

    Parameters
    ----------
    ops : tuple of str
        For each input a key of `OPS`, ``"gather"`` (concatenation on axis 0, in rank order), or ``"broadcast"`` (the
        rows that the controller has).
    inplace : tuple of int
        The inputs whose memory takes the results.
    number : int
        By which ranks see that they meet in the same collective. Given after optimization: before, it would keep
        equal collectives from being merged.
    labels : tuple of int
        By which who made the collectives finds them in a compiled function, those that were not merged with others.

    Attributes
    ----------
    n_bytes : tuple of int
        How large the results were when it was executed first, on this rank; empty before.
    """

    __props__ = ("ops", "inplace", "number")

    def __init__(
        self,
        ops: tuple[str, ...],
        inplace: tuple[int, ...] = (),
        number: int = UNNUMBERED,
        labels: tuple[int, ...] = (),
    ) -> None:
        self.ops = ops
        self.labels = labels
        self.n_bytes: tuple[int, ...] = ()
        self.inplace = inplace
        self.number = number
        self.destroy_map = {i: [i] for i in inplace}
        self._own = [i in inplace for i in range(len(ops))]

    def __str__(self) -> str:
        number = "" if self.number == UNNUMBERED else f" {self.number}"
        ops = [f"{op}, in place" if i in self.inplace else op for i, op in enumerate(self.ops)]
        return f"Collective{number}{{{'; '.join(ops)}}}"

    def make_node(self, *inputs: Any) -> Any:
        """Apply to as many tensor variables as there are ops."""
        inputs = tuple([T.as_tensor_variable(x) for x in inputs])
        return Apply(self, inputs, [_type_of(x, op)() for x, op in zip(inputs, self.ops)])

    def perform(self, node: Any, inputs: Sequence[np.ndarray], output_storage: Sequence[list[Any]]) -> None:
        """Meet the other ranks; alone, outside of a call, the result is what one rank has."""
        standing = current()
        arrays = list(map(_contiguous, inputs))  # a copy of what is not
        if standing is None or standing.n_ranks == 1:
            triples = zip(arrays, self._own, self.ops)
            results = [array if is_own else array.astype(_dtype_of(array, op)) for array, is_own, op in triples]
        else:
            results = standing.combine(self.number, self.ops, arrays, self._own)
        if not self.n_bytes:
            self.n_bytes = tuple([result.nbytes for result in results])
        for storage, result in zip(output_storage, results):
            storage[0] = result

    def do_constant_folding(self, *_: Any) -> bool:
        """Never: the master alone would meet nobody."""
        return False

    def infer_shape(self, node: Any, shapes: Sequence[Any]) -> list[Any]:
        """Reductions keep shapes; how long a gathered array is, is known when it is there."""
        found = []
        for op, shape, output in zip(self.ops, shapes, node.outputs):
            gathered = (length_along(output, 0),) if op in _OF_ROWS else ()
            found.append((*gathered, *shape[len(gathered) :]))
        return found

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Each output comes of its own input."""
        n = len(self.ops)
        return [[i == k for k in range(n)] for i in range(n)]

    def L_op(self, inputs: Sequence[Any], outputs: Sequence[Any], output_gradients: Sequence[Any]) -> list[Any]:
        """See `gradients`."""

        def collective(op: str, x: Any) -> Any:
            return Collective((op,))(x)

        of_each = zip(self.ops, inputs, outputs, output_gradients)
        return [gradient(op, x, y, g, collective) for op, x, y, g in of_each]

    def R_op(self, inputs: Sequence[Any], eval_points: Sequence[Any]) -> list[Any]:
        """The same collectives of the tangents, where they are linear."""
        nonlinear = [op for op in self.ops if op in ("prod", "max", "min")]
        if nonlinear:
            raise NotImplementedError(f"there is no R-operator of the op {nonlinear[0]!r}")
        return [None if point is None else Collective((op,))(point) for op, point in zip(self.ops, eval_points)]


def _type_of(x: Any, op: str) -> Any:
    if op in _OF_ROWS:
        return retyped(x, free=(0,))
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; expected one of {', '.join(map(repr, (*OPS, GATHER)))}")
    return retyped(x, _dtype_of(x, op))


def _dtype_of(x: Any, op: str) -> Any:
    return x.dtype if op in _OF_ROWS else result_dtype(np.dtype(x.dtype), op)
