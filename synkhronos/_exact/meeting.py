"""The collectives of divided graphs on real ranks: those of `_inside`, of any axis, with dtypes kept."""

from __future__ import annotations

from typing import Any

import theano.tensor as T

from synkhronos._exact.walk import Collectives
from synkhronos._inside import gathered, reduced

__all__ = ["ON_RANKS"]


def _all_reduce(variable: Any, op: str) -> Any:
    return T.cast(reduced(variable, op), variable.dtype)


def _all_gather(variable: Any, axis: int) -> Any:
    if axis == 0:
        return gathered(variable)
    order = [axis, *(one for one in range(variable.ndim) if one != axis)]
    return gathered(variable.dimshuffle(order)).dimshuffle([order.index(one) for one in range(variable.ndim)])


ON_RANKS = Collectives(_all_reduce, _all_gather)
