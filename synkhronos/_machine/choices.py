"""What the user has chosen in an engine's flags and configuration files, read as the engine does, but without it."""

from __future__ import annotations

import configparser
import contextlib
import os
import shlex
from collections.abc import Mapping

__all__ = ["chosen_in"]


def chosen_in(name: str, environment: Mapping[str, str], engine: str = "theano") -> str:
    """Say where a flag of the engine's is set.

    Parameters
    ----------
    name : str
        Such as ``"cxx"``, or ``"blas.ldflags"``, which is ``"blas__ldflags"`` of PyTensor.
    environment : mapping
        The environment variables.
    engine : str
        ``"theano"`` or ``"pytensor"``.

    Returns
    -------
    str
        ``"THEANO_FLAGS"`` or ``"PYTENSOR_FLAGS"``, the path of a configuration file, or nothing.
    """
    flags = f"{engine.upper()}_FLAGS"
    splitter = shlex.shlex(environment.get(flags, ""), posix=True)
    splitter.whitespace, splitter.whitespace_split = ",", True
    with contextlib.suppress(ValueError):  # a quote without an end, of which the engine will tell
        if any("=" in flag and flag.split("=")[0].strip() == name for flag in splitter):
            return flags
    section, _, option = name.replace("__", ".").rpartition(".")
    home = environment.get("HOME", "")
    for file in reversed(
        environment.get(f"{engine.upper()}RC", f"~/.{engine}rc").split(os.pathsep)
    ):  # the last one wins
        path = home + file[1:] if file.startswith("~/") else file
        files = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error, UnicodeDecodeError):
            files.read(path)
        if files.has_option(section or "global", option):
            return path
    return ""
