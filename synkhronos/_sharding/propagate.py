"""The walk over the user's graph: each variable gets its twin in the divided graph, and its placement there.

Invariants
----------
* A twin has the type of the user's variable. Which part of the value a rank holds, its placement alone says.
* A rule that does not understand a node says why; its inputs are gathered, and every rank computes the whole.
* A variable is reduced, gathered, or cut to the same rows once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Callable, Union

from synkhronos._backends import T, ancestors, io_toposort, leaves_of, ops
from synkhronos._graph.ops import broadcast_outputs
from synkhronos._sharding.checking import ShapeChecks, tolerated
from synkhronos._sharding.lengths import Lengths, Rows, follow
from synkhronos._sharding.placements import (
    ONE,
    Partial,
    Placed,
    Placement,
    Replicate,
    Shard,
    copied,
    described,
    is_broadcast,
    is_of_one_sum,
    is_of_the_user,
    kind_of,
    typed,
)
from synkhronos._sharding.rank_ops import Collective, Collectives, Part

__all__ = ["MAKERS", "RULES", "Rule", "Walk"]


Rule = Callable[["Walk", Any], Union[str, Sequence[Placed]]]

#: For types of Ops: rules for Apply nodes of which some input is not replicated. `synkhronos._sharding.rules` fills it.
RULES: dict[type, Rule] = {}

#: Rules for Apply nodes of replicated inputs: what they make has rows, or another way makes it cheaper.
MAKERS: dict[type, Rule] = {}


class Walk:
    """A graph that is being divided.

    Parameters
    ----------
    sharded : dict
        Variables whose rows are divided, with the axis of each.
    rows : Rows
    collectives : Collectives
    rules : dict
        For types of Ops, what their nodes do with inputs that are not whole.
    makers : dict
        For types of Ops, what their nodes make of whole inputs, if not wholes.
    checks_shapes : bool
        Whether the divided graph compares each variable's shape with the serial program's; see `ShapeChecks`.

    Attributes
    ----------
    lengths : Lengths
    met : list of Collective
    gathered : list of (node, reason)
        What no rule understood.
    """

    def __init__(
        self,
        sharded: dict[Any, int],
        rows: Rows,
        collectives: Collectives,
        rules: dict[type, Rule],
        makers: dict[type, Rule],
        *,
        checks_shapes: bool = False,
    ) -> None:
        self.rows = rows
        self.met: list[Collective] = []
        self.gathered: list[tuple[Any, str]] = []
        self._collectives = collectives
        self._rules, self._makers = rules, makers
        self._new: dict[Any, Any] = {}
        self._placements: dict[Any, Placement] = {}
        self._wholes: dict[Any, Any] = {}
        self._parts: dict[Any, Any] = {}
        self._used: set[Any] = set()
        self.lengths = Lengths(rows, self.new, self.whole)
        self._checks = ShapeChecks(rows, self.lengths, self._made_whole) if checks_shapes else None
        for variable, axis in sharded.items():
            self.put(variable, Placed(variable, Shard(axis)))

    def run(self, outputs: Sequence[Any]) -> None:
        """Walk over all that some variables are computed of."""
        known = list(self._new)
        order = io_toposort(known, outputs)
        self._used.update(outputs, (one for node in order for one in node.inputs))
        for variable in leaves_of(outputs, known):
            if variable not in self._new:
                self.put(variable, Placed(variable, Replicate()))
        for node in order:
            self._divide(node)

    # -- what rules ask for

    def new(self, variable: Any) -> Any:
        """What a rank holds of a variable."""
        return self._new[variable]

    def knows(self, variable: Any) -> bool:
        """Whether the walk came by it."""
        return variable in self._new

    def items(self) -> list[tuple[Any, Any]]:
        """All variables that it came by, in order, and what a rank holds of each."""
        return list(self._new.items())

    def placement(self, variable: Any) -> Placement:
        """Where its rows are."""
        return self._placements[variable]

    def is_used(self, variable: Any) -> bool:
        """Whether anything is computed of it, or it is asked for."""
        return variable in self._used

    def shard_of(self, variables: Iterable[Any]) -> Shard | None:
        """The placement of the first one that is sharded."""
        placements = (self._placements[variable] for variable in variables)
        return next((one for one in placements if isinstance(one, Shard)), None)

    def whole(self, variable: Any, reason: str = "") -> Any:
        """Its value as in the serial program, on every rank."""
        placement = self._placements[variable]
        if isinstance(placement, Replicate):
            return self._new[variable]
        if variable not in self._wholes:
            if isinstance(placement, Partial) and is_of_one_sum(variable, self._placements):
                self._wholes[variable] = self.computed_whole(variable.owner)[0].variable
            elif isinstance(placement, Partial):
                self._wholes[variable] = self.reduced(variable, self._new[variable], "sum")
            else:
                self._wholes[variable] = self._made_whole(variable)
                self.met.append(Collective("all-gather", variable, reason, self._wholes[variable]))
        return self._wholes[variable]

    def was_made_whole(self, variable: Any) -> bool:
        """Whether ranks have met for a variable's value."""
        return variable in self._wholes

    def part(self, variable: Any, shard: Shard, *, lenient: bool = False, broadcasts: bool = False) -> Any:
        """The rows of this rank, with places as in ``shard``; whole where the variable has none to be cut there.

        ``lenient`` is for Ops that compare lengths themselves: rows may then be told by lengths that are equal.
        ``broadcasts`` is for Ops that do with lengths of 1 as NumPy does, whatever the type says.
        """
        placement = self._placements[variable]
        if placement == shard or (lenient and shard.agrees(placement)):
            return self._new[variable]
        whole = self.whole(variable, "its rows lie otherwise than those that it meets")
        if variable.ndim <= shard.axis or variable.broadcastable[shard.axis]:
            return whole
        key = variable, shard, broadcasts
        if key not in self._parts:
            numbers = [self.lengths.value(one) for one in (shard.outer, shard.inner)]
            rows = self.rows
            part = Part(shard.axis, broadcasts)(whole, rows.whole, rows.first, rows.here, *numbers)
            part.name = variable.name
            part.tag.trace = getattr(variable.tag, "trace", [])
            self._parts[key] = part
        return self._parts[key]

    def put(self, variable: Any, placed: Placed) -> None:
        """Say what a rank holds of a variable; what has been whole can still be had whole."""
        if variable in self._new:
            self._wholes[variable] = self.whole(variable)
        new, placement = placed
        if new is not variable:
            new = typed(new, variable)
        if new is not variable and new.owner is not None:
            new.name = new.name or variable.name
            new.tag.trace = getattr(variable.tag, "trace", [])
        self._new[variable] = new
        self._placements[variable] = placement
        if isinstance(placement, Shard):
            self.lengths.set_length(variable, placement.axis, placement.length)

    def reduced(self, variable: Any, new: Any, op: str) -> Any:
        """The sum, product, … over ranks of what each has for a variable."""
        result = self._all_reduced(new, op)
        self.met.append(Collective(f"all-reduce ({op})", variable, "", result))
        return result

    def met_for(self, outputs: Sequence[Any]) -> list[Collective]:
        """The collectives that some variables of the divided graph need."""
        needed = {one.owner for one in ancestors(outputs)}
        return [one for one in self.met if one.result.owner in needed]

    def meet_within(self, result: Any, inside: Container[Any]) -> None:
        """Take notice of the collectives of a loop's steps, of which ``result`` is an output."""
        self.met = [one.within(result) if one.result in inside else one for one in self.met]

    # -- inside

    def _all_reduced(self, new: Any, op: str) -> Any:
        if new.dtype == "bool":  # numbers are what is reduced
            return T.cast(self._collectives.all_reduce(T.cast(new, "uint8"), op), "bool")
        return self._collectives.all_reduce(new, op)

    def _made_whole(self, variable: Any) -> Any:
        """The serial value, by a collective that is not recorded."""
        new, shard = self._new[variable], self._placements[variable]
        if isinstance(shard, Partial):
            return self._all_reduced(new, "sum")
        if isinstance(shard, Replicate):
            return new
        axis = shard.axis
        if new.dtype == "bool":
            new = T.cast(new, "uint8")
        if shard.outer == ONE:
            whole = self._collectives.all_gather(new, axis)
        else:
            shape = [new.shape[i] for i in range(new.ndim)]
            split = [*shape[:axis], self.lengths.value(shard.outer), self.lengths.here(shard.inner), *shape[axis + 1 :]]
            whole = self._collectives.all_gather(new.reshape(split, ndim=new.ndim + 1), axis + 1)
            shape[axis] = self.lengths.value(shard.length)
            whole = whole.reshape(shape, ndim=new.ndim)
        return typed(T.cast(whole, variable.dtype), variable)

    def _divide(self, node: Any) -> None:
        if any(output in self._new for output in node.outputs):
            return  # what is sharded may be a variable inside the graph
        placements = [self._placements[one] for one in node.inputs]
        is_whole = all(isinstance(one, Replicate) for one in placements)
        is_users, has_graph = is_of_the_user(node.op), bool(ops.inner_outputs(node.op))
        if is_whole and is_users and has_graph:
            is_whole = False  # so that the rule finds the user's operation inside
        kind = type(node.op) if type(node.op) in self._rules else kind_of(node.op)
        rule = (self._makers if is_whole else self._rules).get(kind)
        placed: str | Sequence[Placed] = "there is no rule for it"
        if is_users and not has_graph:
            placed = "Python code of the program, which the controller alone runs"
        elif rule is not None:
            placed = "its sharding rule failed"
            with tolerated("The sharding rule", node.op):
                placed = rule(self, node)
        if not isinstance(placed, str) and any(map(is_broadcast, placed)):
            placed = "an axis that holds rows is broadcast"
        if isinstance(placed, str):
            if any(isinstance(one, Shard) for one in placements):
                self.gathered.append((node, placed))
            placed = self.computed_whole(node, f"{node.op}: {placed}")
        elif self._checks is not None:
            placed = self._checks.checked(node, placed)
        for output, one in zip(node.outputs, placed):
            self.put(output, one)
        with tolerated("The analysis of lengths", node.op):
            follow(self.lengths, node)
        for output in node.outputs:
            shard = self._placements[output]
            if isinstance(shard, Shard):
                self.lengths.set_length(output, shard.axis, shard.length)

    def computed_whole(self, node: Any, reason: str = "") -> list[Placed]:
        """A node of whole inputs: every rank computes what the serial program does."""
        inputs = [self.whole(one, reason) for one in node.inputs]
        if is_of_the_user(node.op):
            return self._broadcast(node, inputs)
        return [Placed(output, Replicate()) for output in copied(node, inputs, is_serial=True)]

    def _broadcast(self, node: Any, inputs: Sequence[Any]) -> list[Placed]:
        """A node that the controller alone computes, as the serial program does, for all ranks."""
        if isinstance(node.op, ops.Scan):
            raise ValueError(
                f"{described(node.outputs[0])}: a loop whose steps run an operation in Python cannot be divided here. "
                "Build the function without exact=True, or compute the loop outside of it"
            )
        outputs = broadcast_outputs(node, inputs)
        reason = f"{node.op} is Python code of the program, which the controller alone runs"
        self.met.append(Collective("broadcast", node.outputs[0], reason, outputs[0]))
        return [Placed(output, Replicate()) for output in outputs]
