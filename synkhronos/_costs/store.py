"""File of measured costs: the constants of machines, and the times of functions for which the model does not suffice.

The file is JSON: ``{version: {"machines": {machine: constants}, "functions": {machine: {graph: times}}}}``. A machine
is named by a line of text that has all that its constants depend on. Entries of other machines and of other versions
are kept. The file is replaced as a whole, so readers see either the old or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import IO, Any

from synkhronos._costs.model import Machine, machine_from
from synkhronos._utils.resources import cache_folder

_logger = logging.getLogger("synkhronos")

#: Version of the measurements. Entries of other versions are not read.
VERSION = "1"

#: Part of the time of this process's cores. If other programs use more, costs are provisional: a later program that
#: finds the cores free measures them again.
MOST_BUSY = 0.1

_LOCK_SECONDS = 5.0

#: Environment variable with the path of the file.
VARIABLE = "SYNKHRONOS_COSTS"


def path_of_store(environment: Mapping[str, str]) -> str:
    """Return the path of the file: ``SYNKHRONOS_COSTS``, or ``synkhronos/costs.json`` among the user's caches.

    It is empty if there is no folder for caches, because the user has no home.
    """
    if environment.get(VARIABLE):
        return os.path.abspath(environment[VARIABLE])
    folder = cache_folder(environment.get("XDG_CACHE_HOME", ""), environment.get("HOME") or os.path.expanduser("~"))
    return os.path.join(folder, "costs.json") if folder else ""


class Store:
    """The file of measured costs. One that cannot be read counts as empty; one that cannot be written stays as it is.

    Parameters
    ----------
    path : str
        Path of the file; empty: costs are kept in this object only.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path) if path else ""
        self._content = self._read()

    def machines(self) -> dict[str, Machine]:
        """Return the constants of all machines, by name. Damaged entries are left out."""
        found = {}
        for name, entry in _entries(self._own(), "machines").items():
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                found[name] = machine_from(entry)
        return found

    def times(self, machine: str, graph: str) -> dict[str, list[list[float]]] | None:
        """Return the measured times of a function: for each plan, pairs of the number of rows and the seconds.

        The result is empty if the function could not be timed, and ``None`` if that was not tried.
        """
        entry: Any = _entries(_entries(self._own(), "functions"), machine).get(graph)
        try:
            return {
                str(plan): [[_positive(rows), _positive(seconds)] for rows, seconds in points]
                for plan, points in entry.items()
            }
        except (AttributeError, TypeError, ValueError):
            return None

    def is_provisional(self, *names: str) -> bool:
        """Return whether a value, given by its kind and further names, was measured while other programs were busy."""
        found: Any = self._own()
        for name in ("provisional", *names):
            found = _entries(found, name)
        return bool(found)

    def put(self, *names: str, value: Any, is_provisional: bool = False) -> None:
        """Store a value under its kind and further names, in the file and in this object."""

        def changed(content: dict[str, Any]) -> dict[str, Any]:
            content = _with(content, (VERSION, *names), value)
            return _with(content, (VERSION, "provisional", *names), {"busy": True} if is_provisional else {})

        if not self._path:
            self._content = changed(self._content)
            return
        try:
            folder = os.path.dirname(self._path)
            os.makedirs(folder, exist_ok=True)
            with open(f"{self._path}.lock", "ab") as lock:
                _lock(lock)
                self._content = changed(self._read())
                new = f"{self._path}.new"
                with open(new, "w") as file:
                    json.dump(self._content, file, indent=1)
                os.replace(new, self._path)
        except OSError as error:
            self._content = changed(self._content)
            _logger.warning(
                "cannot keep measured costs in %s, so each program measures them again: %s", self._path, error
            )

    def _own(self) -> dict[str, Any]:
        """Return the entries of this version."""
        return _entries(self._content, VERSION)

    def _read(self) -> dict[str, Any]:
        if not os.path.isfile(self._path):
            return {}
        try:
            with open(self._path) as file:
                content = json.load(file)
        except (OSError, ValueError) as error:
            _logger.warning("ignored %s, which should have measured costs: %s", self._path, error)
            return {}
        return content if isinstance(content, dict) else {}


def _lock(file: IO[bytes]) -> None:
    """Lock a file. The kernel releases the lock if its holder dies; raise `OSError` if a living one does not."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return


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
