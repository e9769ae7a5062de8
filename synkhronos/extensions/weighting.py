"""Weighted losses: averages by other weights than the number of data points.

In a loss such as ``(m * l).sum() / m.sum()``, the weight of a rank is its sum of weights. Loss and gradients are
multiplied by the mean weight of a data point on the rank, or slice, so that averages by numbers of data points add up.
The mean weight is averaged, too, and divides the results in the end. Where the weight is 0, values are replaced by 0
rather than multiplied, because 0 · NaN is NaN. Where the weight is invalid, the update function leaves everything
unchanged; it runs before the controller sees the weights.
"""

from typing import Any

import numpy as np

from synkhronos._backends import T


def per_point(weights: Any, data: Any) -> Any:
    """Return the mean weight of a data point of a rank or slice."""
    weights = T.as_tensor_variable(weights)
    if weights.ndim:
        raise TypeError(
            f"weights must be a scalar expression, such as mask.sum(); got one of {weights.ndim} dimensions"
        )
    return weights.astype("float64") / data.shape[0]


def times(weight: Any, value: Any, dtype: str) -> Any:
    """Multiply a value by a weight; the result is 0 where the weight is 0, whatever the value."""
    return T.switch(T.eq(weight, 0), np.zeros((), dtype), weight.astype(dtype) * value)


def not_negative(weight: Any) -> Any:
    """Return a weight, or NaN where it is negative, which no average hides."""
    return T.switch(T.lt(weight, 0), np.nan, weight)


def where_valid(weight: Any, new: Any, old: Any) -> Any:
    """Return a new value where the weight is positive and finite, otherwise the old value."""
    return T.switch(T.gt(weight, 0) & T.lt(weight, np.inf), new, old)


def weighted(loss: Any, weight: Any, lowest: Any) -> Any:
    """Divide the loss by the mean weight of a data point, after checking it."""
    if not np.isfinite(weight) or not lowest >= 0 or not weight > 0:
        raise ValueError(
            "weights must be finite, not negative, and not 0 on all ranks; their mean is "
            f"{weight:g} for each data point, the lowest {lowest:g}. The parameters are as they were"
        )
    return np.asarray(loss / weight, loss.dtype)
