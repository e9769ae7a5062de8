"""Sharding rules of Scan, IfElse, and operations with an inner graph or an equivalent expression.

Scan: placements are propagated through the inner graph by the same rules, for assumed placements of the states. Inner
variables that do not change between steps are replaced by the outer variables for which they stand. A collective on
these therefore runs once, before the loop.

A fixed-point iteration finds placements of the states that do not change in a step. A state that is sharded before the
loop or after a step is assumed to be sharded. A sum over rows to which steps only add is assumed to be partial until
the end of the loop. All other states are replicated. The iteration terminates, because each state becomes sharded at
most once, and replicated at most once.

IfElse: all ranks must take the same branch, so the condition is replicated. The results of both branches get the same
placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable

from synkhronos._backends import (
    NO_TENSORS,
    Constant,
    T,
    TensorType,
    ancestors,
    clone,
    io_toposort,
    ops,
    retyped,
    substituted,
)
from synkhronos._sharding.placements import (
    Length,
    Partial,
    Placed,
    Placement,
    Replicate,
    Shard,
    can_reduce,
    copied,
    is_zero,
    placed,
)
from synkhronos._sharding.propagate import RULES, Propagation, Rule, is_of_the_user

_REPLICATED_STATE = "a state that is replicated"


class Steps:
    """Propagation through one step of a Scan, for assumed placements of its states.

    Parameters
    ----------
    propagation : Propagation
    node : Apply
        Apply node of a Scan in the user's graph.
    loop : Loop
        The inputs, states and outputs of the Scan.
    placements : list of Placement
        Placement of one entry of each state.
    """

    def __init__(self, propagation: Propagation, node: Any, loop: Any, placements: Sequence[Placement]) -> None:
        self._propagation, self._node, self._loop, self._placements = propagation, node, loop, placements
        self._entries: list[Any] = []  # variables that differ from step to step
        self._n_collectives = len(propagation.collectives)
        replaced = {}
        for inner, outer in loop.sequences:
            replaced[inner] = self._enter(inner, outer, _of_entry(propagation.placement(outer)))
        self._states = []
        for (taps, outer), placement in zip(loop.states, placements):
            for inner in taps:
                replaced[inner] = self._enter(inner, outer, placement)
            self._states.append([replaced[inner] for inner in taps])
        for inner, _ in loop.shared:
            replaced[inner] = self._enter(inner, None, Replicate())
        for inner, outer in loop.others:
            replaced[inner] = inner.type.filter_variable(outer)
        self._outputs = substituted(loop.inputs, loop.outputs, replaced)
        propagation.run(self._outputs)
        self._new_states = loop.new_states(self._outputs)

    def _enter(self, inner: Any, outer: Any, placement: Placement) -> Any:
        entry = inner.clone()
        if isinstance(placement, Shard) and not inner.broadcastable[placement.axis]:
            entry = retyped(inner, free=(placement.axis,))(inner.name)
        self._entries.append(entry)
        if outer is not None:
            self._propagation.lengths.set_dims(entry, self._propagation.lengths.dims(outer)[1:])
        self._propagation.put(entry, Placed(entry, placement))
        return entry

    # -- resulting placements

    def rows_of(self, i: int) -> Shard | None:
        """Return the sharding of a state after a step; ``None`` if it has none, or if it depends on the step."""
        found = [self._propagation.placement(new) for new in self._new_states[i]]
        shard = next((one for one in found if isinstance(one, Shard)), None)
        return shard if shard is not None and self._are_fixed(shard.outer, shard.inner) else None

    def keeps(self, i: int) -> bool:
        """Return whether a state has the same placement before and after a step.

        A state can always stay replicated, by a collective. A partial state must not be reduced within a step.
        """
        placement = self._placements[i]
        if isinstance(placement, Replicate):
            return True
        if isinstance(placement, Partial) and any(map(self._propagation.was_replicated, self._states[i])):
            return False
        return all(self._propagation.placement(new) == placement for new in self._new_states[i])

    def needs_collective(self, i: int) -> bool:
        """Return whether each step needs a collective to keep a state replicated."""
        inside = self._inside([])
        results = {one.result for one in self._propagation.collectives[self._n_collectives :] if one.result in inside}
        return all(
            isinstance(self._propagation.placement(new), Partial)
            or not results.isdisjoint(ancestors([self._propagation.new(new)]))
            for new in self._new_states[i]
        )

    def _inside(self, more: Iterable[Any]) -> set[Any]:
        """Return all variables that each step computes."""
        outputs = [
            *map(self._propagation.new, self._outputs),
            *(one.result for one in self._propagation.collectives[self._n_collectives :]),
            *more,
        ]
        found = set(self._entries)
        for node in io_toposort(self._entries, outputs):
            if not found.isdisjoint(node.inputs):
                found.update(node.outputs)
        return found

    def _are_fixed(self, *lengths: Length) -> bool:
        """Return whether lengths are known outside the loop."""
        return set(self._entries).isdisjoint(ancestors(list(map(self._propagation.lengths.value, lengths))))

    # -- the sharded Scan

    def scan(self) -> list[Placed]:
        """Build the sharded Scan, and return its outputs with their placements."""
        propagation, loop = self._propagation, self._loop
        outputs, placements = self._step_outputs()
        outside = self._outside(outputs)
        within = [one.type() for one in outside]
        steps = substituted([*self._entries, *outside], outputs, dict(zip(outside, within)))
        sharded = loop.like([*self._entries, *within], steps)
        given = [
            propagation.replicated(loop.n_steps, "the number of steps"),
            *(self._sequence(outer) for _, outer in loop.sequences),
            *(self._state(outer, placement) for (_, outer), placement in zip(loop.states, self._placements)),
            *(propagation.replicated(outer) for _, outer in loop.shared),
            *map(propagation.replicated, loop.lengths),
            *outside,
        ]
        results = sharded(*given, return_list=True)
        propagation.record_in_loop(results[0], self._inside(outputs))
        self._record_lengths()
        return [Placed(result, placement) for result, placement in zip(results, placements)]

    def _step_outputs(self) -> tuple[list[Any], list[Placement]]:
        """Return the outputs of one step in the sharded graph, and the placements of the Scan's outputs."""
        propagation, loop = self._propagation, self._loop
        outputs: list[Any] = []
        placements: list[Placement] = []
        for news, placement in zip(self._new_states, self._placements):
            outputs += [_placed(propagation, new, placement, _REPLICATED_STATE) for new in news]
            placements.append(_of_all(placement))
        for output in loop.results(self._outputs):
            placement = propagation.placement(output)
            if isinstance(placement, Shard) and not self._are_fixed(placement.outer, placement.inner):
                outputs.append(propagation.replicated(output, "its sharded axis is known only within the loop"))
                placements.append(Replicate())
            else:
                outputs.append(propagation.new(output))
                placements.append(_of_all(placement))
        # new values of shared variables, and the condition
        outputs += [propagation.replicated(one) for one in self._outputs[len(outputs) :]]
        return outputs, [*placements, *[Replicate()] * len(loop.shared)]

    def _sequence(self, outer: Any) -> Any:
        steps_over_rows = isinstance(placement := self._propagation.placement(outer), Shard) and placement.axis == 0
        return (
            self._propagation.replicated(outer, "steps over rows") if steps_over_rows else self._propagation.new(outer)
        )

    def _state(self, outer: Any, placement: Placement) -> Any:
        """Return a state's initial value, with the placement of the state's entries."""
        propagation = self._propagation
        if isinstance(placement, Shard):
            return propagation.sharded(outer, placement.moved(placement.axis + 1))
        if isinstance(placement, Partial) and propagation.placement(outer) == placement:
            return propagation.new(outer)
        full = propagation.replicated(outer, _REPLICATED_STATE)
        if isinstance(placement, Replicate) or _begins_with_zero(outer):
            return full
        # of the ranks with a weight, exactly one has row 0, and adds the initial value
        return T.switch(T.eq(propagation.rows.first, 0), full, T.zeros_like(full))

    def _outside(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outer variables that a step uses; those that are not tensors are computed inside the loop."""
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

    def _record_lengths(self) -> None:
        """Record the lengths of the outputs, without that of axis 0 if the loop may end early."""
        loop, lengths, outputs = self._loop, self._propagation.lengths, self._node.outputs
        for output, (_, outer) in zip(outputs, loop.states):
            n_steps, *dims = lengths.dims(outer)
            lengths.set_dims(output, [None if loop.is_while else n_steps, *dims])
        of_steps = zip(loop.lengths, loop.results(self._outputs))
        for output, (number, inner) in zip(outputs[len(loop.states) :], of_steps):
            n_steps = lengths.scalar(number)
            is_sure = not loop.is_while and lengths.is_sure(n_steps)
            fixed = [length if self._are_fixed(length) else None for length in lengths.dims(inner)]
            lengths.set_dims(output, [n_steps if is_sure else None, *fixed])


def _of_entry(placement: Placement) -> Placement:
    """Return the placement of one entry of a sequence; a sequence that is sharded along axis 0 becomes replicated."""
    if isinstance(placement, Shard):
        return placement.moved(placement.axis - 1) if placement.axis else Replicate()
    return placement


def _of_all(placement: Placement) -> Placement:
    """Return the placement of entries that are stacked along a new axis 0."""
    return placement.moved(placement.axis + 1) if isinstance(placement, Shard) else placement


def _begins_with_zero(outer: Any) -> bool:
    """Return whether a state's initial value is zero; the memory that steps write does not count."""
    node = outer.owner
    if node is not None and isinstance(node.op, ops.IncSubtensor) and node.inputs[0].owner is not None:
        return isinstance(node.inputs[0].owner.op, ops.AllocEmpty) and is_zero(node.inputs[1])
    return is_zero(outer)


def _scan(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    loop = ops.read_loop(node)
    mapped = _mapped(propagation, node, loop)
    return mapped if mapped is not None else _fixed_point(propagation, node, loop).scan()


def _fixed_point(propagation: Propagation, node: Any, loop: Any) -> Steps:
    """Return the propagation through a step for placements of the states that the step keeps."""
    n_gathered = len(propagation.gathered)
    states = [outer for _, outer in loop.states]
    of_states = map(propagation.placement, states)
    placements = [_of_entry(one) if isinstance(one, Shard) else Replicate() for one in of_states]
    fixed: set[int] = set()  # states that must be replicated
    may_defer = True
    while True:
        del propagation.gathered[n_gathered:]
        steps = Steps(propagation, node, loop, placements)
        rows = {i: steps.rows_of(i) for i in range(len(states)) if i not in fixed}
        changes: dict[int, Placement] = {
            i: shard for i, shard in rows.items() if shard is not None and not isinstance(placements[i], Shard)
        }
        if not changes:
            wrong = [i for i in range(len(states)) if not steps.keeps(i)]
            fixed.update(wrong)
            changes = dict.fromkeys(wrong, Replicate())
        if not changes and may_defer:
            may_defer = False
            changes = {
                i: Partial()
                for i, outer in enumerate(states)
                if i not in fixed
                and can_reduce(outer)
                and not isinstance(placements[i], Shard)
                and steps.needs_collective(i)
            }
        if not changes:
            return steps
        placements = [changes.get(i, placement) for i, placement in enumerate(placements)]


def _mapped(propagation: Propagation, node: Any, loop: Any) -> Sequence[Placed] | None:
    """Shard a loop with one step for each row and no states: each rank maps its own rows. ``None`` for other loops."""
    lengths, sequences = propagation.lengths, [outer for _, outer in loop.sequences]
    placements = [propagation.placement(one) for one in sequences]
    shard = next((one for one in placements if isinstance(one, Shard) and one.axis == 0), None)
    if shard is None or loop.shared or loop.is_while or loop.states or is_of_the_user(node.op):
        return None
    if any(lengths.scalar(one) != shard.length for one in [loop.n_steps, *loop.lengths]):
        return None
    if any(lengths.dims(one)[0] != shard.length for one in sequences):
        return None
    here = lengths.local(shard.outer.times(shard.inner))
    inputs = [
        here,
        *(propagation.sharded(one, shard) for one in sequences),
        *[here] * len(loop.lengths),
        *(propagation.replicated(outer, "what all steps of a map over rows need") for _, outer in loop.others),
    ]
    return placed(node, inputs, shard)


RULES.update({ops.Scan: _scan})


# -- IfElse


def _if_else(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    n = node.op.n_outs
    condition, pairs = node.inputs[0], list(zip(node.inputs[1 : 1 + n], node.inputs[1 + n :]))
    placements = [_common_placement(propagation, pair) for pair in pairs]
    reason = "the result of the other branch is replicated"
    results = [
        _placed(propagation, pair[i], placement, reason) for i in (0, 1) for pair, placement in zip(pairs, placements)
    ]
    outputs = copied(node, [propagation.replicated(condition, "a condition"), *results])
    for output, pair in zip(node.outputs, pairs):
        if isinstance(output.type, TensorType):
            dims = zip(*map(propagation.lengths.dims, pair))
            propagation.lengths.set_dims(output, [one if one == other else None for one, other in dims])
    return [Placed(output, placement) for output, placement in zip(outputs, placements)]


def _common_placement(propagation: Propagation, pair: Sequence[Any]) -> Placement:
    """Return one placement for the results of both branches; sharded only if both have the same length."""
    found = [propagation.placement(one) for one in pair]
    shard = propagation.shard_of(pair)
    if shard is not None:
        lengths = {propagation.lengths.dims(one)[shard.axis] for one in pair}
        return shard if lengths == {shard.length} else Replicate()
    return Partial() if found == [Partial(), Partial()] else Replicate()


def _placed(propagation: Propagation, variable: Any, placement: Placement, reason: str) -> Any:
    """Return a variable with a placement that it has or can get; ``reason`` is that of an all-gather."""
    if isinstance(placement, Shard):
        return propagation.sharded(variable, placement)
    return propagation.new(variable) if isinstance(placement, Partial) else propagation.replicated(variable, reason)


RULES.update({ops.IfElse: _if_else})


# -- inner graphs, and operations that a backend can rewrite as other operations


def _expressed(rewrite: Callable[[Any], Any]) -> Rule:
    """Return the rule of an operation for which a function of the backend returns equivalent expressions, or none."""

    def rule(propagation: Propagation, node: Any) -> str | Sequence[Placed]:
        expressions = rewrite(node)
        as_before = [(one.dtype, one.broadcastable) for one in node.outputs]
        if not expressions or [(one.dtype, one.broadcastable) for one in expressions] != as_before:
            return "there is no expression for it"
        return _propagated(propagation, expressions)

    return rule


def _propagated(propagation: Propagation, expressions: Sequence[Any]) -> Sequence[Placed]:
    propagation.run(expressions)
    return [Placed(propagation.new(one), propagation.placement(one)) for one in expressions]


def inner_graph(propagation: Propagation, node: Any) -> Sequence[Placed]:
    """Replace an operation by its inner graph, and propagate placements through that.

    The operation must compute exactly this graph. Gradients of the operation are already part of the user's graph.
    """
    results = _propagated(propagation, ops.inlined(node))
    return _around(propagation, node, results) if isinstance(node.op, ops.INLINED_LATE) else results


def _around(propagation: Propagation, node: Any, results: Sequence[Placed]) -> Sequence[Placed]:
    """Put the inner graph back into an operation that the backend recognizes, if each rank computes it by itself."""
    inputs, outputs = list(map(propagation.new, node.inputs)), [one.variable for one in results]
    inside = {*ancestors(outputs, inputs)} - {*inputs}
    if any(one.result in inside for one in propagation.collectives):
        return results
    if any(one.owner is None and not isinstance(one, Constant) for one in inside):
        return results
    fresh = [one.type() for one in inputs]
    inner = clone(outputs, replace=dict(zip(inputs, fresh)))
    return [Placed(new, one.placement) for new, one in zip(ops.around(node.op, inputs, fresh, inner), results)]


RULES.update({ops.OpFromGraph: inner_graph, **{kind: _expressed(rewrite) for kind, rewrite in ops.EXPRESSED.items()}})
