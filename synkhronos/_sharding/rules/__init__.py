"""Sharding rules: how placements pass through each type of operation.

Most rules list acceptable shardings of an Apply node with an input that is not replicated; see `register_sharding`. A
rule that applies other operations or arguments takes the propagation as well, and returns the outputs with their
placements. Both may return a short reason why they do not apply; then the inputs are gathered. A subclass does not
inherit a rule, except for subclasses of checks and of OpFromGraph that compute as their base does.
"""

from synkhronos._sharding.propagate import MAKERS, RULES
from synkhronos._sharding.rules import axiswise, control_flow, elementwise, indexing, shapes  # each registers its rules
