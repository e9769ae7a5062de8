"""Flags of Theano's that turn the replacements of its C code off: ``THEANO_FLAGS=synkhronos.NAME=False``."""

from __future__ import annotations

import hashlib
import os
from typing import Callable

__all__ = ["offer_switch", "read_support_code"]


def offer_switch(name: str, purpose: str) -> Callable[[], bool] | None:
    """Add the flag ``synkhronos.NAME``, which is on where nobody turns it off.

    Parameters
    ----------
    name, purpose : str

    Returns
    -------
    callable or None
        Tells whether it is on; None if the flag was there already.
    """
    from theano.configparser import AddConfigVar, BoolParam, config

    if hasattr(getattr(config, "synkhronos", None), name):
        return None
    AddConfigVar(f"synkhronos.{name}", purpose, BoolParam(True), in_c_key=False)
    return lambda: bool(getattr(config.synkhronos, name))


def read_support_code(*headers: str) -> tuple[str, str]:
    """Read C++ code beside this module.

    Returns
    -------
    code : str
    version : str
        For the keys of Theano's cache.
    """
    code = ""
    for header in headers:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), header)) as file:
            code += file.read()
    return code, f"synkhronos {hashlib.sha256(code.encode()).hexdigest()[:16]}"
