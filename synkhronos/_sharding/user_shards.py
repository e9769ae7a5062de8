"""Which variables of a graph are sharded, and along which axis: the arguments ``inputs`` and ``shard`` of a function.

They may be inputs, sliceable shared variables, or any variable inside the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import Constant, ancestors, known_lengths, length_along, ops, scalar
from synkhronos._graph import Graph, get_array, is_shared_variable, is_tensor_variable
from synkhronos._graph.ops import Counted
from synkhronos._sharding.lengths import RowCounts
from synkhronos._sharding.placements import Placed, Shard, described
from synkhronos._sharding.propagate import Propagation
from synkhronos._sharding.rank_ops import LocalShard


class Sharding:
    """The sharded variables of a function, and their axes.

    Parameters
    ----------
    user : Graph
    shard : dict, list of variables, or None
        The user's argument ``shard``.

    Attributes
    ----------
    scattered : dict
        Variables that are sharded when a call begins, with the axes.
    axes : list of int
        Sharded axes of the scattered inputs.
    is_given : bool
        Whether a call passes the numbers of rows, because the function has scattered inputs or variables.
    given : RowCounts
        Variables for the numbers of rows that a call passes.
    rows : RowCounts
        Numbers of rows that the sharded graph uses: ``given``, or numbers that are computed inside the graph, if
        variables there are sharded.
    undivided : list of variables
        If nothing is sharded: slices of shared variables that might be minibatches.

    Raises
    ------
    TypeError, ValueError
        If a variable cannot be sharded.
    """

    def __init__(self, user: Graph, shard: Any) -> None:
        asked = {user.leaf_of(variable): axis for variable, axis in _read(shard).items()}
        is_asked = bool(asked)
        scattered = user.input_variables[: user.n_scattered]
        self.axes = [_checked(variable, asked.pop(variable, 0)) for variable in scattered]
        for variable in user.sliceable_shareds:
            if _checked(variable, asked.pop(variable, 0)):
                raise ValueError(f"shard: {variable} is in sliceable_shareds, which lie on the ranks by their axis 0")
        self.scattered = dict(zip(scattered, self.axes))
        self.scattered.update(dict.fromkeys(user.sliceable_shareds, 0))
        for variable, axis in self.scattered.items():
            check_open(variable, axis)
        self.is_given = bool(self.scattered)
        self._names: dict[Any, str] = {}
        self.undivided: list[Any] = []
        self._inside = self._found(user, {variable: _checked(variable, axis) for variable, axis in asked.items()})
        if not is_asked and not self.scattered:
            self._divide_minibatches(user)
        self.given = self.rows = RowCounts.as_inputs()
        apart = {*self.scattered, *self._inside}
        counted = {one: axis for one, axis in self._inside.items() if apart.isdisjoint({*ancestors([one])} - {one})}
        if counted:
            lengths = [length_along(one, axis) for one, axis in counted.items()]
            given = ", ".join(map(str, self.scattered))
            numbers = [self.given.total, self.given.first, self.given.local] if given else []
            total, first, local = Counted(tuple(self._names[one] for one in counted), given)(*numbers, *lengths)
            self.rows = RowCounts(self.given.total if given else total, first, local)

    def _divide_minibatches(self, user: Graph) -> None:
        """Shard slices of shared variables that look like minibatches; called if nothing else has rows."""
        outputs, updates = user.expressions
        slices, others = minibatches(list(ancestors([*outputs, *(new for _, new in updates)])))
        self._inside = dict.fromkeys(slices, 0)
        self._names.update((one, described(one)) for one in slices)
        self.undivided = [] if slices else others

    def divide(self, propagation: Propagation) -> None:
        """Shard the variables inside the graph: select this rank's rows, unless propagation already sharded them."""
        for variable, axis in self._inside.items():
            propagation.run([variable])
            if propagation.placement(variable) == Shard(axis):
                continue
            numbers = (self.rows.total, self.rows.first, self.rows.local, 1, 1)
            local = LocalShard(axis)(
                propagation.replicated(variable, "the user shards it along another axis"), *numbers
            )
            propagation.put(variable, Placed(local, Shard(axis)))

    def _found(self, user: Graph, asked: dict[Any, int]) -> dict[Any, int]:
        """Return the graph's expressions for variables, inputs before outputs."""
        outputs, updates = user.expressions
        used = set(ancestors([*outputs, *(new for _, new in updates)]))
        found = {}
        for variable, axis in asked.items():
            one = user.expression_of(variable)
            if one is None or one not in used:
                raise ValueError(f"shard: the function does not use {described(variable)}")
            found[one] = axis
            self._names[one] = variable.name or described(variable)
        return dict(sorted(found.items(), key=lambda item: len(set(ancestors([item[0]])))))


