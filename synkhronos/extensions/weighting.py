"""Losses that are averages by other weights than the number of data points.

A loss that is an average by other weights, ``(m * l).sum() / m.sum()``, has a rank's sum of weights
as that rank's weight. Then loss and gradients are multiplied by the weight of one data point, on the
mean of a rank's or slice's points, so that the same averages by numbers of points add them up; and
that weight is averaged along, and divides them in the end. Where it is 0 they are replaced by 0,
not multiplied: 0 · NaN is NaN. Where it makes no sense the update function, which runs before the
master sees the weights, leaves everything as it is.
"""

from typing import Any

import numpy as np

from synkhronos._backends import T


def per_point(weights: Any, data: Any) -> Any:
    """Give the weight of one of a rank's, or slice's, data points."""
    weights = T.as_tensor_variable(weights)
    if weights.ndim:
        raise TypeError(
            f"weights must be a scalar expression, such as mask.sum(); got one of {weights.ndim} dimensions"
        )
    return weights.astype("float64") / data.shape[0]


def times(weight: Any, value: Any, dtype: str) -> Any:
    """Multiply a value by a weight; it is 0 where that is 0, whatever the value."""
    return T.switch(T.eq(weight, 0), np.zeros((), dtype), weight.astype(dtype) * value)


def not_negative(weight: Any) -> Any:
    """Give a weight, or NaN, which no average hides, where it is negative."""
    return T.switch(T.lt(weight, 0), np.nan, weight)


def where_valid(weight: Any, new: Any, old: Any) -> Any:
    """Give a new value where the weight of one data point is one, else the old value."""
    return T.switch(T.gt(weight, 0) & T.lt(weight, np.inf), new, old)


def weighted(loss: Any, weight: Any, lowest: Any) -> Any:
    """Divide the loss by the weight of one data point, which is checked."""
    if not np.isfinite(weight) or not lowest >= 0 or not weight > 0:
        raise ValueError(
            "weights must be finite, not negative, and not 0 on all ranks; their mean is "
            f"{weight:g} for each data point, the lowest {lowest:g}. The parameters are as they were"
        )
    return np.asarray(loss / weight, loss.dtype)
