"""Keyword arguments that a function does not have: the error says what was meant, and what there is."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Sequence
from typing import Any, Callable, TypeVar, cast

__all__ = ["checks_keywords", "unknown_keyword"]

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


def unknown_keyword(function: str, name: str, known: Sequence[str]) -> TypeError:
    """The error for an argument that a function does not have.

    Parameters
    ----------
    function : str
        What the user called.
    name : str
        The argument that was given.
    known : sequence of str
        Those that there are.
    """
    similar = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    meant = f"; did you mean {' or '.join(similar)}?" if similar else "."
    return TypeError(f"{function} has no argument {name!r}{meant} It takes {', '.join(known)}")


def checks_keywords(function: _Callable) -> _Callable:
    """Have a public function name what was meant by an argument that it does not have."""
    known = tuple(inspect.signature(function).parameters)
    names = frozenset(known)

    @functools.wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        if not names.issuperset(kwargs):
            wrong = next(name for name in kwargs if name not in names)
            raise unknown_keyword(f"synkhronos.{function.__name__}", wrong, known)
        return function(*args, **kwargs)

    return cast("_Callable", check_and_call)
