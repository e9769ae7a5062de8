"""How objects show themselves: tables for notebooks, and the names that `dir` lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["html_table", "public_names"]


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
