"""Help for interactive users: errors for unknown arguments, tables for notebooks, names for `dir` and `help`."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, Callable, TypeVar, cast

__all__ = ["checks_keywords", "html_table", "list_public_modules", "public_names", "unknown_keyword"]


_Callable = TypeVar("_Callable", bound=Callable[..., Any])


def unknown_keyword(function: str, name: str, known: Sequence[str]) -> TypeError:
    """Return the error for an argument that a function does not have.

    Parameters
    ----------
    function : str
        Name of the function that the user called.
    name : str
        Name of the argument that was given.
    known : sequence of str
        Names of the function's arguments.
    """
    similar = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    meant = f"; did you mean {' or '.join(similar)}?" if similar else "."
    return TypeError(f"{function} has no argument {name!r}{meant} It takes {', '.join(known)}")


def checks_keywords(function: _Callable) -> _Callable:
    """Decorate a public function so that its error for an unknown argument suggests similar names and lists all."""
    known = tuple(inspect.signature(function).parameters)
    names = frozenset(known)

    @functools.wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        if not names.issuperset(kwargs):
            wrong = next(name for name in kwargs if name not in names)
            raise unknown_keyword(f"synkhronos.{function.__name__}", wrong, known)
        return function(*args, **kwargs)

    return cast("_Callable", check_and_call)


def html_table(lines: Iterable[Sequence[object]], title: str = "") -> str:
    """Return an HTML table; the first line is the head. The first column is left-aligned, the others right-aligned."""
    head, *body = (
        "".join(
            f'<{tag} style="text-align: {"right" if column else "left"}">{escape(str(cell))}</{tag}>'
            for column, cell in enumerate(line)
        )
        for tag, line in zip(_tags(), lines)
    )
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    rows = "".join(f"<tr>{row}</tr>" for row in body)
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _tags() -> Iterable[str]:
    yield "th"
    while True:
        yield "td"


def public_names(one: object, *internal: str) -> list[str]:
    """Return the attributes of an object that are for users: no leading underscore, and not among ``internal``."""
    return [name for name in object.__dir__(one) if not name.startswith("_") and name not in internal]


def list_public_modules(folders: Iterable[str]) -> None:
    """Have `help`, and all other users of `pkgutil`, list only modules in the folders without a leading underscore."""
    for folder in folders:
        finder = sys.path_importer_cache.get(folder)
        if finder is not None and not isinstance(finder, _PublicFinder):
            sys.path_importer_cache[folder] = _PublicFinder(finder)


class _PublicFinder:
    """Wrapper of a finder that lists only its public modules, by the interface that `pkgutil` documents."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, target: Any = None) -> Any:
        return self._finder.find_spec(name, target)

    def invalidate_caches(self) -> None:
        self._finder.invalidate_caches()

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        from pkgutil import iter_importer_modules  # type: ignore[attr-defined]

        for name, is_package in iter_importer_modules(self._finder, prefix):
            if not name[len(prefix) :].startswith("_"):
                yield name, is_package
