"""Variables, nodes, and walks over graphs of Theano's.

Variables and expressions that are like another variable of Theano's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import theano
import theano.tensor as T
from theano import Apply, Constant, Op, Variable, clone, config, grad, scalar, shared
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
FOLDER = os.path.dirname(theano.__file__)
INTEGERS = tuple(T.integer_dtypes)
#: The dtypes that have gradients.
CONTINUOUS = tuple(T.continuous_dtypes)
#: Types of numbers, and of slices, that are no tensors.
NO_TENSORS = (scalar.Scalar, SliceType)

#: When functions are rewritten: after all that merges, and before anything works in place; and before elementwise
#: operations take the memory of what they read.
AFTER_MERGES, BEFORE_ELEMENTWISE = 49.4, 74


def copied(node: Any, inputs: Sequence[Any], is_serial: bool = False) -> list[Any]:
    """The outputs of a node like this one, of other inputs of the same types."""
    return list(node.clone_with_new_inputs(list(inputs)).outputs)


def known_lengths(variable: Any) -> tuple[int | None, ...]:
    """The length along each axis, where the type tells it."""
    return tuple(1 if fixed else None for fixed in variable.broadcastable)


def length_along(variable: Any, axis: int) -> Any:
    """The length of a variable along one axis, a symbolic int64 scalar."""
    return T.opt.Shape_i(axis)(variable)


def substituted(inputs: Sequence[Any], outputs: Sequence[Any], given: Mapping[Any, Any]) -> list[Any]:
    """The outputs of a graph, with other variables in the place of some."""
    clones = clone_get_equiv(inputs, outputs, copy_inputs=False, copy_orphans=False, memo=dict(given))
    return [clones[output] for output in outputs]


def retyped(variable: Any, dtype: Any = None, free: Sequence[int] = ()) -> Any:
    """The type of a variable, with another dtype, and with any length along some axes."""
    fixed = tuple(one and axis not in free for axis, one in enumerate(variable.broadcastable))
    return TensorType(str(dtype or variable.dtype), fixed)


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
    all_steps, _ = theano.scan(
        step,
        sequences=[T.arange(n_steps)],
        outputs_info=list(initial),
        non_sequences=list(others),
        strict=True,
        return_list=True,
    )
    return [values[-1] for values in all_steps]


def register(name: str, rewriter: Any, position: float, *tags: str) -> None:
    """Have functions rewritten as they are compiled, in modes with one of the tags."""
    optdb.register(name, rewriter, position, *tags)


def input_like(var: Any) -> Any:
    """A new input for values of a shared variable."""
    return T.TensorType(var.dtype, var.broadcastable)()


def as_type_of(var: Any, value: Any) -> Any:
    """An expression that may stand in the place of a variable, some of whose rows it has."""
    if value.broadcastable != var.broadcastable:
        value = T.patternbroadcast(value, var.broadcastable)
    return var.type.filter_variable(value)  # to the GPU, where the variable is


def shared_like(value: Any, name: str, var: Any) -> Any:
    """A new shared variable of a variable's dtype and broadcast pattern."""
    return shared(value, name=name, broadcastable=var.broadcastable)


def reshaped_like(value: Any, shape: Sequence[int], var: Any) -> Any:
    """The elements of an expression in a shape, which is that of a variable's value, with its broadcast pattern."""
    return T.patternbroadcast(value.reshape(shape), var.broadcastable)
