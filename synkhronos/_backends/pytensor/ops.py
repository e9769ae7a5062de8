"""Classes of PyTensor's operations, and functions that read their Apply nodes."""

# ruff: noqa: F401 (the classes are used through this module)

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from pytensor.compile.builders import OpFromGraph, SymbolicOp
from pytensor.compile.ops import DeepCopyOp, FromFunctionOp, ViewOp
from pytensor.conditional.op import IfElse
from pytensor.gradient import DisconnectedGrad, GradClip, GradScale, UndefinedGrad, ZeroGrad
from pytensor.graph.op import HasMultipleInnerGraph
from pytensor.raise_op import Assert, CheckAndRaise
from pytensor.scan.op import Scan
from pytensor.sparse.math import Dot as SparseDot
from pytensor.sparse.math import StructuredDot, StructuredDotGradCSC, StructuredDotGradCSR
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    ExtractDiag,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.blas.batched import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CpuContiguous, CumOp
from pytensor.tensor.extra_ops import Repeat as RepeatOp
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import All, Argmax, Dot, Max, Min, Prod, ProdWithoutZeros, Sum
from pytensor.tensor.math import Any as AnyOp
from pytensor.tensor.random import basic as random
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)
from pytensor.tensor.symbolic import FusibleSymbolicOp, FusibleSymbolicOpDerivative

from synkhronos._backends import common
from synkhronos._backends.common import Absent

AbstractConv2d = AbstractConv2d_gradInputs = AbstractConv2d_gradWeights = Absent
AbstractConv3d = AbstractConv3d_gradInputs = AbstractConv3d_gradWeights = Absent
AdvancedIncSubtensor1 = AdvancedSubtensor1 = Absent  # the general classes are used for one index vector, too
CAReduceDtype = MaxAndArgmax = Absent
ConsiderConstant = OutputGuard = Rebroadcast = Absent
CrossentropyCategorical1Hot = CrossentropyCategorical1HotGrad = Absent
CrossentropySoftmaxArgmax1HotWithBias = CrossentropySoftmax1HotWithBiasDx = Absent
Pool = AveragePoolGrad = MaxPoolGrad = MaxPoolRop = DownsampleFactorMaxGradGrad = Absent
SoftmaxGrad = SoftmaxWithBias = Absent


def basic_index(inputs: Sequence[Any], op: Any) -> list[Any]:
    """Return the slices and integers of basic indexing; ``inputs`` are those of the Apply node, the array first."""
    return list(indices_from_subtensor(inputs[1:], op.idx_list))


def adds(op: Any) -> bool:
    """Return whether an indexed update adds to the selected elements, repeatedly for repeated indices."""
    return not (op.set_instead_of_inc or op.ignore_duplicates)


advanced_index = basic_index  # the entries are arrays and slices


def axis_of(node: Any) -> Any:
    """Return the axis along which an Apply node joins, splits, sorts, accumulates or repeats: an int."""
    return node.op.axis


def parts_of(node: Any) -> list[Any]:
    """Return the variables that an Apply node joins."""
    return list(node.inputs)


def draws_each(op: Any) -> bool:
    """Return whether each number is drawn independently, with the parameters at its own position."""
    return op.ndim_supp == 0 and not any(op.ndims_params)


def inner_outputs(op: Any) -> list[Any]:
    """Return the outputs of an operation's inner graphs; empty if it has none."""
    graphs = op.inner_graphs.values() if isinstance(op, HasMultipleInnerGraph) else ()
    return [output for graph in graphs for output in graph.outputs]


def inlined(node: Any) -> list[Any]:
    """Return the outputs of an Apply node with an inner graph, as expressions of the Apply node's inputs."""
    inner = node.op.fgraph
    return inner.bind([one.type.filter_variable(given) for one, given in zip(inner.inputs, node.inputs)])


def around(op: Any, inputs: Sequence[Any], inner_inputs: Sequence[Any], inner_outputs: Sequence[Any]) -> list[Any]:
    """Apply an operation like `op`, of `INLINED_LATE`, to inputs of other types; return its outputs.

    Parameters
    ----------
    op : Op
    inputs : list of variables
    inner_inputs, inner_outputs : list of variables
        What the operation computes for inputs of these types.
    """
    if not isinstance(op, SymbolicOp):  # that builds its inner graph from the types of its inputs
        op = type(op)(list(inner_inputs), list(inner_outputs), inline=op.is_inline, on_unused_input="ignore")
    return list(op(*inputs, return_list=True))


def read_loop(node: Any) -> common.Loop:
    """Return the description of a Scan."""
    op, info, steps = node.op, node.op.info, node.op.fgraph.unfreeze()

    def like(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        names = ("mode", "truncate_gradient", "name", "profile", "allow_gc", "strict")
        own = dataclasses.replace(info, n_non_seqs=info.n_non_seqs + len(inputs) - info.n_inner_inputs)
        return Scan(list(inputs), list(outputs), own, **{name: getattr(op, name) for name in names})

    shared = zip(op.inner_untraced_sit_sot(steps.inputs), op.outer_untraced_sit_sot(node.inputs))
    return common.read_loop(node, steps.inputs, steps.outputs, info, shared, like)


def softmax_axes(node: Any) -> tuple[int, ...]:
    """Return the axes along which a softmax, or its logarithm, normalizes."""
    n_axes = node.inputs[0].ndim
    return tuple(range(n_axes)) if node.op.axis is None else tuple(axis % n_axes for axis in node.op.axis)


def joined_axes(node: Any) -> list[Any]:
    """Express a JoinDims node as a reshape."""
    (variable,), first, n_axes = node.inputs, node.op.start_axis, node.op.n_axes
    shape = [variable.shape[axis] for axis in range(variable.ndim)]
    joined = functools.reduce(lambda a, b: a * b, shape[first : first + n_axes], 1)
    return [variable.reshape([*shape[:first], joined, *shape[first + n_axes :]])]


def split_axis(node: Any) -> list[Any]:
    """Express a SplitDims node as a reshape."""
    (variable, parts), axis = node.inputs, node.op.axis
    shape = [variable.shape[i] for i in range(variable.ndim)]
    parts = [parts[i] for i in range(node.outputs[0].ndim - variable.ndim + 1)]
    return [variable.reshape([*shape[:axis], *parts, *shape[axis + 1 :]])]


#: Operations that can be expressed by others, by class. The functions return expressions for an Apply node's outputs.
EXPRESSED: dict[type, Callable[[Any], Any]] = {JoinDims: joined_axes, SplitDims: split_axis}

#: Operations with inner graphs that the backend itself inlines, after rewrites that recognize the operations.
INLINED_LATE = (FusibleSymbolicOp, FusibleSymbolicOpDerivative)

#: Operations that draw random numbers. From a state, a size and parameters, they compute a new state and the numbers.
DRAWS: tuple[type, ...] = tuple(
    kind
    for kind in vars(random).values()
    if isinstance(kind, type) and issubclass(kind, RandomVariable) and kind is not RandomVariable
)
