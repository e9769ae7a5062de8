"""Nodes of the user's graph and of the divided one, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from synkhronos._backends import TensorType, ancestors, known_lengths, ops, with_broadcastable
from synkhronos._backends import copied as node_with
from synkhronos._exact.placements import Placed, Placement, Replicate, Shard

__all__ = ["copied", "is_broadcast", "is_of_one_sum", "is_of_the_user", "kind_of", "typed"]

#: By what an operation computes.
_COMPUTING = ("perform", "c_code", "make_thunk")


def kind_of(op: Any) -> type:
    """The type of an operation, or that of a check or an inner graph, if it is derived from that and computes alike."""
    for base in (ops.CheckAndRaise, ops.OpFromGraph):
        if isinstance(op, base) and all(
            getattr(type(op), name, None) is getattr(base, name, None) for name in _COMPUTING
        ):
            return base
    return type(op)


#: The packages whose operations always give the same results for the same inputs.
_PURE = ("theano", "pytensor", "pymc", "lasagne", "synkhronos")


def is_of_the_user(op: Any) -> bool:
    """Whether an operation, or one within it, is computed by Python code from outside of the known packages.

    What such code does is not known: it may draw from ``np.random``.
    """
    if isinstance(op, ops.Blockwise):
        return is_of_the_user(op.core_op)
    if isinstance(op, ops.FromFunctionOp):
        return True
    if _package_of(op, "c_code") in _PURE and any(_package_of(op, name) not in _PURE for name in ("perform", "impl")):
        return True
    scalar_op = getattr(op, "scalar_op", None)  # which Elemwise applies to each element
    if scalar_op is not None and is_of_the_user(scalar_op):
        return True
    inner = {variable.owner for variable in ancestors(ops.inner_outputs(op))} - {None}
    return any(is_of_the_user(node.op) for node in inner)


def _package_of(op: Any, method: str) -> str:
    """The package that defines a method of an operation; that of the engine where nothing does."""
    function = getattr(type(op), method, None)
    return str(getattr(function, "__module__", None) or _PURE[0]).split(".")[0]


def copied(node: Any, inputs: Sequence[Any], *, is_serial: bool = False) -> list[Any]:
    """The outputs of a node like this one, of other inputs.

    Parameters
    ----------
    node : Apply
        Of the user's graph.
    inputs : list of variables
        Of the same types, except for static lengths.
    is_serial : bool
        Whether the inputs have the values of the serial program, and so the static lengths that it gives them.
    """
    if all(new is old for new, old in zip(inputs, node.inputs)):
        return list(node.outputs)
    return node_with(node, inputs, is_serial)


def is_of_one_sum(variable: Any, placements: Mapping[Any, Placement]) -> bool:
    """Whether a variable is made of one that is no larger and can be reduced in its place, for others too."""
    node = variable.owner
    if node is None or not isinstance(node.op, (ops.Elemwise, ops.DimShuffle)):
        return False
    sums = [one for one in node.inputs if not isinstance(placements[one], Replicate)]
    return len(sums) == 1 and sums[0].broadcastable.count(False) == variable.broadcastable.count(False)


def is_broadcast(placed: Placed) -> bool:
    """Whether rows are said to lie along an axis that is broadcast, or of a length that is the same on all ranks."""
    return isinstance(placed.placement, Shard) and known_lengths(placed.variable)[placed.placement.axis] is not None


def typed(new: Any, variable: Any) -> Any:
    """A variable of the divided graph, of the type of the user's; but it need not tell lengths other than 1."""
    if new.type == variable.type:
        return new
    if isinstance(new.type, TensorType) and new.dtype == variable.dtype and new.ndim == variable.ndim:
        return with_broadcastable(new, variable.broadcastable)
    raise TypeError(f"{variable}: {new.type} in place of {variable.type}")
