"""The graph backend of this process: Theano 1.0.5, or its successor PyTensor.

One package for each backend provides the same names: `T` (functions that make expressions), variables, Apply nodes and
graph traversal, compiled functions, and `ops` (the classes of operations, and functions that read them). Code above
this package imports no backend, and does not ask which one is in use.
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
    """Return ``"theano"`` or ``"pytensor"``: the one the environment names, else the imported, else the installed one.

    Raises
    ------
    RuntimeError
        If both are imported, or the environment names something else.
    ImportError
        If none is installed, or the one that the environment names is not.
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
    """Return whether a package exists; a folder of that name, which Python would import as well, has no origin."""
    try:
        spec = find_spec(name)
    except ValueError:  # `sys.modules` holds a module without a spec
        return False
    return spec is not None and spec.origin is not None


#: ``"theano"`` or ``"pytensor"``.
name = choose()
#: The backend's name in messages.
TITLE = ENGINES[name]

_backend = import_module(f"synkhronos._backends.{name}")


def __getattr__(attribute: str) -> Any:
    return getattr(_backend, attribute)
