"""Variables and expressions that are like another variable of PyTensor's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytensor.tensor as T
from pytensor import shared
from pytensor.tensor.type import DenseTensorType as DenseType

__all__ = ["DenseType", "as_type_of", "input_like", "reshaped_like", "shared_like"]


def input_like(var: Any) -> Any:
    """A new input for values of a shared variable."""
    return T.TensorType(var.dtype, shape=tuple(1 if length == 1 else None for length in var.type.shape))()


def as_type_of(var: Any, value: Any) -> Any:
    """An expression that may stand in the place of a variable, some of whose rows it has.

    Raises
    ------
    TypeError
        If the variable's type has a length, so that it has either all rows or none.
    """
    if var.type.ndim and var.type.shape[0] not in (None, 1):
        raise TypeError(
            f"{var} has the static length {var.type.shape[0]}, and cannot be used by rows: make it by "
            "pytensor.shared(value) without shape="
        )
    return var.type.filter_variable(T.specify_shape(value, var.type.shape))


def shared_like(value: Any, name: str, var: Any) -> Any:
    """A new shared variable of a variable's dtype and static shape."""
    return shared(value, name=name, shape=var.type.shape)


def reshaped_like(value: Any, shape: Sequence[int], var: Any) -> Any:
    """The elements of an expression in a shape, which is that of a variable's value, with its static shape.

    An axis of which the variable does not say that its length is 1 may not be known to have it here: such an
    expression would not be taken for its new value.
    """
    loose = any(length == 1 and static is None for length, static in zip(shape, var.type.shape))
    return T.specify_shape(value.reshape(var.shape if loose else shape), var.type.shape)
