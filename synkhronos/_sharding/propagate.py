"""Sharding propagation: build the sharded graph, node by node, and infer the placement of each variable.

Each variable of the user's graph gets a counterpart in the sharded graph: the rank's local value.

Invariants
----------
* A counterpart has the dtype, number of dimensions and broadcastable axes of the user's variable. The placement says
  how its value relates to the full value.
* A rule that does not support a node returns the reason. The inputs are then made replicated, and every rank computes
  the full result.
* A variable is reduced or gathered at most once, and each shard of it is selected at most once.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any, Callable, TypeVar, Union

from synkhronos._backends import T, ancestors, io_toposort, leaves_of, ops
from synkhronos._sharding.checking import ShapeChecks, errors_logged
from synkhronos._sharding.lengths import Lengths, RowCounts, infer_lengths
from synkhronos._sharding.placements import (
    ONE,
    Partial,
    Placed,
    Placement,
    Replicate,
    Shard,
    can_reduce,
    copied,
    described,
    has_one_partial_input,
    is_broadcast,
    is_zero,
    kind_of,
    typed,
)
from synkhronos._sharding.rank_ops import CollectiveBuilders, CollectiveRecord, LocalShard, broadcast_outputs

#: Placements of an Apply node's outputs, and the placements of its inputs from which they follow.
AcceptableSharding = tuple[Sequence[Placement], Sequence[Placement]]

#: Rule that returns the acceptable shardings of an Apply node, or the reason why there is none.
ShardingRule = Callable[[Any], Union[str, Sequence[AcceptableSharding]]]

#: Rule that builds the outputs in the sharded graph itself, by other operations or with other arguments.
Rule = Callable[["Propagation", Any], Union[str, Sequence[Placed]]]

#: Rules for Apply nodes with an input that is not replicated, by type of Op; see `synkhronos._sharding.rules`.
RULES: dict[type, Rule] = {}

#: Rules for Apply nodes with replicated inputs only: for arrays with rows, of which each rank makes its own, and for
#: values that can be computed without a collective. Without a rule, every rank computes the node in full.
REPLICATED_RULES: dict[type, Rule] = {}


# -- rules that list acceptable shardings

_Registered = TypeVar("_Registered", bound=ShardingRule)


def register_sharding(*op_types: type) -> Callable[[_Registered], _Registered]:
    """Register a sharding rule for types of operations, for functions that are built later. Experimental.

    A rule states how exact functions may place the inputs and outputs of an operation on the ranks. By registering a
    rule you state that the operation is a deterministic function of its inputs, which every rank may compute; without
    one, operations in Python are computed by the controller alone, from all rows.

    Parameters
    ----------
    *op_types : type
        Classes of operations. Subclasses do not inherit the rule. A later rule replaces an earlier one, and also one of
        this package.

    Returns
    -------
    callable
        Decorator for ``rule(node)``. The rule gets the Apply node, with ``node.op``, ``node.inputs`` and
        ``node.outputs``, and returns a list of pairs ``(output placements, input placements)``. A pair has one
        `Replicate`, `Shard` or `Partial` for each output and each input. Of the pairs that need the fewest collectives,
        the first is chosen. Replicated inputs and outputs are always acceptable, and need not be listed. A rule may
        return a str instead: the reason why nothing else is acceptable, for the log.

        All axes that a pair shards must have the same length, and the operation must compute each position along them
        from the same position of its inputs. `Partial` inputs are not reduced before the operation: state them only for
        inputs in which it is linear, if the op is ``"sum"``.

    Raises
    ------
    TypeError
        If ``op_types`` are not classes, or the rule is not callable.

    Notes
    -----
    An error in a rule, or another return value, is logged once when a function is built, and every rank then computes
    the operation in full. ``SYNKHRONOS_CHECK_SHARDING=1`` finds wrong rules by the shapes of the results. The interface
    follows ``torch.distributed.tensor.experimental.register_sharding``, and may change.

    Examples
    --------
    A softmax along the last axis may be sharded along all others:

    >>> class Softmax(theano.Op):
    ...     __props__ = ()
    ...     def make_node(self, x):
    ...         return theano.Apply(self, [x], [x.type()])
    ...     def perform(self, node, inputs, outputs):
    ...         powers = np.exp(inputs[0] - inputs[0].max(-1, keepdims=True))
    ...         outputs[0][0] = powers / powers.sum(-1, keepdims=True)
    >>> @synk.register_sharding(Softmax)
    ... def rule(node):
    ...     return [([synk.Shard(axis)], [synk.Shard(axis)]) for axis in range(node.inputs[0].ndim - 1)]
    """
    for one in op_types or (None,):
        if not isinstance(one, type):
            raise TypeError(f"register_sharding: got {one!r}, expected classes of operations; pass type(op) for an op")

    def register(rule: _Registered) -> _Registered:
        if not callable(rule):
            raise TypeError(f"register_sharding: got {rule!r}, expected a function rule(node)")
        RULES.update(dict.fromkeys(op_types, functools.partial(_apply_rule, rule)))
        return rule

    return register


def _apply_rule(rule: ShardingRule, propagation: Propagation, node: Any) -> str | Sequence[Placed]:
    """Return a node's outputs in the sharding that needs the fewest collectives, or the reason why there is none."""
    shardings = rule(node)
    if isinstance(shardings, str):
        return shardings
    shardings = _checked(rule, node, shardings)
    costs = [propagation.cost(node, *each) for each in shardings]
    found = [cost for cost in costs if cost is not None]
    if not found:
        places = [(i, propagation.placement(one)) for i, one in enumerate(node.inputs)]
        return "its sharding rule does not accept " + ", ".join(
            f"rows along axis {placement.axis} of input {i}"
            if isinstance(placement, Shard)
            else f"{placement} of input {i}"
            for i, placement in places
            if not isinstance(placement, Replicate)
        )
    return propagation.applied(node, *shardings[costs.index(min(found))])


