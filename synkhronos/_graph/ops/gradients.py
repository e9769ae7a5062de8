"""Gradients of the collectives that a program puts into a graph by `averaged`, `summed`, `reduced` and `gathered`.

Exact functions do not use them: their graphs contain the gradients already when collectives are inserted.

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

from typing import Any, Callable

from synkhronos._backends import CONTINUOUS, DisconnectedType, T, config, constant_value
from synkhronos._graph.ops.rank_context import GATHER, RankConstant


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
