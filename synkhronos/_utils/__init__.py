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
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


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


class KeyedCache(Generic[Value]):
    """Cache that holds, for each slot, the value for the latest key.

    A value is returned only for a key that equals the one it was computed for. The key must hold all that the value
    depends on; a version number stands for state that can change. No event has to invalidate an entry, then.

    Keys and values must not be changed.

    Parameters
    ----------
    most_slots : int, optional
        Limit of the number of slots. The oldest one is dropped when there would be more.
    """

    __slots__ = ("_entries", "_most_slots")

    def __init__(self, most_slots: int | None = None) -> None:
        self._entries: dict[Hashable, tuple[Any, Value]] = {}
        self._most_slots = most_slots

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, slot: Hashable, key: Any) -> Value | None:
        """Return the value of a slot; ``None`` if there is none for this key."""
        entry = self._entries.get(slot)
        if entry is not None and (entry[0] is key or entry[0] == key):
            return entry[1]
        return None

    def put(self, slot: Hashable, key: Any, value: Value) -> Value:
        """Store a slot's value for a key, in place of the one for the previous key; return the value."""
        if len(self._entries) == self._most_slots and slot not in self._entries:
            del self._entries[next(iter(self._entries))]
        self._entries[slot] = key, value
        return value

    def clear(self) -> None:
        """Drop all entries, so that they keep no memory alive."""
        self._entries.clear()
