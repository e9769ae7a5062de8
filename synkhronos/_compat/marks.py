"""Marks on the functions that take the places of Theano's, so that none is replaced twice.

They hold between two copies of this package, too, of which one was loaded while ``theano`` was being imported.
"""

from __future__ import annotations

from typing import Any, Callable, TypeVar

__all__ = ["is_mend", "mend"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def mend(function: _Function) -> _Function:
    """Mark a function as one of ours."""
    function.synkhronos_role = "mend"  # type: ignore[attr-defined]
    return function


def is_mend(function: Any) -> bool:
    """Whether a function is one of ours."""
    return getattr(function, "synkhronos_role", None) == "mend"
