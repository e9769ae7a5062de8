"""What the user has chosen in Theano's flags and configuration files, read as Theano reads them, but without it."""

from __future__ import annotations

import configparser
import contextlib
import os
import shlex
from collections.abc import Mapping

__all__ = ["chosen_in"]


def chosen_in(name: str, environment: Mapping[str, str]) -> str:
    """Say where a flag of Theano's is set.

    Parameters
    ----------
    name : str
        Such as ``"blas.ldflags"`` or ``"cxx"``.
    environment : mapping
        The environment variables.

    Returns
    -------
    str
        ``"THEANO_FLAGS"``, the path of a configuration file, or nothing.
    """
    splitter = shlex.shlex(environment.get("THEANO_FLAGS", ""), posix=True)
    splitter.whitespace, splitter.whitespace_split = ",", True
    with contextlib.suppress(ValueError):  # a quote without an end, of which Theano will tell
        if any("=" in flag and flag.split("=")[0].strip() == name for flag in splitter):
            return "THEANO_FLAGS"
    section, _, option = name.rpartition(".")
    home = environment.get("HOME", "")
    for file in reversed(environment.get("THEANORC", "~/.theanorc").split(os.pathsep)):  # the last one wins
        path = home + file[1:] if file.startswith("~/") else file
        files = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error, UnicodeDecodeError):
            files.read(path)
        if files.has_option(section or "global", option):
            return path
    return ""