def _checked(rule: Any, node: Any, shardings: Any) -> list[AcceptableSharding]:
    """Return acceptable shardings with axes that are not negative; raise `TypeError` for other values."""
    try:
        return [
            (
                [_normalized(*each) for each in zip(outputs, node.outputs)],
                [_normalized(*each) for each in zip(inputs, node.inputs)],
            )
            for outputs, inputs in shardings
            if _same_length(outputs, node.outputs) and _same_length(inputs, node.inputs)
        ]
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise TypeError(
            f"the sharding rule {_name_of(rule)} of {type(node.op).__name__} must return a list of pairs (output "
            "placements, input placements), with one Replicate(), Shard(axis) or Partial(op) for each output and "
            f"input, or a str; got {shardings!r}: {error}"
        ) from error


def _same_length(placements: Any, variables: Any) -> bool:
    if len(placements) != len(variables):
        raise ValueError(f"{len(placements)} placements of {len(variables)} variables")
    return True


def _normalized(placement: Any, variable: Any) -> Placement:
    if isinstance(placement, Shard):
        if not -variable.ndim <= placement.axis < variable.ndim:
            raise IndexError(f"{placement} of {variable}, which has {variable.ndim} dimensions")
        return Shard(placement.axis % variable.ndim)
    if not isinstance(placement, (Replicate, Partial)):
        raise TypeError(f"{placement!r} is not a placement")
    return placement


def _name_of(rule: Any) -> str:
    return f"{getattr(rule, '__module__', '')}.{getattr(rule, '__qualname__', rule)}"


# -- operations of the user

#: Packages whose operations are deterministic functions of their inputs.
_PURE = ("theano", "pytensor", "pymc", "lasagne", "synkhronos")


