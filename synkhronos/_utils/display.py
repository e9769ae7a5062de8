"""Display for interactive users: errors for unknown arguments, text and HTML tables, names for `dir`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from html import escape


def unknown_keyword(function: str, name: str, known: Sequence[str]) -> TypeError:
    """Return the error for an unknown keyword argument; it suggests arguments with similar names.

    Parameters
    ----------
    function : str
        Name of the function that the user has called.
    name : str
        Name of the unknown argument.
    known : sequence of str
        Names of the function's arguments.
    """
    similar = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    meant = f"; did you mean {' or '.join(similar)}?" if similar else "."
    return TypeError(f"{function} has no argument {name!r}{meant} It takes {', '.join(known)}")


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Format a table as text. The first column is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def html_table(lines: Iterable[Sequence[object]], title: str = "") -> str:
    """Format a table as HTML; the first line is the head. Columns are aligned as in `text_table`."""
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
    """Yield the tag for the cells of each line: the first line is the head."""
    yield "th"
    while True:
        yield "td"


def public_names(one: object, *internal: str) -> list[str]:
    """Return the public attributes of an object: no leading underscore, and not among ``internal``."""
    return [name for name in object.__dir__(one) if not name.startswith("_") and name not in internal]
