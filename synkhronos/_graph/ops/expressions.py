"""Collectives as expressions: what users write in a graph."""

from __future__ import annotations

from typing import Any

from synkhronos._backends import T
from synkhronos._collectives import check_op, lists_ops
from synkhronos._graph.ops import rewrites as joining  # noqa: F401  (what the optimizer makes of them)
from synkhronos._graph.ops.collective_op import Collective
from synkhronos._graph.ops.rank_context import GATHER
from synkhronos.typing import Reduction

__all__ = ["averaged", "gathered", "reduced", "summed"]


def averaged(x: Any) -> Any:
    """The average of what the ranks have, weighted by their data points, as an expression.

    In a function made by `synk.function`, all ranks meet there, and come out with the same. Of gradients of a mean over
    data points it makes those of the mean over all of them; any optimiser can take these:

    >>> x, w = T.dvector("x"), theano.shared(0.0)
    >>> grad = synk.averaged(T.grad(T.sqr(w - x).mean(), w))
    >>> with synk.session(2):
    ...     step = synk.function([x], updates=[(w, w - 0.5 * grad)])
    ...     print(step([1, 2, 6]), w.get_value())
    [] 3.0

    Parameters
    ----------
    x : tensor variable, or what `theano.tensor.as_tensor_variable` takes
        Of the same shape on every rank.

    Returns
    -------
    tensor variable
        Of the same type; of integers and booleans float64. Everywhere but in a call of a `Function`, the identity:
        that of one rank. Its gradient is the average of the gradient.
    """
    return reduced(x, "avg")


def summed(x: Any) -> Any:
    """The sum of what the ranks have, as an expression; see `averaged`.

    Parameters
    ----------
    x : tensor variable, or what `theano.tensor.as_tensor_variable` takes
        Of the same shape on every rank.

    Returns
    -------
    tensor variable
        Of the same type; of small integers and booleans int64 (unsigned ones uint64).

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
    """What the ranks have, reduced element by element, in the order of the ranks, as an expression; see `averaged`.

    Parameters
    ----------
    x : tensor variable, or what `theano.tensor.as_tensor_variable` takes
        Of the same shape on every rank. Ranks without data points are left out.
    op : str
        {ops}.

    Returns
    -------
    tensor variable
        Of the dtype that an output with this op has.

    Raises
    ------
    ValueError
        For an unknown op.

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
    """What the ranks have, concatenated on axis 0, in rank order, as an expression; see `averaged`.

    Parameters
    ----------
    x : tensor variable, or what `theano.tensor.as_tensor_variable` takes
        Of shapes that may differ along axis 0. A scalar counts as one row.

    Returns
    -------
    tensor variable
        Of the same dtype.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], (x.shape[0] * synk.gathered(x), None))
    ...     print(f([1, 3, 4]))  # the master has two of the rows
    [2. 6. 8.]
    """
    x = T.as_tensor_variable(x)
    return Collective((GATHER,))(x if x.ndim else x.dimshuffle("x"))