def is_of_the_user(op: Any) -> bool:
    """Return whether an operation, or one of its inner graph, runs Python code from outside the known packages.

    Such code may have side effects, such as draws from ``np.random``, so only the controller runs it.
    """
    if isinstance(op, ops.Blockwise):
        return is_of_the_user(op.core_op)
    if type(op) not in RULES:  # with a registered rule, every rank may compute the operation
        if isinstance(op, ops.FromFunctionOp):
            return True
        if _package_of(op, "c_code") in _PURE and any(
            _package_of(op, name) not in _PURE for name in ("perform", "impl")
        ):
            return True
    scalar_op = getattr(op, "scalar_op", None)  # applied by Elemwise to each element
    if scalar_op is not None and is_of_the_user(scalar_op):
        return True
    inner = {variable.owner for variable in ancestors(ops.inner_outputs(op))} - {None}
    return any(is_of_the_user(node.op) for node in inner)


def _package_of(op: Any, method: str) -> str:
    """Return the package that defines a method of an operation, the first of `_PURE` if there is no such method."""
    function = getattr(type(op), method, None)
    return str(getattr(function, "__module__", None) or _PURE[0]).split(".")[0]


#: Operations that return elements of their first input, or all of them, without another value.
_PARTS = ops.Reshape, ops.Subtensor, ops.Rebroadcast, ops.SpecifyShape


