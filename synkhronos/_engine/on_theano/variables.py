"""Variables and expressions that are like another variable of Theano's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import theano.tensor as T
from theano import shared
from theano.tensor import TensorType as DenseType

__all__ = ["DenseType", "as_type_of", "input_like", "reshaped_like", "shared_like"]


def input_like(var: Any) -> Any:
    """A new input for values of a shared variable."""
    return T.TensorType(var.dtype, var.broadcastable)()


def as_type_of(var: Any, value: Any) -> Any:
    """An expression that may stand in the place of a variable, some of whose rows it has."""
    if value.broadcastable != var.broadcastable:
        value = T.patternbroadcast(value, var.broadcastable)
    return var.type.filter_variable(value)  # to the GPU, where the variable is


def shared_like(value: Any, name: str, var: Any) -> Any:
    """A new shared variable of a variable's dtype and broadcast pattern."""
    return shared(value, name=name, broadcastable=var.broadcastable)


def reshaped_like(value: Any, shape: Sequence[int], var: Any) -> Any:
    """The elements of an expression in a shape, which is that of a variable's value, with its broadcast pattern."""
    return T.patternbroadcast(value.reshape(shape), var.broadcastable)
