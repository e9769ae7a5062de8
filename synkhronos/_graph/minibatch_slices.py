"""Detect minibatches of shared variables in a graph, such as ``data[index * n : (index + 1) * n]`` of tutorials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._backends import Constant, ancestors, known_lengths, ops, scalar
from synkhronos._graph.shared_variables import get_array, is_shared_variable, is_tensor_variable

_PICK = (ops.Subtensor, ops.AdvancedSubtensor1, ops.AdvancedSubtensor)


def picks_rows_of_shared(expressions: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Return whether one of the inputs selects rows of a shared variable, in the graph of the expressions."""
    wanted = set(inputs)
    for var in ancestors(list(expressions)):
        node = var.owner
        if node is not None and isinstance(node.op, _PICK):
            picked_from, *by = node.inputs
            shared = any(is_shared_variable(one) for one in ancestors([picked_from]))
            if shared and not wanted.isdisjoint(ancestors(by)):
                return True
    return False


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
