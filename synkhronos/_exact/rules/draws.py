"""Random draws with a stream of its own for each rank, which draws what it needs and no more.

Whether a stream differs between ranks is for all its draws alike: those of a size that has the rows take one that does,
all others one that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import theano.tensor as T
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import io_toposort
from theano.sandbox.rng_mrg import mrg_uniform
from theano.tensor.opt import MakeVector
from theano.tensor.raw_random import RandomFunction

from synkhronos._exact.lines import described
from synkhronos._exact.placements import ONE, Placed, Replicate, Shard
from synkhronos._exact.walk import Rule, Walk

__all__ = ["OwnDraws"]


class OwnDraws:
    """The rule for draws of a graph, and which states differ between ranks then.

    Attributes
    ----------
    rules : dict
        For nodes whose inputs are whole, and for others.
    """

    def __init__(self) -> None:
        self.rules: dict[type, Rule] = dict.fromkeys((RandomFunction, mrg_uniform), self._draw)
        self._is_own: dict[Any, bool] = {}

    @property
    def states(self) -> list[Any]:
        """The shared variables that differ between ranks."""
        return [state for state, is_own in self._is_own.items() if is_own and isinstance(state, SharedVariable)]

    def check(self, expressions: Sequence[Any]) -> None:
        """Refuse what else has to do with states that differ, such as a loop that draws from one of them."""
        for node in io_toposort([], list(expressions)):
            if type(node.op) not in self.rules and any(map(self._is_own.get, node.inputs)):
                raise ValueError(
                    f'random="own": {described(node.outputs[0])} uses a stream of which each row has its own draws: '
                    "make a RandomStreams for each"
                )

    def _draw(self, walk: Walk, node: Any) -> str | Sequence[Placed]:
        state, size, *arguments = node.inputs
        entries = walk.lengths.vector(size) or ()
        places = [axis for axis, length in enumerate(entries) if walk.lengths.per_row(length) is not None]
        fits = all(one.ndim in (0, node.outputs[1].ndim) for one in arguments)
        is_known = state in self._is_own or isinstance(state, SharedVariable)
        is_own = bool(places) and fits and is_known
        if self._is_own.setdefault(state, is_own) != is_own:
            raise ValueError(
                f'random="own": {described(node.outputs[1])} is drawn from a stream of which other numbers are drawn, '
                "some for each row, some the same on all ranks: make a RandomStreams for each kind"
            )
        self._is_own[node.outputs[0]] = is_own
        if not is_own:
            return walk.computed_whole(node, "an argument of a random draw")
        per_row = walk.lengths.per_row(entries[places[0]])
        assert per_row is not None
        shard = Shard(places[0], ONE, per_row)
        here = list(map(walk.lengths.value, entries))
        here[shard.axis] = walk.lengths.here(per_row)
        parts = [walk.part(one, shard, broadcasts=True) if one.ndim else walk.whole(one) for one in arguments]
        new_state, drawn = node.op(walk.new(state), T.cast(MakeVector("int64")(*here), size.dtype), *parts)
        return [Placed(new_state, Replicate()), Placed(drawn, shard)]
