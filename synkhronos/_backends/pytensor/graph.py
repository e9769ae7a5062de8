"""Variables, nodes, and walks over graphs of PyTensor's.

Variables and expressions that are like another variable of PyTensor's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytensor
import pytensor.tensor as T
from pytensor import config, grad, scalar, shared
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
from pytensor.scan.basic import scan
from pytensor.tensor.basic import get_underlying_scalar_constant_value as get_scalar_constant_value
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.shape import Shape_i, specify_broadcastable
from pytensor.tensor.type import DenseTensorType as DenseType
from pytensor.tensor.type import TensorType, continuous_dtypes, integer_dtypes
from pytensor.tensor.type_other import NoneTypeT, SliceType
from pytensor.tensor.variable import TensorConstant

from synkhronos._backends.pytensor.custom_op import Op

__all__ = [
    "AFTER_MERGES",
    "BEFORE_ELEMENTWISE",
    "CONTINUOUS",
    "FOLDER",
    "INTEGERS",
    "NO_TENSORS",
    "Apply",
    "Constant",
    "DenseType",
    "DisconnectedType",
    "InconsistencyError",
    "NotScalarConstantError",
    "Op",
    "ReplaceValidate",
    "Rewriter",
    "SharedVariable",
    "T",
    "TensorConstant",
    "TensorType",
    "UnusedInputError",
    "Variable",
    "accumulated",
    "ancestors",
    "as_type_of",
    "clone",
    "config",
    "copied",
    "copy_stack_trace",
    "get_scalar_constant_value",
    "grad",
    "input_like",
    "io_toposort",
    "known_lengths",
    "leaves_of",
    "length_along",
    "register",
    "reshaped_like",
    "retyped",
    "scalar",
    "shared",
    "shared_like",
    "substituted",
    "with_broadcastable",
]


#: Where the engine itself lies.
FOLDER = os.path.dirname(pytensor.__file__)
INTEGERS = tuple(integer_dtypes)
#: The dtypes that have gradients.
CONTINUOUS = tuple(continuous_dtypes)
#: Types of numbers, of slices and of nothing, that are no tensors.
NO_TENSORS = (scalar.ScalarType, SliceType, NoneTypeT)

#: When functions are rewritten: after all that merges, and before anything works in place; and before elementwise
#: operations take the memory of what they read. What fuses these has several outputs, all of which depend on what one
#: does: so it comes after the former, and equal nodes are merged once more before.
AFTER_MERGES, BEFORE_ELEMENTWISE = 48.6, 50.4
optdb.register("synkhronos_merge", MergeOptimizer(), "fast_run", "merge", position=AFTER_MERGES - 0.1)


def copied(node: Any, inputs: Sequence[Any], is_serial: bool = False) -> list[Any]:
    """The outputs of a node like this one, of other inputs, whose types may have other static lengths.

    The node is cloned where its inputs allow that: ``make_node`` need not take what a node has as inputs. With
    ``is_serial`` inputs have the values of the node's own inputs, and so may be said to have their static lengths.
    """
    pairs = list(zip(node.inputs, inputs))
    if is_serial or all(old.type.is_super(new.type) for old, new in pairs):
        clone = node.clone()
        clone.inputs = [new if old.type.is_super(new.type) else old.type.filter_variable(new) for old, new in pairs]
        return list(clone.outputs)
    if isinstance(node.op, SymbolicOp):  # it is made for each type
        return list(node.op(*inputs, return_list=True))
    return list(node.op.make_node(*inputs).outputs)


def known_lengths(variable: Any) -> tuple[int | None, ...]:
    """The length along each axis, where the type tells it."""
    return tuple(variable.type.shape)


def length_along(variable: Any, axis: int) -> Any:
    """The length of a variable along one axis, a symbolic int64 scalar."""
    return Shape_i(axis)(variable)


def leaves_of(variables: Iterable[Any], blockers: Iterable[Any] | None = None) -> list[Any]:
    """What some variables are computed of, and is itself not computed."""
    return list(graph_inputs(list(variables), blockers))


def clone(output: Any, replace: Any = None, share_inputs: bool = True) -> Any:
    """An expression, or several, with others in the place of some variables."""
    return clone_replace(output, replace, rebuild_strict=False, copy_inputs_over=share_inputs)


def substituted(inputs: Sequence[Any], outputs: Sequence[Any], given: Mapping[Any, Any]) -> list[Any]:
    """The outputs of a graph, with other variables in the place of some."""
    clones = dict(given)
    for node in io_toposort([*inputs, *clones], outputs):
        new = copied(node, [clones.get(one, one) for one in node.inputs])
        clones.update((old, one) for old, one in zip(node.outputs, new) if old not in clones)
    return [clones.get(output, output) for output in outputs]


def retyped(variable: Any, dtype: Any = None, free: Sequence[int] = ()) -> Any:
    """The type of a variable, with another dtype, and with any length along some axes."""
    shape = tuple(None if axis in free else length for axis, length in enumerate(variable.type.shape))
    return variable.type.clone(dtype=str(dtype or variable.dtype), shape=shape)


def with_broadcastable(variable: Any, broadcastable: Sequence[bool]) -> Any:
    """A variable whose axes are known to have length 1 where they are broadcastable."""
    pairs = enumerate(zip(broadcastable, variable.broadcastable))
    return specify_broadcastable(variable, *(axis for axis, (fixed, known) in pairs if fixed and not known))


def accumulated(
    step: Callable[..., list[Any]], initial: Sequence[Any], n_steps: Any, others: Sequence[Any]
) -> list[Any]:
    """What some variables are after a loop.

    Parameters
    ----------
    step : callable
        ``step(number, *variables, *others)`` gives the variables after a step.
    initial : list of variables
        Those before the first step, of which there is one at least.
    n_steps : variable
    others : list of variables
        What else the steps use.
    """
    all_steps = scan(
        step,
        sequences=[T.arange(n_steps)],
        outputs_info=list(initial),
        non_sequences=list(others),
        strict=True,
        return_list=True,
        return_updates=False,
    )
    return [values[-1] for values in all_steps]


def register(name: str, rewriter: Any, position: float, *tags: str) -> None:
    """Have functions rewritten as they are compiled, in modes with one of the tags."""
    optdb.register(name, rewriter, *tags, position=position)


def input_like(var: Any) -> Any:
    """A new input for values of a shared variable."""
    return T.TensorType(var.dtype, shape=tuple(1 if length == 1 else None for length in var.type.shape))()


def as_type_of(var: Any, value: Any) -> Any:
    """An expression that may stand in the place of a variable, some of whose rows it has.

    Raises
    ------
    TypeError
        If the variable's type has a length, so that it has either all rows or none.
    """
    if var.type.ndim and var.type.shape[0] not in (None, 1):
        raise TypeError(
            f"{var} has the static length {var.type.shape[0]}, and cannot be used by rows: make it by "
            "pytensor.shared(value) without shape="
        )
    return var.type.filter_variable(T.specify_shape(value, var.type.shape))


def shared_like(value: Any, name: str, var: Any) -> Any:
    """A new shared variable of a variable's dtype and static shape."""
    return shared(value, name=name, shape=var.type.shape)


def reshaped_like(value: Any, shape: Sequence[int], var: Any) -> Any:
    """The elements of an expression in a shape, which is that of a variable's value, with its static shape.

    An axis of which the variable does not say that its length is 1 may not be known to have it here: such an
    expression would not be taken for its new value.
    """
    loose = any(length == 1 and static is None for length, static in zip(shape, var.type.shape))
    return T.specify_shape(value.reshape(var.shape if loose else shape), var.type.shape)
