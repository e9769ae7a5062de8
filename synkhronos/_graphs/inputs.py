"""What a user gives as inputs and as sliceable shared variables of a function, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._engine import TITLE, In, Variable, name
from synkhronos._graphs.shared import is_host_variable, is_shared_variable, is_tensor_variable

__all__ = ["as_in", "check_arguments"]


def as_in(item: Any, allow_downcast: bool | None) -> Any:
    """An input as the engine's ``In``."""
    if isinstance(item, In):
        return item
    if not isinstance(item, Variable):
        raise TypeError(f"inputs must be {TITLE} variables or {name}.In; got {item!r}")
    return In(item, allow_downcast=allow_downcast)


def check_arguments(ins: Sequence[Any], n_scattered: int, sliceable_shareds: Sequence[Any]) -> None:
    """Raise `TypeError` for inputs, the scattered ones first, and variables that cannot be that."""
    for position, spec in enumerate(ins):
        if not is_host_variable(spec.variable):
            raise TypeError(
                f"input {position} ({spec.name or spec.variable}) must be a tensor variable; got type "
                f"{spec.variable.type}. Pass a sparse matrix by the arrays of which {name}.sparse.CSR makes it, or "
                f"have a shared variable hold the value, or build the function by {TITLE} alone"
            )
        if spec.update is not None:
            raise TypeError(
                f"input {position} ({spec.variable}): {name}.In(update=…) is not supported; use a shared variable"
            )
    for position, spec in enumerate(ins[:n_scattered]):
        if spec.variable.ndim == 0:
            raise TypeError(
                f"input {position} ({spec.variable}) is 0-dimensional and cannot be scattered along axis 0; "
                "pass it in bcast_inputs"
            )
    for var in sliceable_shareds:
        if not is_shared_variable(var) or not is_tensor_variable(var) or var.ndim == 0:
            raise TypeError(f"sliceable_shareds must hold shared variables of at least 1 dimension; got {var!r}")
