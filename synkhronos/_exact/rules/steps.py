"""The steps of a Scan: its inner graph, walked over with given placements of the states.

What the steps have of the graph outside, the user's variables, stands in for the inner ones: so the walk knows it all
by now, and what is gathered, reduced or cut of it is so once, before the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from synkhronos._engine import NO_TENSORS, Apply, Constant, T, ancestors, io_toposort, ops, substituted
from synkhronos._exact.placements import Length, Partial, Placed, Placement, Replicate, Shard
from synkhronos._exact.rules.reductions import is_zero
from synkhronos._exact.walk import Walk

__all__ = ["Steps"]

_WHOLE = "a state that is whole"


class Steps:
    """One try.

    Parameters
    ----------
    walk : Walk
    node : Apply
        Of a Scan in the user's graph.
    placements : list of Placement
        Of one entry of each state, in the order of `states_of`.
    """

    def __init__(self, walk: Walk, node: Any, placements: Sequence[Placement]) -> None:
        op = node.op
        self._walk, self._node, self._placements = walk, node, placements
        self._entries: list[Any] = []  # what differs from step to step
        self._n_met = len(walk.met)
        replaced = {}
        for inner, outer in zip(op.inner_seqs(op.inputs), op.outer_seqs(node.inputs)):
            replaced[inner] = self._enter(inner, outer, _of_entry(walk.placement(outer)))
        self._states = []
        for taps, outer, placement in zip(_taps(op), self.states_of(node), placements):
            for inner in taps:
                replaced[inner] = self._enter(inner, outer, placement)
            self._states.append([replaced[inner] for inner in taps])
        for inner in op.inner_shared(op.inputs):
            replaced[inner] = self._enter(inner, None, Replicate())
        for inner, outer in zip(op.inner_non_seqs(op.inputs), op.outer_non_seqs(node.inputs)):
            replaced[inner] = inner.type.filter_variable(outer)
        self._outputs = substituted(op.inputs, op.outputs, replaced)
        walk.run(self._outputs)
        self._new_states = _grouped(op, self._outputs)

    @staticmethod
    def states_of(node: Any) -> list[Any]:
        """What a Scan takes for its states, with the values of all steps: each with an axis of time."""
        op, inputs = node.op, node.inputs
        return [*op.outer_mitmot(inputs), *op.outer_mitsot(inputs), *op.outer_sitsot(inputs)]

    def _enter(self, inner: Any, outer: Any, placement: Placement) -> Any:
        entry = inner.clone()
        self._entries.append(entry)
        if outer is not None:
            for axis, length in enumerate(self._walk.lengths.dims(outer)[1:]):
                if not entry.broadcastable[axis]:
                    self._walk.lengths.set_length(entry, axis, length)
        self._walk.put(entry, Placed(entry, placement))
        return entry

    # -- what came of it

    def rows_of(self, i: int) -> Shard | None:
        """The rows that a state has after a step, if any, with places that are the same in all steps."""
        found = [self._walk.placement(new) for new in self._new_states[i]]
        shard = next((one for one in found if isinstance(one, Shard)), None)
        return shard if shard is not None and self._are_fixed(shard.outer, shard.inner) else None

    def keeps(self, i: int) -> bool:
        """Whether a state is placed after a step as it was before; whole ones may be made whole.

        A sum that waits must not be needed within a step.
        """
        placement = self._placements[i]
        if isinstance(placement, Replicate):
            return True
        if isinstance(placement, Partial) and any(map(self._walk.was_made_whole, self._states[i])):
            return False
        return all(self._walk.placement(new) == placement for new in self._new_states[i])

    def meets_for(self, i: int) -> bool:
        """Whether ranks meet in each step for the sake of a state."""
        inside = self._inside([])
        results = {one.result for one in self._walk.met[self._n_met :] if one.result in inside}
        return all(
            isinstance(self._walk.placement(new), Partial) or not results.isdisjoint(ancestors([self._walk.new(new)]))
            for new in self._new_states[i]
        )

    def _inside(self, more: Iterable[Any]) -> set[Any]:
        """All that is computed in each step anew."""
        outputs = [*map(self._walk.new, self._outputs), *(one.result for one in self._walk.met[self._n_met :]), *more]
        found = set(self._entries)
        for node in io_toposort(self._entries, outputs):
            if not found.isdisjoint(node.inputs):
                found.update(node.outputs)
        return found

    def _are_fixed(self, *lengths: Length) -> bool:
        """Whether lengths are known outside of the loop."""
        return set(self._entries).isdisjoint(ancestors(list(map(self._walk.lengths.value, lengths))))

    # -- the Scan

    def scan(self) -> list[Placed]:
        """The divided Scan's outputs, with their placements."""
        walk, op, inputs = self._walk, self._node.op, self._node.inputs
        outputs, placements = self._divided()
        outside = self._outside(outputs)
        within = [one.type() for one in outside]
        steps = substituted([*self._entries, *outside], outputs, dict(zip(outside, within)))
        divided = ops.scan_like(op, [*self._entries, *within], steps)
        given = [
            walk.whole(inputs[0], "the number of steps"),
            *map(self._sequence, op.outer_seqs(inputs)),
            *map(self._state, self.states_of(self._node), self._placements),
            *(walk.whole(one) for one in op.outer_shared(inputs)),
            *(walk.whole(one) for one in op.outer_nitsot(inputs)),
            *outside,
        ]
        results = divided(*given, return_list=True)
        walk.meet_within(results[0], self._inside(outputs))
        self._tell_lengths()
        return [Placed(result, placement) for result, placement in zip(results, placements)]

    def _divided(self) -> tuple[list[Any], list[Placement]]:
        """What each step gives, and how the Scan's outputs are placed."""
        walk, op = self._walk, self._node.op
        outputs: list[Any] = []
        placements: list[Placement] = []
        for news, placement in zip(self._new_states, self._placements):
            outputs += [self._as_before(new, placement) for new in news]
            placements.append(_of_all(placement))
        for output in op.inner_nitsot_outs(self._outputs):
            placement = walk.placement(output)
            if isinstance(placement, Shard) and not self._are_fixed(placement.outer, placement.inner):
                outputs.append(walk.whole(output, "its places are known within the loop alone"))
                placements.append(Replicate())
            else:
                outputs.append(walk.new(output))
                placements.append(_of_all(placement))
        outputs += [walk.whole(one) for one in self._outputs[len(outputs) :]]  # of shared variables; a condition
        return outputs, [*placements, *[Replicate()] * op.n_shared_outs]

    def _as_before(self, new: Any, placement: Placement) -> Any:
        return self._walk.whole(new, _WHOLE) if isinstance(placement, Replicate) else self._walk.new(new)

    def _sequence(self, outer: Any) -> Any:
        steps_over_rows = isinstance(placement := self._walk.placement(outer), Shard) and placement.axis == 0
        return self._walk.whole(outer, "steps over rows") if steps_over_rows else self._walk.new(outer)

    def _state(self, outer: Any, placement: Placement) -> Any:
        """What a state begins with, of the placement of its entries."""
        walk = self._walk
        if isinstance(placement, Shard):
            return walk.part(outer, placement.moved(placement.axis + 1))
        if isinstance(placement, Partial) and isinstance(walk.placement(outer), Partial):
            return walk.new(outer)
        whole = walk.whole(outer, _WHOLE)
        if isinstance(placement, Replicate) or _begins_with_zero(outer):
            return whole
        return T.switch(T.eq(walk.rows.first, 0), whole, T.zeros_like(whole))  # of those that count, one has row 0

    def _outside(self, outputs: Sequence[Any]) -> list[Any]:
        """What is computed before the loop, of all that steps need; Theano's numbers that are no tensors follow it."""
        inside = self._inside(outputs)
        waiting = [one for one in outputs if one not in inside]
        for node in io_toposort(self._entries, outputs):
            if not inside.isdisjoint(node.outputs):
                waiting += [one for one in node.inputs if one not in inside]
        found: dict[Any, None] = {}
        while waiting:
            one = waiting.pop(0)
            if isinstance(one, Constant) or one in found:
                continue
            if one.owner is not None and isinstance(one.type, NO_TENSORS):
                waiting += one.owner.inputs
            else:
                found[one] = None
        return list(found)

    def _tell_lengths(self) -> None:
        """Take notice of how long the outputs are, but for those of a loop that may end before."""
        op, lengths, outputs = self._node.op, self._walk.lengths, self._node.outputs
        states = self.states_of(self._node)
        for output, outer in zip(outputs, states):
            for axis, length in enumerate(lengths.dims(outer)):
                if not output.broadcastable[axis] and (axis or not op.as_while):
                    lengths.set_length(output, axis, length)
        of_steps = zip(op.outer_nitsot(self._node.inputs), op.inner_nitsot_outs(self._outputs))
        for output, (n_steps, inner) in zip(outputs[len(states) :], of_steps):
            for axis, length in enumerate(lengths.dims(inner), 1):
                if not output.broadcastable[axis] and self._are_fixed(length):
                    lengths.set_length(output, axis, length)
            length = lengths.scalar(n_steps)
            if not op.as_while and lengths.is_sure(length):
                lengths.set_length(output, 0, length)


