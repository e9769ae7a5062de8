"""Variables, Apply nodes and graph traversal of PyTensor, and new variables with the type of another variable."""

# ruff: noqa: F401 (the imported names are used through this module)

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytensor.tensor as T
from pytensor import config, grad, printing, scalar, shared
from pytensor.compile import UnusedInputError
from pytensor.compile.builders import SymbolicOp
from pytensor.compile.mode import optdb
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.features import ReplaceValidate
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import GraphRewriter as Rewriter
from pytensor.graph.rewriting.basic import MergeOptimizer, copy_stack_trace
from pytensor.graph.traversal import ancestors, graph_inputs, io_toposort
from pytensor.graph.utils import InconsistencyError
from pytensor.scan import basic as _scan
from pytensor.tensor.basic import get_underlying_scalar_constant_value as get_scalar_constant_value
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.shape import specify_broadcastable
from pytensor.tensor.type import DenseTensorType as DenseType
from pytensor.tensor.type import TensorType
from pytensor.tensor.type_other import NoneTypeT, SliceType
from pytensor.tensor.variable import TensorConstant

from synkhronos._backends.pytensor.custom_op import Op

#: Types of values that are not tensors: scalars, slices and ``None``.
NO_TENSORS = (scalar.ScalarType, SliceType, NoneTypeT)

#: Positions of rewrites: after merges and before all in-place rewrites; and just before elementwise operations are made
#: to overwrite their inputs. PyTensor's fusion makes nodes with several outputs, each of which then depends on the
#: inputs of all. The first position is therefore before fusion, and equal nodes are merged once more before it.
AFTER_MERGES, BEFORE_ELEMENTWISE = 48.6, 50.4
optdb.register("synkhronos_merge", MergeOptimizer(), "fast_run", "merge", position=AFTER_MERGES - 0.1)


def copied(node: Any, inputs: Sequence[Any], is_serial: bool = False) -> list[Any]:
    """Apply the operation of an Apply node to other inputs; return the outputs.

    The types of the inputs may differ from those of the node's own inputs in their static lengths.
    The node is cloned if the types of its inputs allow that, because ``make_node`` may refuse the inputs of an existing
    node. With ``is_serial``, the inputs have the values of the node's own inputs, so they can be converted to the types
    of these.
    """
    pairs = list(zip(node.inputs, inputs))
    if is_serial or all(old.type.is_super(new.type) for old, new in pairs):
        clone = node.clone()
        clone.inputs = [new if old.type.is_super(new.type) else old.type.filter_variable(new) for old, new in pairs]
        return list(clone.outputs)
    if isinstance(node.op, SymbolicOp):  # its inner graph depends on the types of its inputs
        return list(node.op(*inputs, return_list=True))
    return list(node.op.make_node(*inputs).outputs)


def known_lengths(variable: Any) -> tuple[int | None, ...]:
    """Return the length along each axis, as far as the type states it, else ``None``."""
    return tuple(variable.type.shape)


def leaves_of(variables: Iterable[Any], blockers: Iterable[Any] | None = None) -> list[Any]:
    """Return the leaves of a graph: variables from which some variables are computed, and that are not computed."""
    return list(graph_inputs(list(variables), blockers))


def clone(output: Any, replace: Any = None, share_inputs: bool = True) -> Any:
    """Return an expression, or several, with some variables replaced."""
    return clone_replace(output, replace, rebuild_strict=False, copy_inputs_over=share_inputs)


def substituted(inputs: Sequence[Any], outputs: Sequence[Any], given: Mapping[Any, Any]) -> list[Any]:
    """Return the outputs of a graph, with some variables replaced."""
    clones = dict(given)
    for node in io_toposort([*inputs, *clones], outputs):
        new = copied(node, [clones.get(one, one) for one in node.inputs])
        clones.update((old, one) for old, one in zip(node.outputs, new) if old not in clones)
    return [clones.get(output, output) for output in outputs]


def retyped(variable: Any, dtype: Any = None, free: Sequence[int] = ()) -> Any:
    """Return the type of a variable, with another dtype, and without static lengths along the axes ``free``."""
    shape = tuple(None if axis in free else length for axis, length in enumerate(variable.type.shape))
    return variable.type.clone(dtype=str(dtype or variable.dtype), shape=shape)


def with_broadcastable(variable: Any, broadcastable: Sequence[bool]) -> Any:
    """Return a variable whose type states length 1 for the broadcastable axes."""
    pairs = enumerate(zip(broadcastable, variable.broadcastable))
    return specify_broadcastable(variable, *(axis for axis, (fixed, known) in pairs if fixed and not known))


def scan(step: Callable[..., list[Any]], **arguments: Any) -> Any:
    """Return the values of a loop's variables after each step."""
    return _scan.scan(step, **arguments, return_updates=False)


def register(name: str, rewriter: Any, position: float, *tags: str) -> None:
    """Register a rewrite of function graphs, for modes with one of the tags."""
    optdb.register(name, rewriter, *tags, position=position)


def input_like(var: Any) -> Any:
    """Make a new input for values of a shared variable."""
    return T.TensorType(var.dtype, shape=tuple(1 if length == 1 else None for length in var.type.shape))()


def as_type_of(var: Any, value: Any) -> Any:
    """Convert an expression for some rows of a variable to the variable's type, so that it can replace the variable.

    Raises
    ------
    TypeError
        If the variable's type states the number of rows, so that fewer rows cannot replace it.
    """
    if var.type.ndim and var.type.shape[0] not in (None, 1):
        raise TypeError(
            f"{var} has the static length {var.type.shape[0]}, and cannot be used by rows: make it by "
            "pytensor.shared(value) without shape="
        )
    return var.type.filter_variable(T.specify_shape(value, var.type.shape))


def shared_like(value: Any, name: str, var: Any) -> Any:
    """Make a new shared variable of a variable's dtype and static shape."""
    return shared(value, name=name, shape=var.type.shape)


def reshaped_like(value: Any, shape: Sequence[int], var: Any) -> Any:
    """Reshape an expression to the shape of a variable's value, with the variable's static shape.

    If the variable's type does not state that an axis has length 1, the result's type must not state it either.
    Otherwise PyTensor would refuse the expression as the variable's new value.
    """
    loose = any(length == 1 and static is None for length, static in zip(shape, var.type.shape))
    return T.specify_shape(value.reshape(var.shape if loose else shape), var.type.shape)
