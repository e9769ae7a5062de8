"""Symbolic expressions for collectives: `averaged`, `summed`, `reduced` and `gathered`."""

from __future__ import annotations

from typing import Any

from synkhronos._backends import T
from synkhronos._collectives import check_op, lists_ops
from synkhronos._graph.ops import rewrites as joining  # noqa: F401  (registers the rewrites of the op)
from synkhronos._graph.ops.collective_op import Collective
from synkhronos._graph.ops.rank_context import GATHER
from synkhronos.typing import Reduction


def averaged(x: Any) -> Any:
    """Average a variable over ranks, weighted by their data points, as a symbolic expression.

    The value is ``sum(n_k * x_k) / sum(n_k)``. Here ``x_k`` is the value on rank k, and ``n_k`` is the number of data
    points of rank k in the call. Ranks without data points are left out. In a function built by
    `synkhronos.function`, the expression is an all-reduce: the ranks wait for each other, and all get bitwise equal
    values.

    If the cost is a mean over data points, averaging the ranks' gradients gives the gradient of the mean over all data
    points. Any optimizer can use it. The expression itself has a gradient: the average of the gradient with respect to
    its value. In a plain function of Theano or PyTensor, and in ``f.as_theano``, the expression is the identity, as for
    one rank.

    Parameters
    ----------
    x : tensor variable or array_like
        A value of any dtype, with the same shape on every rank that has data points.

    Returns
    -------
    tensor variable
        The average, of the same type as ``x``, but float64 for integers and booleans. Each rank gets its own copy.

    Raises
    ------
    TypeError
        If ``x`` cannot be converted to a tensor variable.
    WorkerError
        In a call, if the shapes of ``x`` differ between ranks.

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
    """Sum a variable over ranks, in rank order, as a symbolic expression; see `averaged`.

    Parameters
    ----------
    x : tensor variable or array_like
        A value of any dtype, with the same shape on every rank that has data points. Ranks without data points are left
        out.

    Returns
    -------
    tensor variable
        The sum, of the same type as ``x``, but int64 for booleans and smaller signed integers, and uint64 for smaller
        unsigned integers.

    Raises
    ------
    TypeError
        If ``x`` cannot be converted to a tensor variable.
    WorkerError
        In a call, if the shapes of ``x`` differ between ranks.

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
    """Reduce a variable over ranks, element by element in rank order, as a symbolic expression; see `averaged`.

    Parameters
    ----------
    x : tensor variable or array_like
        A value of any dtype, with the same shape on every rank that has data points. Ranks without data points are left
        out.
    op : str
        {ops}.

    Returns
    -------
    tensor variable
        The result. Its dtype is float64 for averages of integers and booleans, that of `numpy.sum` for their sums and
        products, and otherwise that of ``x``.

    Raises
    ------
    TypeError
        If ``x`` cannot be converted to a tensor variable.
    WorkerError
        In a call, if the shapes of ``x`` differ between ranks.
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
    """Concatenate the ranks' values of a variable along axis 0, as a symbolic expression; see `averaged`.

    The values are in rank order.

    Parameters
    ----------
    x : tensor variable or array_like
        A value of any dtype, with shape ``(n_k, ...)`` on rank k; the ``n_k`` may differ. A scalar counts as one row.
        Ranks without data points are left out.

    Returns
    -------
    tensor variable
        The concatenation, of the same dtype and of shape ``(sum of n_k, ...)``. Its length along axis 0 is known only
        at run time.

    Raises
    ------
    TypeError
        If ``x`` cannot be converted to a tensor variable.
    WorkerError
        In a call, if the shapes of ``x`` differ between ranks beyond axis 0.

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
