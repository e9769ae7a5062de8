"""What a user gives as inputs and as sliceable shared variables of a function, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import TITLE, In, Variable, is_device_type, name
from synkhronos._graphs.packing import Unpacked, bytes_variable
from synkhronos._graphs.shared import is_host_variable, is_shared_variable, is_tensor_variable

__all__ = ["as_in", "check_arguments", "check_givens", "copy_of", "pairs_of", "with_leaves"]


def as_in(item: Any, allow_downcast: bool | None) -> Any:
    """An input as the engine's ``In``."""
    if isinstance(item, In):
        return item
    if not isinstance(item, Variable):
        raise TypeError(f"inputs must be {TITLE} variables or {name}.In; got {item!r}")
    return In(item, allow_downcast=allow_downcast)


def with_leaves(ins: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, Any]], dict[int, Any]]:
    """Replace inputs that a function cannot take as they are by new variables.

    These are results in the middle of a graph, from whose new variables nothing leads upwards; and values that are no
    dense arrays, which come as bytes.

    Parameters
    ----------
    ins : list of In

    Returns
    -------
    list of In
        In the same order.
    list of (variable, expression)
        The inputs that were replaced, with what stands for them: givens of the function.
    dict
        The types of the inputs that come as bytes, by position.
    """
    found, replaced, packed = [], [], {}
    for position, spec in enumerate(ins):
        variable = spec.variable
        if not is_host_variable(variable):
            leaf = bytes_variable(variable.name)
            packed[position] = variable.type
            replaced.append((variable, Unpacked((variable.type,))(leaf)))
            spec = In(leaf, name=spec.name)
        elif variable.owner is not None:
            leaf = variable.type(variable.name)
            replaced.append((variable, leaf))
            spec = copy_of(spec, leaf)
        found.append(spec)
    return found, replaced, packed


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
        if is_device_type(spec.variable.type) or (position < n_scattered and not is_host_variable(spec.variable)):
            raise TypeError(
                f"input {position} ({spec.name or spec.variable}) must be a tensor variable in host memory to be "
                f"scattered; got type {spec.variable.type}. Pass a sparse matrix or an object in bcast_inputs: every "
                "rank gets it in full"
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
