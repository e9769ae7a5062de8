"""Collectives inside compiled functions: operations, their state at run time, gradients and graph rewrites."""

from synkhronos._graph.ops.collective_op import UNNUMBERED, Collective
from synkhronos._graph.ops.expressions import averaged, gathered, reduced, summed
from synkhronos._graph.ops.rank_context import BROADCAST, Counted, RankContext, current
from synkhronos._graph.ops.rewrites import (
    Cut,
    after_collectives,
    collectives_of,
    compiled_has_collectives,
    cut,
    depends_on,
    has_collectives,
    has_collectives_in_loop,
    times_of_operands,
)
