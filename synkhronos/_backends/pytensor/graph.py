"""Graphs of PyTensor (variables, Apply nodes, traversal) and compiled functions (their parts, and redirection).

`pytensor.function` has no inner function to which it passes its arguments, so `redirect` replaces its code object. This
also works for programs that have imported `pytensor.function` under another name.
"""

# ruff: noqa: F401 (the imported names are used through this module)

from __future__ import annotations

import inspect
import operator
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytensor.tensor as T
from pytensor import In, Out, config, grad, printing, scalar, shared
from pytensor.compile import UnusedInputError
from pytensor.compile.builders import SymbolicOp
from pytensor.compile.executor import Function
from pytensor.compile.maker import function
from pytensor.compile.mode import Mode, get_mode, optdb
from pytensor.compile.rebuild import rebuild_collect_shared
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Constant, Variable, equal_computations
from pytensor.graph.features import ReplaceValidate
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import GraphRewriter as Rewriter
from pytensor.graph.rewriting.basic import MergeOptimizer, copy_stack_trace, dfs_rewriter, node_rewriter
from pytensor.graph.traversal import ancestors, graph_inputs, io_toposort
from pytensor.graph.utils import InconsistencyError, MissingInputError
from pytensor.link.basic import Container
from pytensor.link.utils import raise_with_op
from pytensor.scan import basic as _scan
from pytensor.tensor.basic import get_underlying_scalar_constant_value as get_scalar_constant_value
from pytensor.tensor.blas import _dot22
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.rewriting.blas import blas_optdb, local_dot22_to_dot22scalar
from pytensor.tensor.shape import specify_broadcastable
from pytensor.tensor.type import DenseTensorType as DenseType
from pytensor.tensor.type import TensorType
from pytensor.tensor.type_other import NoneTypeT, SliceType
from pytensor.tensor.variable import TensorConstant

from synkhronos._backends.common import FOR_EXACT, FOR_SLICES, only_scaled
from synkhronos._backends.pytensor.custom_op import Op, within

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


@node_rewriter([T.mul])
def _scale_product(fgraph: Any, node: Any) -> Any:
    """Multiply a matrix product by a factor within BLAS; see `only_scaled`."""
    is_single = only_scaled(node, _dot22, fgraph.clients.__getitem__)
    return local_dot22_to_dot22scalar.transform(fgraph, node) if is_single else False


blas_optdb.register("synkhronos_scale_product", dfs_rewriter(_scale_product), FOR_EXACT, position=12)


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


# -- functions

#: The arguments of `pytensor.function`.
KEYWORDS = tuple(inspect.signature(function).parameters)
#: Whether a call of a compiled function can select the outputs to compute.
TAKES_SUBSETS = False

#: Linkers whose functions ranks cannot use: class name and reason.
_REFUSED = {
    "JAXLinker": "JAX does not survive a fork, draws the same numbers on all ranks, and reads past the end of arrays "
    "without an error",
    "PytorchLinker": "PyTorch's compiler does not survive a fork",
    "MLXLinker": "MLX does not survive a fork",
}


def compile_function(inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> Any:
    """Call `pytensor.function`, after checking that ranks can use functions of the linker.

    Raises
    ------
    ValueError
        If they cannot.
    """
    linker = type(get_mode(kwargs.get("mode")).linker).__name__
    if linker in _REFUSED:
        raise ValueError(f"mode: {linker} cannot be used by ranks ({_REFUSED[linker]}): use NUMBA, C or CVM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The no_default_updates parameter is deprecated", DeprecationWarning)
        return function(inputs, outputs, **kwargs)


#: Function that returns the object (virtual machine) that executes a compiled function.
machine = operator.attrgetter("vm")


def execution(function: Any) -> tuple[Any, int, Sequence[list[Any]]] | None:
    """Return what a call executes, its number of outputs, and the storage cells to clear afterwards.

    Return ``None`` if the function's own `__call__` is needed: for inputs that the function may write to, and profiles.
    """
    vm = function.vm
    execute = within(function.maker.fgraph, vm) if hasattr(vm, "jit_fn") else vm
    if function.profile or function._potential_aliased_input_groups:
        return None
    made = [container.storage for container in function.output_storage]
    updates = [(i, container.storage) for i, container in function._update_input_storage]

    def compute() -> list[Any]:
        # functions that numba has compiled leave all outputs, updates included, in the storage cells
        outputs = execute()
        if outputs is None:
            outputs = [cell[0] for cell in made]
        for i, cell in updates:
            cell[0] = outputs[i]
        return outputs

    left = function._clear_output_storage_data if getattr(vm, "allow_gc", False) else ()
    return compute if getattr(vm, "need_update_inputs", True) else execute, function._n_returned_outputs, left


def raise_at(function: Any, node: Any, thunk: Any, storage_map: Any) -> None:
    """Raise the current exception again, with the explanation that `__call__` gives."""
    raise_with_op(function.maker.fgraph, node=node, thunk=thunk, storage_map=storage_map)


def updated_storage(function: Any) -> Sequence[list[Any]]:
    """Return the storage cells to which a call of a compiled function writes its updates."""
    if not function._has_updates:
        return ()
    pairs = zip(function.maker.expanded_inputs, function.input_storage)
    return [container.storage for spec, container in pairs if spec.update is not None]


plain_function: Any = types.FunctionType(
    function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
)
_build: Callable[[dict[str, Any]], Any] | None = None


def redirect(build: Callable[[dict[str, Any]], Any] | None) -> None:
    """Make `pytensor.function` pass its arguments to ``build``; ``None`` ends this.

    The caller of `pytensor.function` is the third frame above ``build``.
    """
    global _build
    _build = build
    function.__code__ = (_redirected if build else plain_function).__code__


def _redirected(
    inputs: Any,
    outputs: Any = None,
    mode: Any = None,
    updates: Any = None,
    givens: Any = None,
    no_default_updates: Any = None,
    accept_inplace: bool = False,
    name: Any = None,
    rebuild_strict: bool = True,
    allow_input_downcast: Any = None,
    profile: Any = None,
    on_unused_input: Any = None,
    trust_input: bool = False,
) -> Any:
    # this code object runs with the globals of PyTensor's module, so it must import what it uses
    asked = dict(locals())
    from synkhronos._backends.pytensor.graph import requested

    return requested(asked)


def requested(asked: dict[str, Any]) -> Any:
    """Build a function from the arguments of a program's `pytensor.function` call."""
    return _build(asked) if _build else plain_function(**asked)
