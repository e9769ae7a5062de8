"""Helpers that do not depend on a session: interrupts, threads, progress bars, row arithmetic, display, rendezvous.

This module itself imports only the standard library, because it is imported with the package.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import textwrap
import warnings


def names_in_stub(package: str, path: str) -> tuple[dict[str, tuple[str, str | None]], str]:
    """Read the public names of a package from its stub.

    The stub consists of groups of imports, each below a string that is the title of the group.

    Parameters
    ----------
    package : str
        Name of the package.
    path : str
        Path of the stub.

    Returns
    -------
    homes : dict of str to (str, str or None)
        Module that defines each public name, and the name in that module; ``None`` if the public name is the module.
    text : str
        Titles of the groups, each followed by its names, for a docstring.
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


def warn_of_unusable_pymc() -> None:
    """Warn if PyMC is installed, and needs a later NumPy than Theano allows.

    pip installs Theano with a NumPy that suits it, although an installed PyMC then does not work.
    """
    if sys.version_info >= (3, 12) or importlib.util.find_spec("pymc") is None:
        return
    from importlib import metadata

    try:
        found = metadata.version("numpy")
        bounds = [re.match(r"numpy[^;]*>=\s*(\d+(?:\.\d+)*)", one) for one in metadata.requires("pymc") or ()]
    except metadata.PackageNotFoundError:
        return
    wanted = [bound[1] for bound in bounds if bound and _numbers(bound[1]) > _numbers(found)]
    if wanted:
        warnings.warn(
            f"PyMC does not work in this environment, because it needs NumPy {wanted[0]} or later, and Theano needs "
            f"the installed NumPy {found}: install PyMC in a new environment, with Python 3.12 or later",
            RuntimeWarning,
            stacklevel=3,
        )


def _numbers(version: str) -> list[int]:
    """Return the numbers at the start of a version."""
    start = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in start[0].split(".")] if start else []
