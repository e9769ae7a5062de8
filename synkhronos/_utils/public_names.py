"""Read the public names of a package from its stub, where type checkers find them, too."""

from __future__ import annotations

import ast
import textwrap


def listed(package: str, path: str) -> tuple[dict[str, tuple[str, str | None]], str]:
    """Read the public names of a package from its stub: groups of imports, each below a string with its title.

    Parameters
    ----------
    package : str
    path : str
        Path of the stub.

    Returns
    -------
    homes : dict of str to (str, str or None)
        For each name the module that defines it, and its name there; ``None`` if the name is that of the module.
    text : str
        The titles, with the names of each group.
    """
    with open(path, encoding="utf-8") as file:
        body = ast.parse(file.read()).body[1:]
    homes: dict[str, tuple[str, str | None]] = {}
    groups: dict[str, list[str]] = {}
    title = ""
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            title = str(node.value.value)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                home = (f"{package}.{node.module}", alias.name) if node.module else (f"{package}.{name}", None)
                homes[name] = home
                groups.setdefault(title, []).append(name)
    indent = "    "
    lines = []
    for title, names in groups.items():
        lines += [title, *textwrap.wrap(", ".join(names), 116, initial_indent=indent, subsequent_indent=indent)]
    return homes, "\n".join(lines)
