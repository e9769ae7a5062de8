"""What each kind of operation does with rows: a table from types of Ops to rules.

A rule is given the walk and a node of which some input is not whole. It returns the outputs with their placements, or
says in a few words why it cannot: then the inputs are gathered. A type that is not in the table is not understood, and
neither are types derived from those that are, but for those of OpFromGraph that compute their inner graphs alone.
"""

from __future__ import annotations

from synkhronos._sharding.propagate import MAKERS, RULES
from synkhronos._sharding.rules import (  # noqa: F401  (each registers its rules)
    control_flow,
    convolution,
    elementwise,
    identity,
    indexing,
    joins,
    products,
    reductions,
    shapes,
)

__all__ = ["MAKERS", "RULES"]
