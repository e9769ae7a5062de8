"""`Collective`: an operation that runs a collective in a graph.

The backend never executes it while it compiles a function (constant folding), because only one process compiles.
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

UNNUMBERED = -1

#: The ops that move rows, without arithmetic.
_OF_ROWS = (GATHER, BROADCAST)

_contiguous = functools.partial(np.asarray, order="C")


class Collective(Op):
    """Reduce, gather or broadcast several arrays over the ranks in one collective.

    Output i is the combination of the ranks' values of input i by ``ops[i]``.

    Parameters
    ----------
    ops : tuple of str
        For each input, a key of `OPS`, ``"gather"`` (concatenation along axis 0, in rank order), or ``"broadcast"``
        (the controller's rows).
    inplace : tuple of int
        Positions of the inputs that are overwritten by their results.
    number : int
        Number by which ranks check that they execute the same collective; `UNNUMBERED` until a late rewrite sets it,
        because the backend merges only equal operations.
    labels : tuple of int
        Labels that identify collectives in a compiled function. A collective that was merged into an equal one has lost
        its labels.

    Attributes
    ----------
    n_bytes : tuple of int
        Sizes in bytes of this rank's results in the first execution; empty before.
    pieces : tuple of tuple of int
        Numbers of each input's pieces, if its exchange with other nodes began early in the last execution; else empty.
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
        self.pieces: tuple[tuple[int, ...], ...] = ()
        self.inplace = inplace
        self.number = number
        self.destroy_map = {i: [i] for i in inplace}
        self._own = [i in inplace for i in range(len(ops))]

    def __str__(self) -> str:
        number = "" if self.number == UNNUMBERED else f" {self.number}"
        ops = [f"{op}, in place" if i in self.inplace else op for i, op in enumerate(self.ops)]
        return f"Collective{number}{{{'; '.join(ops)}}}"

    def make_node(self, *inputs: Any) -> Any:
        """Apply the operation to one tensor variable for each op."""
        inputs = tuple([T.as_tensor_variable(x) for x in inputs])
        return Apply(self, inputs, [_type_of(x, op)() for x, op in zip(inputs, self.ops)])

    def perform(self, node: Any, inputs: Sequence[np.ndarray], output_storage: Sequence[list[Any]]) -> None:
        """Run the collective; outside a call, as for a single rank."""
        context = current()
        arrays = list(map(_contiguous, inputs))  # copies arrays that are not contiguous
        if context is None or context.n_ranks == 1:
            triples = zip(arrays, self._own, self.ops)
            results = [array if is_own else array.astype(_dtype_of(array, op)) for array, is_own, op in triples]
        else:
            results = context.combine(self.number, self.ops, arrays, self._own)
            self.pieces = context.pieces
        if not self.n_bytes:
            self.n_bytes = tuple([result.nbytes for result in results])
        for storage, result in zip(output_storage, results):
            storage[0] = result

    def do_constant_folding(self, *_: Any) -> bool:
        """Return false: only the controller compiles, and no other rank would take part in the collective."""
        return False

    def infer_shape(self, node: Any, shapes: Sequence[Any]) -> list[Any]:
        """Return the shapes. Reductions keep them; the length of gathered arrays is known only at run time."""
        found = []
        for op, shape, output in zip(self.ops, shapes, node.outputs):
            gathered = (length_along(output, 0),) if op in _OF_ROWS else ()
            found.append((*gathered, *shape[len(gathered) :]))
        return found

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Return a pattern that connects output i with input i only."""
        n = len(self.ops)
        return [[i == k for k in range(n)] for i in range(n)]

    def L_op(self, inputs: Sequence[Any], outputs: Sequence[Any], output_gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients; see `synkhronos._graph.ops.gradients`."""

        def collective(op: str, x: Any) -> Any:
            return Collective((op,))(x)

        of_each = zip(self.ops, inputs, outputs, output_gradients)
        return [gradient(op, x, y, g, collective) for op, x, y, g in of_each]

    def R_op(self, inputs: Sequence[Any], eval_points: Sequence[Any]) -> list[Any]:
        """Return the same collectives of the tangents; raise `NotImplementedError` for an op that is not linear."""
        nonlinear = [op for op in self.ops if op in ("prod", "max", "min")]
        if nonlinear:
            raise NotImplementedError(f"there is no R-operator of the op {nonlinear[0]!r}")
        return [None if point is None else Collective((op,))(point) for op, point in zip(self.ops, eval_points)]


class Operand(Op):
    """Operand of a reduction, unchanged. When it is computed, its exchange with other nodes may begin.

    Parameters
    ----------
    key : int
        Identifier of the reduction, the same on all ranks.
    index : int
        Index of the operand.
    """

    __props__ = ("key", "index")

    def __init__(self, key: int, index: int) -> None:
        self.key, self.index = key, index
        self.view_map = {0: [0]}

    def make_node(self, x: Any) -> Any:
        """Apply the operation to a tensor variable."""
        return Apply(self, [x], [x.type()])

    def perform(self, node: Any, inputs: Sequence[np.ndarray], output_storage: Sequence[list[Any]]) -> None:
        """Return the operand, and announce it to the current rank context."""
        array = output_storage[0][0] = _contiguous(inputs[0])
        context = current()
        if context is not None:
            context.announce(self.key, self.index, array)

    def do_constant_folding(self, *_: Any) -> bool:
        """Return false: constants have a context only in a call."""
        return False

    def infer_shape(self, node: Any, shapes: Sequence[Any]) -> list[Any]:
        """Return the shape of the operand."""
        return list(shapes)


def _type_of(x: Any, op: str) -> Any:
    if op in _OF_ROWS:
        return retyped(x, free=(0,))
    if op not in OPS:
        raise ValueError(f"got op {op!r}; expected one of {', '.join(map(repr, (*OPS, GATHER)))}")
    return retyped(x, _dtype_of(x, op))


def _dtype_of(x: Any, op: str) -> Any:
    return x.dtype if op in _OF_ROWS else result_dtype(np.dtype(x.dtype), op)
