"""What a user gives as inputs and as sliceable shared variables of a function, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._engine import TITLE, In, Variable, name
from synkhronos._graphs.shared import is_host_variable, is_shared_variable, is_tensor_variable

__all__ = ["as_in", "check_arguments", "check_givens", "copy_of", "pairs_of", "with_leaves"]


def as_in(item: Any, allow_downcast: bool | None) -> Any:
    """An input as the engine's ``In``."""
    if isinstance(item, In):
        return item
    if not isinstance(item, Variable):
        raise TypeError(f"inputs must be {TITLE} variables or {name}.In; got {item!r}")
    return In(item, allow_downcast=allow_downcast)


def with_leaves(ins: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Replace inputs that are results in the middle of a graph by new variables, from which nothing leads upwards.

    Parameters
    ----------
    ins : list of In

    Returns
    -------
    list of In
        In the same order.
    list of (variable, variable)
        The inputs that were replaced, with the new variables: givens of the function.
    """
    found, replaced = [], []
    for spec in ins:
        if spec.variable.owner is not None:
            leaf = spec.variable.type(spec.variable.name)
            replaced.append((spec.variable, leaf))
            spec = copy_of(spec, leaf)
        found.append(spec)
    return found, replaced


def copy_of(spec: Any, variable: Any = None) -> Any:
    """Copy an input, which may be of another variable. Functions write into the ``In`` that they are given.

    The copy is not mutable: a function must never destroy a value that the program passed.
    """
    variable = spec.variable if variable is None else variable
    return In(variable, name=spec.name, value=spec.value, strict=spec.strict, allow_downcast=spec.allow_downcast)


def pairs_of(givens: Any) -> list[tuple[Any, Any]]:
    """Givens, a dict or pairs, as a list of pairs."""
    return list(givens.items() if hasattr(givens, "items") else givens or ())


def check_givens(ins: Sequence[Any], givens: Sequence[tuple[Any, Any]]) -> None:
    """Raise `RuntimeError` if inputs are to be replaced, as the engine does when it compiles a graph."""
    inputs = {spec.variable for spec in ins}
    for old, _ in givens:
        if isinstance(old, Variable) and old in inputs:
            raise RuntimeError(
                f"givens: {old} is an input of the function, and cannot be replaced: make the new one an input in "
                "its place, as in function([y], f(x), givens={x: g(y)})"
            )


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
