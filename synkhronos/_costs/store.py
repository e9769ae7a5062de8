"""File of measured costs: the constants of machines, and the times of functions for which the model does not suffice.

The file is JSON: ``{"version": 1, "machines": {machine: constants}, "functions": {machine: {graph: times}}}``. A
machine is named by a line of text that has all that its constants depend on. Entries of other machines are kept, so a
file can be copied from one machine to another. It is replaced as a whole, so readers see either the old or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from synkhronos._costs.model import Machine, machine_from

_logger = logging.getLogger("synkhronos")

#: Version of the measurements. Files of other versions are not read.
VERSION = 1

#: Part of the time of this process's cores. If other programs use more, costs are provisional: a later program that
#: finds the cores free measures them again.
MOST_BUSY = 0.1

#: Environment variable with the path of the file.
VARIABLE = "SYNKHRONOS_COSTS"


def path_of_store(environment: Mapping[str, str]) -> str:
    """Return the path of the file: ``SYNKHRONOS_COSTS``, or ``synkhronos/costs.json`` among the user's caches."""
    caches = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):
        caches = os.path.join(environment.get("HOME") or os.path.expanduser("~"), ".cache")
    return os.path.abspath(environment.get(VARIABLE) or os.path.join(caches, "synkhronos", "costs.json"))


class Store:
    """The file of measured costs. One that cannot be read counts as empty; one that cannot be written stays as it is.

    Parameters
    ----------
    path : str
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._content = self._read()

    def machines(self) -> dict[str, Machine]:
        """Return the constants of all machines, by name. Damaged entries are left out."""
        found = {}
        for name, entry in _entries(self._content, "machines").items():
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                found[name] = machine_from(entry)
        return found

    def times(self, machine: str, graph: str) -> dict[str, list[list[float]]] | None:
        """Return the measured times of a function: for each plan, pairs of the number of rows and the seconds.

        The result is empty if the function could not be timed, and ``None`` if that was not tried.
        """
        entry: Any = _entries(_entries(self._content, "functions"), machine).get(graph)
        try:
            return {
                str(plan): [[_positive(rows), _positive(seconds)] for rows, seconds in points]
                for plan, points in entry.items()
            }
        except (AttributeError, TypeError, ValueError):
            return None

    def is_provisional(self, *names: str) -> bool:
        """Return whether a value, given by its kind and further names, was measured while other programs were busy."""
        found: Any = self._content
        for name in ("provisional", *names):
            found = _entries(found, name)
        return bool(found)

    def put(self, *names: str, value: Any, is_provisional: bool = False) -> None:
        """Store a value under its kind and further names, in the file and in this object."""

        def changed(content: dict[str, Any]) -> dict[str, Any]:
            content = _with({**content, "version": VERSION}, names, value)
            return _with(content, ("provisional", *names), {"busy": True} if is_provisional else {})

        try:
            folder = os.path.dirname(self._path)
            os.makedirs(folder, exist_ok=True)
            with open(f"{self._path}.lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if this process dies
                self._content = changed(self._read())
                descriptor, new = tempfile.mkstemp(dir=folder)
                try:
                    with open(descriptor, "w") as file:
                        json.dump(self._content, file, indent=1)
                    os.replace(new, self._path)
                except BaseException:
                    os.unlink(new)
                    raise
        except OSError as error:
            self._content = changed(self._content)
            _logger.warning(
                "cannot keep measured costs in %s, so each program measures them again: %s", self._path, error
            )

    def _read(self) -> dict[str, Any]:
        try:
            with open(self._path) as file:
                content = json.load(file)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _logger.warning("ignored %s, which should have measured costs: %s", self._path, error)
            return {}
        return content if isinstance(content, dict) and content.get("version") == VERSION else {}


def _with(content: dict[str, Any], names: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of nested dicts with a new value."""
    first, *rest = names
    return {**content, first: _with(_entries(content, first), tuple(rest), value) if rest else value}


def _entries(content: Any, name: str) -> dict[str, Any]:
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def _positive(number: Any) -> float:
    if not 0 <= number < math.inf:
        raise ValueError
    return float(number)
