"""Exact functions: a graph is divided by its rows, with a collective exactly where rows meet."""

from __future__ import annotations

from synkhronos._exact.lengths import Rows
from synkhronos._exact.rules import MAKERS, RULES
from synkhronos._exact.walk import Collectives, Walk

__all__ = ["MAKERS", "RULES", "Collectives", "Rows", "Walk"]
