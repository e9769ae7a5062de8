"""The graph engine: all that differs between Theano and PyTensor.

One package for each engine offers the same names: `T` (functions that make expressions), variables, nodes and walks
over graphs, compiled functions, and `ops`, what kinds of operations there are and how they are read. Above, nobody
imports an engine or asks which one it is.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from synkhronos._engine.choice import ENGINES, choose

__all__ = ["TITLE", "name"]

#: ``"theano"`` or ``"pytensor"``.
name = choose()
#: Its name in messages.
TITLE = ENGINES[name]

_engine = import_module(f"synkhronos._engine.on_{name}")


def __getattr__(attribute: str) -> Any:
    return getattr(_engine, attribute)
