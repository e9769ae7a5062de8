"""Collectives that users write as expressions in a graph."""

from __future__ import annotations

from typing import Any

from synkhronos._backends import T
from synkhronos._collectives import check_op, lists_ops
from synkhronos._graph.ops import rewrites as joining  # noqa: F401  (registers the rewrites)
from synkhronos._graph.ops.collective_op import Collective
from synkhronos._graph.ops.rank_context import GATHER
from synkhronos.typing import Reduction

__all__ = ["averaged", "gathered", "reduced", "summed"]


def averaged(x: Any) -> Any:
    """Average the ranks' values of an expression, weighted by their numbers of data points.

    In a call of a function made by `synk.function`, the ranks run an all-reduce, and all of them get the same result.
    Outside such a call the average is that of a single rank: the identity. The average of gradients of a mean over data
    points is the gradient of the mean over all of them, for use with any optimizer.

    Parameters
    ----------
    x : tensor variable, or any value that `theano.tensor.as_tensor_variable` accepts
        Has the same shape on every rank. Ranks without data points are left out.

    Returns
    -------
    tensor variable
        The average, with the type of ``x``; for integers and booleans float64. Its gradient is the average of the
        gradient.

    Raises
    ------
    ValueError
        In a call, on every rank, if the shapes of ``x`` differ between ranks.

    Examples
    --------
    >>> x, w = T.dvector("x"), theano.shared(0.0)
    >>> grad = synk.averaged(T.grad(T.sqr(w - x).mean(), w))
    >>> with synk.session(2):
    ...     step = synk.function([x], updates=[(w, w - 0.5 * grad)])
    ...     print(step([1, 2, 6]), w.get_value())
    [] 3.0
    """
    return reduced(x, "avg")


def summed(x: Any) -> Any:
    """Sum the ranks' values of an expression; see `averaged`.

    Parameters
    ----------
    x : tensor variable, or any value that `theano.tensor.as_tensor_variable` accepts
        Has the same shape on every rank. Ranks without data points are left out.

    Returns
    -------
    tensor variable
        The sum, with the type of ``x``; for small integers and booleans int64, for small unsigned integers uint64.

    Raises
    ------
    ValueError
        In a call, on every rank, if the shapes of ``x`` differ between ranks.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], (x / synk.summed(x.sum()), "gather"))
    ...     print(f([1, 3, 4]))
    [0.125 0.375 0.5  ]
    """
    return reduced(x, "sum")


@lists_ops
def reduced(x: Any, op: Reduction = "avg") -> Any:
    """Reduce the ranks' values of an expression elementwise, in rank order; see `averaged`.

    Parameters
    ----------
    x : tensor variable, or any value that `theano.tensor.as_tensor_variable` accepts
        Has the same shape on every rank. Ranks without data points are left out.
    op : str
        {ops}.

    Returns
    -------
    tensor variable
        The reduction, with the shape of ``x`` and the dtype of a function's output that is reduced with this op.

    Raises
    ------
    ValueError
        If the op is unknown; in a call, on every rank, if the shapes of ``x`` differ between ranks.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], (x - synk.reduced(x.max(), "max"), "gather"))
    ...     print(f([1, 3, 4]))
    [-3. -1.  0.]
    """
    return Collective((check_op("reduced", op),))(x)


def gathered(x: Any) -> Any:
    """Concatenate the ranks' values of an expression along axis 0, in rank order; see `averaged`.

    Parameters
    ----------
    x : tensor variable, or any value that `theano.tensor.as_tensor_variable` accepts
        Shape ``(n, ...)``, where n may differ between ranks. A scalar counts as one row. Ranks without data points are
        left out.

    Returns
    -------
    tensor variable
        The rows of all ranks, with the dtype of ``x``.

    Raises
    ------
    ValueError
        In a call, on every rank, if the shapes of ``x`` differ beyond axis 0.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], (x.shape[0] * synk.gathered(x), None))
    ...     print(f([1, 3, 4]))  # the controller has two of the rows
    [2. 6. 8.]
    """
    x = T.as_tensor_variable(x)
    return Collective((GATHER,))(x if x.ndim else x.dimshuffle("x"))
