"""Sharding rules: for each type of operation, the placements of its outputs, given those of its inputs.

Most rules list the acceptable shardings of an Apply node; see `register_sharding`. A rule that needs other operations
or arguments takes the `Propagation` as well, builds the outputs in the sharded graph and returns them with placements.
Both may return a reason why they do not apply; the inputs are then made replicated. A subclass does not inherit a rule,
except subclasses of CheckAndRaise and OpFromGraph that do not override how these compute.
"""

from synkhronos._sharding.propagate import REPLICATED_RULES, RULES
from synkhronos._sharding.rules import axiswise, basic, control_flow, indexing  # each registers its rules
