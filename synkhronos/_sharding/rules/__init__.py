"""What each kind of operation does with rows: a table from types of Ops to rules.

A rule is given the walk and a node of which some input is not whole. It returns the outputs with their placements, or
says in a few words why it cannot: then the inputs are gathered. A type that is not in the table is not understood, and
neither are types derived from those that are, but for those of OpFromGraph that compute their inner graphs alone.
"""

from __future__ import annotations

from synkhronos._sharding.propagate import Rule
from synkhronos._sharding.random_streams import OwnDraws
from synkhronos._sharding.rules import (
    control_flow as branches,
)
from synkhronos._sharding.rules import (
    control_flow as loops,
)
from synkhronos._sharding.rules import (
    convolution,
    elementwise,
    indexing,
    joins,
    products,
    reductions,
    shapes,
)
from synkhronos._sharding.rules import (
    convolution as nnet,
)
from synkhronos._sharding.rules import (
    identity as expressions,
)
from synkhronos._sharding.rules import (
    identity as passing,
)
from synkhronos._sharding.rules import (
    joins as sorting,
)
from synkhronos._sharding.rules import (
    products as sparse,
)

__all__ = ["MAKERS", "RULES", "OwnDraws"]

#: For nodes of which some input is not whole.
RULES: dict[type, Rule] = {
    **branches.RULES,
    **elementwise.RULES,
    **passing.RULES,
    **shapes.RULES,
    **reductions.RULES,
    **products.RULES,
    **indexing.RULES,
    **convolution.RULES,
    **nnet.RULES,
    **expressions.RULES,
    **joins.RULES,
    **loops.RULES,
    **sorting.RULES,
    **sparse.RULES,
}

#: For nodes of whole inputs, where they make something of rows × k places, or what another way makes cheaper.
MAKERS: dict[type, Rule] = {**elementwise.MAKERS, **shapes.MAKERS}
