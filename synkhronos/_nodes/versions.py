"""What must be the same on all machines of a session, and what of it is not."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from synkhronos import _backends

__all__ = ["describe", "tell_differences"]


def describe() -> dict[str, str]:
    """The versions on this machine, and the type that numbers have by default."""
    return {
        "Python": platform.python_version(),
        "Synkhronos": _version_of("synkhronos"),
        _backends.TITLE: _version_of(_backends.name),
        "NumPy": np.__version__,
        "floatX": _backends.T.scalar().dtype,
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # its folder is on the path, and that is all
        return "of unknown version"


def tell_differences(machines: Sequence[dict[str, str]], hosts: Sequence[str]) -> str:
    """Tell in one line what is not on every machine as it is on the first one; empty if all is.

    Parameters
    ----------
    machines : list of dict
        What `describe` says on each.
    hosts : list of str
        Their names.
    """
    told = []
    for machine, (found, host) in enumerate(zip(machines, hosts)):
        for name in dict.fromkeys([*machines[0], *found]):
            first, here = machines[0].get(name, "missing"), found.get(name, "missing")
            if here != first:
                told.append(f"{name} is {here} on machine {machine} ({host}) and {first} on machine 0 ({hosts[0]})")
    return "; ".join(told)
