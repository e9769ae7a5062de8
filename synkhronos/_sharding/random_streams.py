"""Random streams that differ between ranks (``random="own"``): each rank draws numbers for its own rows only.

A stream whose draws have one entry per row differs between ranks; every other stream is the same on all ranks. One
stream cannot have draws of both kinds. A stream that differs must be a shared variable. All other draws, such as those
in the steps of a loop, are those of the serial program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import NO_TENSORS, SharedVariable, T, io_toposort, ops
from synkhronos._sharding.placements import ONE, Length, Placed, Replicate, Shard, described
from synkhronos._sharding.propagate import Propagation, Rule


class OwnDraws:
    """Sharding rule for the random draws of one graph, and list of the states that differ between ranks.

    Attributes
    ----------
    rules : dict
        The rule by type of Op; it is for Apply nodes with any placements.
    """

    def __init__(self) -> None:
        self.rules: dict[type, Rule] = dict.fromkeys(ops.DRAWS, self._draw)
        self._is_own: dict[Any, bool] = {}  # by stream
        self._streams: dict[Any, Any] = {}  # by the new states that draws return
        self._mixed: list[Any] = []  # values drawn from a stream that has draws of both kinds

    @property
    def states(self) -> list[Any]:
        """The shared variables that differ between ranks."""
        return [stream for stream, is_own in self._is_own.items() if is_own]

    def check(self, outputs: Sequence[Any], updates: Sequence[tuple[Any, Any]]) -> None:
        """Raise `ValueError` for streams with draws of both kinds, and for other uses of states that differ."""
        if self._mixed:
            raise ValueError(
                f'random="own": {described(self._mixed[0])} is drawn from a stream of which other numbers are drawn, '
                "some for each row, some the same on all ranks: make a RandomStreams for each kind"
            )
        uses = [one for one in outputs if self._differs(one)]
        uses += [var for var, new in updates if self._differs(new) and self._streams.get(new) is not var]
        for node in io_toposort([], [*outputs, *(new for _, new in updates)]):
            if type(node.op) not in self.rules and any(map(self._differs, node.inputs)):
                uses.append(node.outputs[0])
        if uses:
            raise ValueError(
                f'random="own": {described(uses[0])} uses a stream of which each row has its own draws: '
                "make a RandomStreams for each"
            )

    def _differs(self, variable: Any) -> bool:
        return self._is_own.get(self._streams.get(variable, variable), False)

    def _draw(self, propagation: Propagation, node: Any) -> str | Sequence[Placed]:
        state, size, *arguments = node.inputs
        entries = self._shape_of(propagation, node)
        places = [axis for axis, length in enumerate(entries) if propagation.lengths.per_row(length) is not None]
        fits = ops.draws_each(node.op) and all(one.ndim in (0, node.outputs[1].ndim) for one in arguments)
        stream = self._streams.get(state, state)
        is_own = bool(places) and fits and isinstance(stream, SharedVariable)
        if self._is_own.setdefault(stream, is_own) != is_own:
            self._mixed.append(node.outputs[1])
            return "its stream has draws of both kinds"  # `check` raises an error for it
        self._streams[node.outputs[0]] = stream
        if not is_own:
            return propagation.computed_replicated(node, "an argument of a random draw")
        per_row = propagation.lengths.per_row(entries[places[0]])
        assert per_row is not None  # by the choice of `places`
        shard = Shard(places[0], ONE, per_row)
        here = list(map(propagation.lengths.value, entries))
        here[shard.axis] = propagation.lengths.local(per_row)
        local = [propagation.sharded(one, shard, broadcasts=True) for one in arguments]
        if not isinstance(size.type, NO_TENSORS):
            size = T.cast(ops.MakeVector("int64")(*here), size.dtype)
        new_state, drawn = node.op.make_node(propagation.new(state), size, *local).outputs
        return [Placed(new_state, Replicate()), Placed(drawn, shard)]

    @staticmethod
    def _shape_of(propagation: Propagation, node: Any) -> Sequence[Length]:
        """Return the known lengths of a draw's shape, from its size argument or else from its other arguments."""
        _, size, *arguments = node.inputs
        if not isinstance(size.type, NO_TENSORS):
            return propagation.lengths.vector(size) or ()
        drawn, dims = node.outputs[1], [propagation.lengths.dims(one) for one in arguments if one.ndim]
        if any(len(each) != drawn.ndim for each in dims):
            return ()
        return [next((each[axis] for each in dims if each[axis] != ONE), ONE) for axis in range(drawn.ndim)]