class Propagation:
    """Propagation of placements through the user's graph; builds the sharded graph.

    Parameters
    ----------
    sharded : dict
        Sharded variables, with the axis of each.
    rows : RowCounts
    builders : CollectiveBuilders
        Functions that build the all-reduces and all-gathers.
    rules : dict
        By type of Op, rules for Apply nodes with an input that is not replicated.
    makers : dict
        By type of Op, rules for Apply nodes with replicated inputs only.
    checks_shapes : bool
        Whether the sharded graph compares each variable's shape with the serial program's; see `ShapeChecks`.
    reduces_before_joins : bool
        Whether partial values are reduced before they are concatenated. On several nodes, the exchange of each of them
        can then begin when it exists.

    Attributes
    ----------
    lengths : Lengths
    collectives : list of CollectiveRecord
        The collectives of the sharded graph.
    gathered : list of (node, reason)
        Apply nodes that no rule supports, and whose sharded inputs are gathered.
    """

    def __init__(
        self,
        sharded: dict[Any, int],
        rows: RowCounts,
        builders: CollectiveBuilders,
        rules: dict[type, Rule],
        makers: dict[type, Rule],
        *,
        checks_shapes: bool = False,
        reduces_before_joins: bool = False,
    ) -> None:
        self.rows = rows
        self._reduces_before_joins = reduces_before_joins
        self.collectives: list[CollectiveRecord] = []
        self.gathered: list[tuple[Any, str]] = []
        self._builders = builders
        self._rules, self._makers = rules, makers
        self._new: dict[Any, Any] = {}
        self._placements: dict[Any, Placement] = {}
        self._replicated: dict[Any, Any] = {}
        self._shards: dict[Any, Any] = {}
        self._used: set[Any] = set()
        self.lengths = Lengths(rows, self.new, self.replicated)
        self._checks = ShapeChecks(rows, self.lengths, self._to_replicated) if checks_shapes else None
        for variable, axis in sharded.items():
            self.put(variable, Placed(variable, Shard(axis)))

    def mark_used(self, outputs: Sequence[Any]) -> list[Any]:
        """Record, for `is_used`, that some variables and all from which they are computed are used.

        Returns
        -------
        list of Apply
            The nodes that compute them and have no counterparts yet, inputs before outputs.
        """
        order = list(io_toposort(list(self._new), outputs))
        self._used.update(outputs, (one for node in order for one in node.inputs))
        return order

    def run(self, outputs: Sequence[Any]) -> None:
        """Propagate placements through all Apply nodes from which some variables are computed."""
        order = self.mark_used(outputs)
        for variable in leaves_of(outputs, list(self._new)):
            if variable not in self._new:
                self.put(variable, Placed(variable, Replicate()))
        for node in order:
            self._propagate(node)

    # -- interface for sharding rules

    def new(self, variable: Any) -> Any:
        """Return a variable's counterpart in the sharded graph: the rank's local value."""
        return self._new[variable]

    def knows(self, variable: Any) -> bool:
        """Return whether a variable has a counterpart."""
        return variable in self._new

    def items(self) -> list[tuple[Any, Any]]:
        """Return all variables with their counterparts, in the order in which they were placed."""
        return list(self._new.items())

    def placement(self, variable: Any) -> Placement:
        """Return the placement of a variable."""
        return self._placements[variable]

    def is_used(self, variable: Any) -> bool:
        """Return whether a variable is an input of an Apply node, or a requested output."""
        return variable in self._used

    def shard_of(self, variables: Iterable[Any]) -> Shard | None:
        """Return the placement of the first sharded variable; ``None`` if there is none."""
        placements = (self._placements[variable] for variable in variables)
        return next((one for one in placements if isinstance(one, Shard)), None)

    def replicated(self, variable: Any, reason: str = "") -> Any:
        """Return a variable's full value, by an all-reduce or all-gather if the variable is not replicated.

        A variable that is computed elementwise from one partial input is computed again, from the reduced input, and so
        is a part of a variable that has been reduced before.
        """
        placement = self._placements[variable]
        if isinstance(placement, Replicate):
            return self._new[variable]
        if variable not in self._replicated:
            if isinstance(placement, Partial) and (
                has_one_partial_input(variable, self._placements) or self._is_part_of_replicated(variable)
            ):
                self._replicated[variable] = self.computed_replicated(variable.owner)[0].variable
            elif isinstance(placement, Partial):
                self._replicated[variable] = self.reduced(variable, self._new[variable], placement.op)
            else:
                self._replicated[variable] = self._to_replicated(variable)
                self.collectives.append(CollectiveRecord("all-gather", variable, reason, self._replicated[variable]))
        return self._replicated[variable]

    def _is_part_of_replicated(self, variable: Any) -> bool:
        """Return whether a variable is a slice, or has the elements, of one that has been made replicated."""
        node = variable.owner
        if node is None or not isinstance(node.op, _PARTS):
            return False
        return node.inputs[0] in self._replicated or self._is_part_of_replicated(node.inputs[0])

    def was_replicated(self, variable: Any) -> bool:
        """Return whether a variable has been made replicated."""
        return variable in self._replicated

    def sharded(self, variable: Any, shard: Shard, *, lenient: bool = False, broadcasts: bool = False) -> Any:
        """Return this rank's shard of a variable; the full value if the axis is broadcast or does not exist.

        Parameters
        ----------
        variable : variable
            Variable of the user's graph.
        shard : Shard
        lenient : bool
            The operation compares lengths itself: accept any placement for which `Shard.agrees`.
        broadcasts : bool
            The operation broadcasts axes of length 1 as NumPy does, whatever their type says.
        """
        placement = self._placements[variable]
        if placement == shard or (lenient and shard.agrees(placement)):
            return self._new[variable]
        full = self.replicated(variable, "another input of the operation is sharded in another way")
        if variable.ndim <= shard.axis or variable.broadcastable[shard.axis]:
            return full
        key = variable, shard, broadcasts
        if key not in self._shards:
            numbers = [self.lengths.value(one) for one in (shard.outer, shard.inner)]
            rows = self.rows
            local = LocalShard(shard.axis, broadcasts)(full, rows.total, rows.first, rows.local, *numbers)
            local.name = variable.name
            local.tag.trace = getattr(variable.tag, "trace", [])
            self._shards[key] = local
        return self._shards[key]

    def put(self, variable: Any, placed: Placed) -> None:
        """Set a variable's counterpart and placement; an earlier placement then gives the full value."""
        if variable in self._new:
            self._replicated[variable] = self.replicated(variable)
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
        """Reduce the ranks' values of a variable with ``op``, and record the collective."""
        result = self._all_reduced(new, op)
        self.collectives.append(CollectiveRecord(f"all-reduce ({op})", variable, "", result))
        return result

    def collectives_for(self, outputs: Sequence[Any]) -> list[CollectiveRecord]:
        """Return the collectives from which some variables of the sharded graph are computed."""
        needed = {one.owner for one in ancestors(outputs)}
        return [one for one in self.collectives if one.result.owner in needed]

    def record_in_loop(self, result: Any, inside: Container[Any]) -> None:
        """Record that the collectives with results ``inside`` run in each step of the loop that returns ``result``."""
        self.collectives = [one.in_loop(result) if one.result in inside else one for one in self.collectives]

    # -- acceptable shardings

    def cost(self, node: Any, outputs: Sequence[Placement], inputs: Sequence[Placement]) -> int | None:
        """Return the number of collectives that an acceptable sharding needs; ``None`` if it is not possible."""
        shard = self._shard_for(node, inputs)
        if shard is None and any(isinstance(one, Shard) for one in (*outputs, *inputs)):
            return None
        if self._reduces_before_joins and isinstance(node.op, ops.Join) and Partial() in outputs:
            return None
        if any(isinstance(one, Partial) and not can_reduce(out, one.op) for one, out in zip(outputs, node.outputs)):
            return None
        found = 0
        for variable, wanted in zip(node.inputs, inputs):
            placement = self._placements[variable]
            if isinstance(wanted, Partial):
                is_zeros = placement == Replicate() and wanted == Partial() and is_zero(variable)
                if placement != wanted and not is_zeros:
                    return None
            elif isinstance(wanted, Shard):
                if variable.broadcastable[wanted.axis]:
                    return None
                assert shard is not None
                found += placement not in (Replicate(), shard.moved(wanted.axis))
            else:
                found += placement != wanted
        return found

    def applied(self, node: Any, outputs: Sequence[Placement], inputs: Sequence[Placement]) -> list[Placed]:
        """Apply a node's operation to inputs with some placements, and return the outputs with their placements."""
        shard, reason = self._shard_for(node, inputs), "its operation needs the full value, and shards of other inputs"
        if shard is None and not any(isinstance(one, Partial) for one in inputs):
            return self.computed_replicated(node)
        # an operation that contracts axes compares their lengths itself
        lenient = not any(isinstance(one, Shard) for one in outputs)
        local = []
        for variable, wanted in zip(node.inputs, inputs):
            if isinstance(wanted, Shard):
                local.append(self.sharded(variable, shard.moved(wanted.axis), lenient=lenient))
            else:
                local.append(self._new[variable] if isinstance(wanted, Partial) else self.replicated(variable, reason))
        of_outputs = [shard.moved(one.axis) if isinstance(one, Shard) else one for one in outputs]
        return list(map(Placed, copied(node, local), of_outputs))

    def _shard_for(self, node: Any, inputs: Sequence[Placement]) -> Any:
        """Return the placement of the first input that is already sharded along its wanted axis, else ``None``."""
        for variable, wanted in zip(node.inputs, inputs):
            placement = self._placements[variable]
            if isinstance(wanted, Shard) and isinstance(placement, Shard) and placement.axis == wanted.axis:
                return placement
        return None

    # -- implementation

    def _all_reduced(self, new: Any, op: str) -> Any:
        if new.dtype == "bool":  # reductions need a numeric dtype
            return T.cast(self._builders.all_reduce(T.cast(new, "uint8"), op), "bool")
        return self._builders.all_reduce(new, op)

    def _to_replicated(self, variable: Any) -> Any:
        """Return the full value of a variable, by a collective that is not recorded."""
        new, shard = self._new[variable], self._placements[variable]
        if isinstance(shard, Partial):
            return self._all_reduced(new, shard.op)
        if isinstance(shard, Replicate):
            return new
        axis = shard.axis
        if new.dtype == "bool":
            new = T.cast(new, "uint8")
        if shard.outer == ONE:
            full = self._builders.all_gather(new, axis)
        else:
            shape = [new.shape[i] for i in range(new.ndim)]
            rows = self.lengths.value(shard.outer), self.lengths.local(shard.inner)
            split = [*shape[:axis], *rows, *shape[axis + 1 :]]
            full = self._builders.all_gather(new.reshape(split, ndim=new.ndim + 1), axis + 1)
            shape[axis] = self.lengths.value(shard.length)
            full = full.reshape(shape, ndim=new.ndim)
        return typed(T.cast(full, variable.dtype), variable)

    def _propagate(self, node: Any) -> None:
        if any(output in self._new for output in node.outputs):
            return  # placed before: by an earlier run, or because the argument `shard` names it
        placements = [self._placements[one] for one in node.inputs]
        is_replicated = all(isinstance(one, Replicate) for one in placements)
        is_users, has_graph = is_of_the_user(node.op), bool(ops.inner_outputs(node.op))
        if is_replicated and is_users and has_graph:
            is_replicated = False  # so that the rule propagates through the inner graph, to the user's operation
        kind = type(node.op) if type(node.op) in self._rules else kind_of(node.op)
        rule = (self._makers if is_replicated else self._rules).get(kind)
        placed: str | Sequence[Placed] = "there is no rule for it"
        if is_users and not has_graph:
            placed = "Python code of the program, which the controller alone runs"
        elif rule is not None:
            placed = "its sharding rule failed"
            listed = f" ({_name_of(rule.args[0])})" if isinstance(rule, functools.partial) else ""
            with errors_logged("The sharding rule", f"{node.op}{listed}"):
                placed = rule(self, node)
        if not isinstance(placed, str) and any(map(is_broadcast, placed)):
            placed = "a sharded axis would be broadcast"
        if isinstance(placed, str):
            if any(isinstance(one, Shard) for one in placements):
                self.gathered.append((node, placed))
            placed = self.computed_replicated(node, f"{node.op}: {placed}")
        elif self._checks is not None:
            placed = self._checks.checked(node, placed)
        for output, one in zip(node.outputs, placed):
            self.put(output, one)
        with errors_logged("The analysis of lengths", node.op):
            infer_lengths(self.lengths, node)
        for output in node.outputs:
            shard = self._placements[output]
            if isinstance(shard, Shard):
                self.lengths.set_length(output, shard.axis, shard.length)

    def computed_replicated(self, node: Any, reason: str = "") -> list[Placed]:
        """Compute a node from replicated inputs, on every rank; on the controller alone if it runs the user's code.

        Parameters
        ----------
        node : Apply
        reason : str
            Why the inputs are gathered, for the report.
        """
        inputs = [self.replicated(one, reason) for one in node.inputs]
        if is_of_the_user(node.op):
            return self._broadcast(node, inputs)
        return [Placed(output, Replicate()) for output in copied(node, inputs, is_serial=True)]

    def _broadcast(self, node: Any, inputs: Sequence[Any]) -> list[Placed]:
        """Compute a node on the controller alone, and broadcast its outputs to all ranks."""
        if isinstance(node.op, ops.Scan):
            raise ValueError(
                f"{described(node.outputs[0])}: a loop whose steps run an operation in Python cannot be sharded. "
                "Build the function without exact=True, or compute the loop outside of it"
            )
        outputs = broadcast_outputs(node, inputs)
        reason = f"{node.op} is Python code of the program, which the controller alone runs"
        self.collectives.append(CollectiveRecord("broadcast", node.outputs[0], reason, outputs[0]))
        return [Placed(output, Replicate()) for output in outputs]
