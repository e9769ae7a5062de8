"""Classes of Theano's operations, and functions that read their Apply nodes."""

# ruff: noqa: F401 (the classes are used through this module)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from theano.compile.builders import OpFromGraph
from theano.compile.ops import DeepCopyOp, FromFunctionOp, OutputGuard, Rebroadcast, Shape, Shape_i, ViewOp
from theano.gradient import ConsiderConstant, DisconnectedGrad, GradClip, GradScale, UndefinedGrad, ZeroGrad
from theano.ifelse import IfElse
from theano.sandbox.rng_mrg import mrg_uniform as MrgUniform
from theano.scan_module.scan_op import Scan
from theano.sparse.basic import Dot as SparseDot
from theano.sparse.basic import StructuredDot, StructuredDotGradCSC, StructuredDotGradCSR
from theano.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    Dot,
    ExtractDiag,
    Join,
    MaxAndArgmax,
    Reshape,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from theano.tensor.blas import BatchedDot
from theano.tensor.elemwise import All, CAReduce, CAReduceDtype, DimShuffle, Elemwise, Prod, ProdWithoutZeros, Sum
from theano.tensor.elemwise import Any as AnyOp
from theano.tensor.extra_ops import CpuContiguous, CumOp, RepeatOp
from theano.tensor.nnet import bn
from theano.tensor.nnet.abstract_conv import (
    AbstractConv2d,
    AbstractConv2d_gradInputs,
    AbstractConv2d_gradWeights,
    AbstractConv3d,
    AbstractConv3d_gradInputs,
    AbstractConv3d_gradWeights,
)
from theano.tensor.nnet.nnet import (
    CrossentropyCategorical1Hot,
    CrossentropyCategorical1HotGrad,
    CrossentropySoftmax1HotWithBiasDx,
    CrossentropySoftmaxArgmax1HotWithBias,
    LogSoftmax,
    Softmax,
    SoftmaxGrad,
    SoftmaxWithBias,
)
from theano.tensor.opt import Assert, MakeVector
from theano.tensor.raw_random import RandomFunction
from theano.tensor.signal.pool import AveragePoolGrad, DownsampleFactorMaxGradGrad, MaxPoolGrad, MaxPoolRop, Pool
from theano.tensor.sort import ArgSortOp, SortOp
from theano.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedIncSubtensor1,
    AdvancedSubtensor,
    AdvancedSubtensor1,
    IncSubtensor,
    Subtensor,
    get_idx_list,
)

from synkhronos._backends import common
from synkhronos._backends.common import Absent
from synkhronos._backends.theano import batchnorm as normalization
from synkhronos._backends.theano.graph import substituted

Argmax = Max = Min = Absent
Blockwise = CheckAndRaise = SolveBase = Absent
SpecifyShape = Absent  # Theano's own class differs from PyTensor's

#: Operations that can be expressed by others, by class. The functions return expressions for an Apply node's outputs.
EXPRESSED: dict[type, Callable[[Any], Any]] = {
    bn.AbstractBatchNormTrain: normalization.outputs,
    bn.AbstractBatchNormTrainGrad: normalization.gradients,
    bn.AbstractBatchNormInference: bn.local_abstract_batch_norm_inference.transform,
}

#: Operations with inner graphs that the backend itself inlines, after rewrites that recognize the operations.
INLINED_LATE: tuple[type, ...] = ()
around = common.skip

#: Operations that draw random numbers. From a state, a size and parameters, they compute a new state and the numbers.
DRAWS: tuple[type, ...] = (RandomFunction, MrgUniform)


def basic_index(inputs: Sequence[Any], op: Any) -> list[Any]:
    """Return the slices and integers of basic indexing; ``inputs`` are those of the Apply node, the array first."""
    return list(get_idx_list(inputs, op.idx_list))


def adds(op: Any) -> bool:
    """Return whether an indexed update adds to the selected elements, repeatedly for repeated indices."""
    return not op.set_instead_of_inc


def advanced_index(inputs: Sequence[Any], op: Any) -> list[Any]:
    """Return the parts of an advanced index, as `basic_index`; they may be arrays, and slices are variables."""
    return list(inputs[1:])


def axis_of(node: Any) -> Any:
    """Return the axis along which an Apply node joins, splits, sorts, accumulates or repeats: an int or a variable."""
    place = {Join: 0, Split: 1, SortOp: 1, ArgSortOp: 1}.get(type(node.op))
    return node.op.axis if place is None else node.inputs[place]


def parts_of(node: Any) -> list[Any]:
    """Return the variables that an Apply node joins."""
    return list(node.inputs[1:])


def draws_each(op: Any) -> bool:
    """Return whether each number is drawn independently, with the parameters at its own position."""
    return True


def inner_outputs(op: Any) -> list[Any]:
    """Return the outputs of an operation's inner graph; empty if it has none."""
    return list(getattr(op, "outputs", None) or getattr(op, "local_outputs", None) or ())


def inlined(node: Any) -> list[Any]:
    """Return the outputs of an Apply node with an inner graph, as expressions of the Apply node's inputs."""
    op = node.op
    given = {inner: inner.type.filter_variable(outer) for inner, outer in zip(op.local_inputs, node.inputs)}
    return substituted(op.local_inputs, op.local_outputs, given)


def read_loop(node: Any) -> common.Loop:
    """Return the description of a Scan."""
    op, info = node.op, node.op.info
    shared = zip(op.inner_shared(op.inputs), op.outer_shared(node.inputs))
    like = lambda inputs, outputs: Scan(list(inputs), list(outputs), info.copy())  # noqa: E731
    return common.read_loop(node, op.inputs, op.outputs, op, shared, like)


def softmax_axes(node: Any) -> tuple[int, ...]:
    """Return the axes along which a softmax, or its logarithm, normalizes."""
    return (node.inputs[0].ndim - 1,)
