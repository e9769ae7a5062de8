"""``theano.tensor.topk`` and its kin on NumPy 1.23 and later, where a list is no index any more."""

from __future__ import annotations

import importlib
from typing import Any


def mend_topk() -> None:
    """Replace what `TopKOp` computes by. Theano must have been imported; calling it again does nothing."""
    module: Any = importlib.import_module("theano.tensor.sort")  # theano.tensor's attribute of that name is a function
    module._topk_py_impl = top_k


def top_k(op: Any, x: Any, k: Any, axis: int, idx_dtype: Any) -> Any:
    """Find the largest elements along an axis, or the smallest, in no particular order.

    Parameters
    ----------
    op : TopKOp
        Its ``return_values`` and ``return_indices`` say what is wanted.
    x : numpy.ndarray
    k : int, or array of one
        How many; negative for the smallest ones.
    axis : int
    idx_dtype : dtype
        Of the indices.

    Returns
    -------
    array, or tuple of two
        Values, or indices, or both in this order; `x` with ``abs(k)`` elements along `axis`.

    Raises
    ------
    ValueError
        If `k` is 0, or if there are fewer elements.
    """
    import numpy as np

    k, length = int(k), x.shape[axis]
    if k == 0:
        raise ValueError("topk: kth cannot be zero")
    if abs(k) > length:
        raise ValueError(f"topk: kth cannot be larger than the size of the axis; got {k} for axis {axis} of {length}")
    # the element that must be in its place, and those on its side
    kth, part = (length - k, slice(length - k, None)) if k > 0 else (-k - 1, slice(-k))
    index = tuple(part if i == axis % x.ndim else slice(None) for i in range(x.ndim))
    if not op.return_indices:
        return np.partition(x, kth, axis=axis)[index]
    if abs(k) == 1:
        indices = np.expand_dims((np.argmax if k > 0 else np.argmin)(x, axis=axis), axis)
    else:
        indices = np.argpartition(x, kth, axis=axis)[index]
    if not op.return_values:
        return indices.astype(idx_dtype)
    return np.take_along_axis(x, indices, axis), indices.astype(idx_dtype)
