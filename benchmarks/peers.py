"""Detect which of the contestants' packages are installed, without importing them."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = {"torch": "PyTorch", "mpich": "MPICH", "lasagne": "Lasagne", "demos.resnet.models": "demos/resnet"}


def missing(needs: Sequence[str]) -> str | None:
    """Return a message that names the first of these packages that is not installed, or None."""
    for name in needs:
        found = find_mpiexec() if name == "mpich" else find_module(name)
        if not found:
            return f"{NAMES.get(name, name)} is not installed"
    return None


def find_module(name: str) -> bool:
    """Return whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def find_mpiexec() -> str | None:
    """Return the path of ``mpiexec`` next to this Python, where the package ``mpich`` installs it, or on the PATH."""
    installed = Path(sys.prefix) / "bin" / "mpiexec"
    return str(installed) if installed.exists() else shutil.which("mpiexec")
