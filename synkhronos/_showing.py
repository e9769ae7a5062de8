"""How objects show themselves: tables for notebooks, the names that `dir` lists, the modules that `help` does."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

__all__ = ["html_table", "list_public_modules", "public_names"]


def html_table(lines: Iterable[Sequence[object]], title: str = "") -> str:
    """A table, whose first line is the head: the first cells of lines to the left, all others to the right."""
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
    """The attributes of an object that are for users: all without an underscore that are not ``internal``."""
    return [name for name in object.__dir__(one) if not name.startswith("_") and name not in internal]


def list_public_modules(folders: Iterable[str]) -> None:
    """Have `help`, and whoever else asks `pkgutil`, list those modules in the folders that begin with no underscore."""
    for folder in folders:
        finder = sys.path_importer_cache.get(folder)
        if finder is not None and not isinstance(finder, _PublicFinder):
            sys.path_importer_cache[folder] = _PublicFinder(finder)


class _PublicFinder:
    """Finds what another finder finds, and lists what is public of that, by the interface that `pkgutil` documents."""

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
