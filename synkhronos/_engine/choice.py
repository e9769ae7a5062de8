"""Which graph engine this process uses: Theano 1.0.5, or PyTensor, its successor."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

__all__ = ["ENGINES", "choose"]

ENGINES = {"theano": "Theano", "pytensor": "PyTensor"}
_VARIABLE = "SYNKHRONOS_ENGINE"


def choose() -> str:
    """``"theano"`` or ``"pytensor"``: what the environment names; else what is imported; else what is installed.

    Raises
    ------
    RuntimeError
        If both are imported, or the environment names something else.
    ImportError
        If none is installed.
    """
    asked = os.environ.get(_VARIABLE, "")
    if asked:
        if asked not in ENGINES:
            raise RuntimeError(f"{_VARIABLE}={asked!r}: expected {' or '.join(map(repr, ENGINES))}")
        return asked
    imported = [name for name in ENGINES if name in sys.modules]
    if len(imported) > 1:
        raise RuntimeError(f"both Theano and PyTensor are imported: name one of them in {_VARIABLE}")
    for name in imported or ENGINES:
        spec = None if imported else find_spec(name)
        if imported or (spec and spec.origin):  # a folder of that name on the path has no origin
            return name
    raise ImportError("neither Theano nor PyTensor is installed: pip install synkhronos brings the one for this Python")
