"""Variables, Apply nodes and graph traversal of Theano, and new variables with the type of another variable."""

# ruff: noqa: F401 (the imported names are used through this module)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import theano
import theano.tensor as T
from theano import Apply, Constant, Op, Variable, clone, config, grad, printing, scalar, shared
from theano.compile import UnusedInputError, optdb
from theano.compile.sharedvalue import SharedVariable
from theano.gof import InconsistencyError
from theano.gof import Optimizer as Rewriter
from theano.gof.graph import ancestors, clone_get_equiv, io_toposort
from theano.gof.graph import inputs as leaves_of
from theano.gof.opt import copy_stack_trace
from theano.gof.toolbox import ReplaceValidate
from theano.gradient import DisconnectedType
from theano.tensor import NotScalarConstantError, SliceType, TensorConstant, TensorType, get_scalar_constant_value
from theano.tensor import TensorType as DenseType
from theano.tensor import patternbroadcast as with_broadcastable

#: Types of values that are not tensors: scalars and slices.
NO_TENSORS = (scalar.Scalar, SliceType)

#: Positions of rewrites: after merges and before all in-place rewrites; and just before elementwise operations are made
#: to overwrite their inputs.
AFTER_MERGES, BEFORE_ELEMENTWISE = 49.4, 74


def copied(node: Any, inputs: Sequence[Any], is_serial: bool = False) -> list[Any]:
    """Apply the operation of an Apply node to other inputs of the same types; return the outputs."""
    return list(node.clone_with_new_inputs(list(inputs)).outputs)


def known_lengths(variable: Any) -> tuple[int | None, ...]:
    """Return the length along each axis, as far as the type states it, else ``None``."""
    return tuple(1 if fixed else None for fixed in variable.broadcastable)


def substituted(inputs: Sequence[Any], outputs: Sequence[Any], given: Mapping[Any, Any]) -> list[Any]:
    """Return the outputs of a graph, with some variables replaced."""
    clones = clone_get_equiv(inputs, outputs, copy_inputs=False, copy_orphans=False, memo=dict(given))
    return [clones[output] for output in outputs]


def retyped(variable: Any, dtype: Any = None, free: Sequence[int] = ()) -> Any:
    """Return the type of a variable, with another dtype, and without static lengths along the axes ``free``."""
    fixed = tuple(one and axis not in free for axis, one in enumerate(variable.broadcastable))
    return TensorType(str(dtype or variable.dtype), fixed)


def scan(step: Callable[..., list[Any]], **arguments: Any) -> Any:
    """Return the values of a loop's variables after each step."""
    return theano.scan(step, **arguments)[0]


def register(name: str, rewriter: Any, position: float, *tags: str) -> None:
    """Register a rewrite of function graphs, for modes with one of the tags."""
    optdb.register(name, rewriter, position, *tags)


def input_like(var: Any) -> Any:
    """Make a new input for values of a shared variable."""
    return T.TensorType(var.dtype, var.broadcastable)()


def as_type_of(var: Any, value: Any) -> Any:
    """Convert an expression for some rows of a variable to the variable's type, so that it can replace the variable."""
    if value.broadcastable != var.broadcastable:
        value = T.patternbroadcast(value, var.broadcastable)
    return var.type.filter_variable(value)  # moves it to the GPU if the variable is there


def shared_like(value: Any, name: str, var: Any) -> Any:
    """Make a new shared variable of a variable's dtype and broadcast pattern."""
    return shared(value, name=name, broadcastable=var.broadcastable)


def reshaped_like(value: Any, shape: Sequence[int], var: Any) -> Any:
    """Reshape an expression to the shape of a variable's value, with the variable's broadcast pattern."""
    return T.patternbroadcast(value.reshape(shape), var.broadcastable)