def _read(shard: Any) -> dict[Any, int]:
    if shard is None:
        return {}
    if not isinstance(shard, (dict, list, tuple)):
        raise TypeError(f"shard must be a list of variables, or a dict of variables and axes; got {shard!r}")
    asked = dict(shard) if isinstance(shard, dict) else dict.fromkeys(shard, 0)
    for variable, axis in asked.items():
        if not is_tensor_variable(variable):
            raise TypeError(f"shard must name tensor variables; got {variable!r}")
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise TypeError(f"shard: the axis of {variable} must be an int; got {axis!r}")
    return asked


def check_open(variable: Any, axis: int) -> None:
    """Raise `ValueError` for a variable whose type fixes the length of an axis."""
    length = known_lengths(variable)[axis]
    if length is not None:
        raise ValueError(
            f"{described(variable)} cannot be divided: its type says that axis {axis} has length {length}, and ranks "
            "have fewer rows. Make it of a type that leaves this length open, such as a matrix"
        )


def _checked(variable: Any, axis: int) -> int:
    if not -variable.ndim <= axis < variable.ndim:
        raise ValueError(f"shard: {described(variable)} has {variable.ndim} dimensions, and no axis {axis}")
    if variable.broadcastable[axis]:
        raise ValueError(
            f"{described(variable)} cannot be divided: its axis {axis} is broadcastable and has no rows. Pass an input "
            "in bcast_inputs, or make it of a type whose axis may have any length"
        )
    return axis % variable.ndim


# -- minibatches of shared variables, as in Theano's tutorials


def minibatches(variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Find slices of shared variables whose bounds are computed: ``data[index * n : (index + 1) * n]``.

    Parameters
    ----------
    variables : list of variables
        All variables of a function, inputs included.

    Returns
    -------
    list of variables
        Slices along axis 0 that have equal bounds, of shared variables that now have equal numbers of rows. If there
        are several such groups, the group whose shared variables have the most bytes.
    list of variables
        Slices whose bounds are computed, but that are along another axis, have a step, or have a static length.
    """
    groups: list[tuple[Any, int, list[Any], int]] = []  # bounds, number of rows, slices, bytes
    others = []
    for var in dict.fromkeys(variables):
        shared = _sliced(var)
        if shared is None:
            continue
        index = ops.basic_index(var.owner.inputs, var.owner.op)
        if not index:  # of a shared variable without axes
            continue
        first, *rest = index
        is_minibatch = isinstance(first, slice) and first.step is None and _is_computed(first)
        if not is_minibatch or known_lengths(var)[0] is not None:
            others += [var] if any(map(_is_computed, (first, *rest))) else []
            continue
        array = get_array(shared)
        for i, (bounds, n_rows, slices, n_bytes) in enumerate(groups):
            if n_rows == array.shape[0] and _equal((first.start, first.stop), bounds):
                groups[i] = bounds, n_rows, [*slices, var], n_bytes + array.nbytes
                break
        else:
            groups.append(((first.start, first.stop), array.shape[0], [var], array.nbytes))
    return max(groups, key=lambda group: group[3])[2] if groups else [], others


def _sliced(var: Any) -> Any:
    """Return the shared variable of which a variable is a slice, possibly after a cast; ``None`` if there is none."""
    node = var.owner
    if node is None or not isinstance(node.op, ops.Subtensor):
        return None
    base = node.inputs[0]
    while base.owner is not None and isinstance(base.owner.op, ops.Elemwise):
        if not isinstance(base.owner.op.scalar_op, (scalar.Cast, scalar.Identity)):
            break
        base = base.owner.inputs[0]
    return base if is_shared_variable(base) and is_tensor_variable(base) else None


def _is_computed(entry: Any) -> bool:
    """Return whether an entry of an index is a slice with a bound that depends on variables, not only on constants."""
    bounds = (entry.start, entry.stop) if isinstance(entry, slice) else ()
    found = ancestors([one for one in bounds if hasattr(one, "owner")])
    return any(one.owner is None and not isinstance(one, Constant) for one in found)


def _equal(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists of expressions apply the same operations to the same variables and constants."""
    return len(ones) == len(others) and all(map(_equal_pair, ones, others))


def _equal_pair(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Constant) and isinstance(other, Constant):
        return bool(one.equals(other))
    if getattr(one, "owner", None) is None or getattr(other, "owner", None) is None:
        return not hasattr(one, "owner") and not hasattr(other, "owner") and one == other
    return one.owner.op == other.owner.op and one.index == other.index and _equal(one.owner.inputs, other.owner.inputs)
