"""`Collective`, the operation that runs collectives in a graph, and its gradients.

The backend never executes the operation while it compiles a function (constant folding), because only one process
compiles.

The gradients are for the collectives that a program puts into a graph by `averaged`, `summed`, `reduced` and
`gathered`. Exact functions do not use them: their graphs contain the gradients already when collectives are inserted.

The differentiated cost is the weighted mean of the ranks' costs, sum_k w_k C_k, where w_k is rank k's fraction of the
data points. A cost that is equal on all ranks counts once, because the w_k sum to one. Rank k computes a gradient g_k
such that sum_k w_k g_k (`averaged`) is the full gradient. The gradient of a collective y = F(x_1, x_2, …) is therefore
its adjoint in the inner product <u, v> = sum_k w_k u_k · v_k. On rank j, the gradients are:

* averaged, y = sum_j w_j x_j:  averaged(g), because <g, y> = (sum_k w_k g_k) · sum_j w_j x_j.
* summed, y = sum_j x_j:  averaged(g) / w_j, because <g, y> = sum_j w_j (averaged(g) / w_j) · x_j.
* gathered:  the rows of rank j in averaged(g), divided by w_j.
* max, min:  averaged(g) / w_j where x_j is the extreme value (with ties, on each such rank, as in Theano), else 0.
* prod:  averaged(g) / w_j times the product of the other ranks' values.

On a rank that is left out (w_j = 0), the gradient is arbitrary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos._backends import (
    CONTINUOUS,
    Apply,
    DisconnectedType,
    Op,
    T,
    config,
    constant_value,
    length_along,
    retyped,
)
from synkhronos._collectives import OPS, result_dtype
from synkhronos._graph.ops.rank_context import BROADCAST, GATHER, RankConstant, current

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
    key : int, optional
        The key of its operands, if these are `Operand`.

    Attributes
    ----------
    n_bytes : tuple of int
        Sizes in bytes of this rank's results in the first execution; empty before.
    pieces : tuple of tuple of int
        Numbers of each input's pieces, if its exchange with other nodes began early in the last execution; else empty.
    """

    __props__ = ("ops", "inplace", "number", "key")

    def __init__(
        self,
        ops: tuple[str, ...],
        inplace: tuple[int, ...] = (),
        number: int = UNNUMBERED,
        labels: tuple[int, ...] = (),
        key: int | None = None,
    ) -> None:
        self.ops = ops
        self.key = key
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
            results = context.combine(self.number, self.ops, arrays, self._own, self.key)
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
        """Return the gradients; see the docstring of this module."""

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


# -- gradients


def gradient(op: str, x: Any, y: Any, g: Any, collective: Callable[[str, Any], Any]) -> Any:
    """Return the gradient with respect to the input of one collective.

    Parameters
    ----------
    op : str
        The collective's op.
    x, y : variable
        Its input and output.
    g : variable
        The gradient with respect to the output.
    collective : callable
        ``collective(op, x)`` returns a collective of ``x`` for use in the gradient.

    Raises
    ------
    NotImplementedError
        For an op without a gradient.
    """
    if isinstance(g.type, DisconnectedType):
        return g
    if x.dtype not in CONTINUOUS:
        return x.zeros_like(dtype=config.floatX)
    constant = constant_value(g)
    if constant and op in ("avg", "sum", GATHER):  # not 0: PyTensor may differentiate with respect to zeros
        mean = T.fill(x, T.cast(constant, x.dtype))
        return mean if op == "avg" else mean * _inverse_weight(x)
    mean = collective("avg", g)
    if op == "avg":
        return mean
    if op == "sum":
        return mean * _inverse_weight(x)
    if op == GATHER:
        return _own_rows(x, mean, collective) * _inverse_weight(x)
    if op in ("max", "min"):
        return T.cast(T.eq(x, y), x.dtype) * mean * _inverse_weight(x)
    if op == "prod":
        return _product_of_others(x, collective) * mean * _inverse_weight(x)
    raise NotImplementedError(f"the collective {op!r} has no gradient")


def _inverse_weight(x: Any) -> Any:
    """Return the reciprocal of this rank's fraction of the total weight."""
    return T.cast(RankConstant("inverse_weight")(), x.dtype)


def _own_rows(x: Any, all_rows: Any, collective: Callable[[str, Any], Any]) -> Any:
    """Return this rank's rows of a gathered array."""
    rank, n_ranks = RankConstant("rank")(), RankConstant("n_ranks")()
    lengths = collective("sum", T.set_subtensor(T.zeros((n_ranks,), "int64")[rank], x.shape[0]))
    rows = lengths[:rank].sum() + T.arange(x.shape[0])
    return all_rows[T.minimum(rows, all_rows.shape[0] - 1)]  # keeps the index valid on a rank that is left out


def _product_of_others(x: Any, collective: Callable[[str, Any], Any]) -> Any:
    """Return the product of the other ranks' values, without dividing by values that are 0."""
    is_zero = T.eq(x, 0)
    n_zeros = collective("sum", is_zero)
    of_others = collective("prod", T.switch(is_zero, 1, x))  # the product of the nonzero values
    own = T.cast(T.switch(is_zero, 1, x), x.dtype)
    return T.switch(T.eq(n_zeros, T.cast(is_zero, "int64")), T.cast(of_others, x.dtype) / own, 0).astype(x.dtype)
