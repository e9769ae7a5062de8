"""Which graph engine this process uses: Theano 1.0.5, or PyTensor, its successor.

The graph engine: all that differs between Theano and PyTensor.

One package for each engine offers the same names: `T` (functions that make expressions), variables, nodes and walks
over graphs, compiled functions, and `ops`, what kinds of operations there are and how they are read. Above, nobody
imports an engine or asks which one it is.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["ENGINES", "TITLE", "choose", "name"]


ENGINES = {"theano": "Theano", "pytensor": "PyTensor"}
_VARIABLE = "SYNKHRONOS_ENGINE"


def choose() -> str:
    """``"theano"`` or ``"pytensor"``: what the environment names; else what is imported; else what is installed.

    Raises
    ------
    RuntimeError
        If both are imported, or the environment names something else.
    ImportError
        If none is installed, or not the one that the environment names.
    """
    asked = os.environ.get(_VARIABLE, "")
    if asked:
        if asked not in ENGINES:
            raise RuntimeError(f"{_VARIABLE}={asked!r}: expected {' or '.join(map(repr, ENGINES))}")
        if not _is_there(asked):
            raise ImportError(f"{_VARIABLE}={asked!r}, and {ENGINES[asked]} is not installed")
        return asked
    imported = [name for name in ENGINES if sys.modules.get(name) is not None and _is_there(name)]
    if len(imported) > 1:
        raise RuntimeError(f"both Theano and PyTensor are imported: name one of them in {_VARIABLE}")
    for name in imported or filter(_is_there, ENGINES):
        return name
    raise ImportError("neither Theano nor PyTensor is installed: installing synkhronos by pip brings one")


def _is_there(name: str) -> bool:
    """Whether there is such a package; a folder of that name, which Python would import, too, has no origin."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module in its place that has no spec
        return False
    return spec is not None and spec.origin is not None


#: ``"theano"`` or ``"pytensor"``.
name = choose()
#: Its name in messages.
TITLE = ENGINES[name]

_backend = import_module(f"synkhronos._backends.{name}")


def __getattr__(attribute: str) -> Any:
    return getattr(_backend, attribute)
