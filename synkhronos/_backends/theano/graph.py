"""Graphs of Theano (variables, Apply nodes, traversal) and compiled functions (their parts, and redirection).

`redirect` replaces the inner function to which `theano.function` passes its arguments. It therefore also works for
programs that have imported `theano.function` under another name.
"""

# ruff: noqa: F401 (the imported names are used through this module)

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import theano
import theano.tensor as T
from theano import Apply, Constant, In, Op, Out, Variable, clone, config, grad, printing, scalar, shared
from theano.compile import UnusedInputError, optdb
from theano.compile.function import function as compile_function  # programs may set theano.function to synk.function
from theano.compile.function_module import Function
from theano.compile.mode import Mode, get_mode
from theano.compile.pfunc import rebuild_collect_shared
from theano.compile.sharedvalue import SharedVariable
from theano.gof import InconsistencyError
from theano.gof import Optimizer as Rewriter
from theano.gof.fg import MissingInputError
from theano.gof.graph import ancestors, clone_get_equiv, io_toposort
from theano.gof.graph import inputs as leaves_of
from theano.gof.link import Container, raise_with_op
from theano.gof.opt import copy_stack_trace, in2out, local_optimizer
from theano.gof.toolbox import ReplaceValidate
from theano.gradient import DisconnectedType
from theano.scan_module.scan_utils import equal_computations
from theano.tensor import NotScalarConstantError, SliceType, TensorConstant, TensorType, get_scalar_constant_value
from theano.tensor import TensorType as DenseType
from theano.tensor import patternbroadcast as with_broadcastable
from theano.tensor.blas import _dot22, blas_optdb, local_dot22_to_dot22scalar

from synkhronos._backends.common import FOR_EXACT, FOR_SLICES, only_scaled

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


@local_optimizer([T.mul])
def _scale_product(node: Any) -> Any:
    """Multiply a matrix product by a factor within BLAS; see `only_scaled`."""
    is_single = only_scaled(node, _dot22, lambda product: product.clients)
    return local_dot22_to_dot22scalar.transform(node) if is_single else False


blas_optdb.register("synkhronos_scale_product", in2out(_scale_product), 11, FOR_EXACT)


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


# -- functions

#: The arguments of `theano.function`.
KEYWORDS = tuple(inspect.signature(compile_function).parameters)
#: Whether a call of a compiled function can select the outputs to compute.
TAKES_SUBSETS = True


#: Function that returns the object (virtual machine) that executes a compiled function.
machine = operator.attrgetter("fn")


def execution(function: Any) -> tuple[Any, int, list[list[Any]]] | None:
    """Return what a call executes, its number of outputs, and the storage cells to clear afterwards.

    Return ``None`` if the function's own `__call__` is needed: for inputs with default values, inputs that the function
    may write to, outputs with keys, and profiles.
    """
    fn = function.fn
    refilled = any(refeed for _, refeed, _ in function.defaults)
    written = function._check_for_aliased_inputs
    if refilled or written or function.profile or function.output_keys or getattr(fn, "need_update_inputs", True):
        return None
    left = [
        container.storage
        for variable, container in zip(function.maker.fgraph.outputs, function.output_storage)
        if variable.owner is not None and getattr(fn, "allow_gc", False)
    ]
    return fn, function.n_returned_outputs, left


def raise_at(function: Any, node: Any, thunk: Any, storage_map: Any) -> None:
    """Raise the current exception again, with the explanation that `__call__` gives."""
    raise_with_op(node, thunk, storage_map=storage_map)


def updated_storage(function: Any) -> Sequence[list[Any]]:
    """Return the storage cells to which a call of a compiled function writes its updates."""
    if function.n_returned_outputs == len(function.output_storage):
        return ()
    pairs = zip(function.maker.expanded_inputs, function.input_storage)
    return [container.storage for spec, container in pairs if spec.update is not None]


_module: Any = importlib.import_module("theano.compile.function")
_pfunc = _module.pfunc


def plain_function(inputs: Any, **arguments: Any) -> Any:
    """Build a function as Theano does."""
    return _pfunc(params=inputs, **arguments)


def redirect(build: Callable[[dict[str, Any]], Any] | None) -> None:
    """Make `theano.function` pass its arguments to ``build``; ``None`` ends this.

    The caller of `theano.function` is the third frame above ``build``.
    """
    _module.pfunc = _pfunc
    if build is not None:
        _module.pfunc = lambda params, **arguments: build({"inputs": params, **arguments})