def _of_entry(placement: Placement) -> Placement:
    """The placement of an entry of a sequence; of those that are made whole for the loop, too."""
    if isinstance(placement, Shard):
        return placement.moved(placement.axis - 1) if placement.axis else Replicate()
    return placement


def _of_all(placement: Placement) -> Placement:
    """The placement of all entries, which lie along a new axis 0."""
    return placement.moved(placement.axis + 1) if isinstance(placement, Shard) else placement


def _taps(op: Any) -> list[list[Any]]:
    """The inner inputs of each state."""
    inner = [*op.inner_mitmot(op.inputs), *op.inner_mitsot(op.inputs), *op.inner_sitsot(op.inputs)]
    return [[inner.pop(0) for _ in taps] for taps in op.tap_array]


def _grouped(op: Any, outputs: Sequence[Any]) -> list[list[Any]]:
    """The inner outputs of each state."""
    rest = list(outputs)
    counts = [*map(len, op.mitmot_out_taps()), *[1] * (op.n_mit_sot + op.n_sit_sot)]
    return [[rest.pop(0) for _ in range(n)] for n in counts]


def _begins_with_zero(outer: Any) -> bool:
    """Whether all that a state begins with is zero, but for what its steps write."""
    node = outer.owner
    if node is not None and isinstance(node.op, ops.IncSubtensor) and isinstance(node.inputs[0].owner, Apply):
        return isinstance(node.inputs[0].owner.op, ops.AllocEmpty) and is_zero(node.inputs[1])
    return is_zero(outer)
