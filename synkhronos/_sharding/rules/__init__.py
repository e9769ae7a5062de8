"""Sharding rules: how placements pass through each type of operation.

A rule takes the propagation and an Apply node with an input that is not replicated. It returns the outputs with their
placements, or a short reason why it cannot; then the inputs are gathered. Types without a rule are not supported. A
subclass does not inherit a rule, except for subclasses of checks and of OpFromGraph that compute as their base does.
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
