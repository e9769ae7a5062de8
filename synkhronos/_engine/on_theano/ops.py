"""The operations of Theano's graphs, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from theano.compile.builders import OpFromGraph
from theano.compile.ops import DeepCopyOp, OutputGuard, Rebroadcast, Shape, Shape_i, SpecifyShape, ViewOp
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
    Eye,
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

from synkhronos._engine.absent import absent

__all__ = [
    "DRAWS",
    "EXPRESSED",
    "INNER_GRAPHS",
    "ARange",
    "AbstractConv2d",
    "AbstractConv2d_gradInputs",
    "AbstractConv2d_gradWeights",
    "AbstractConv3d",
    "AbstractConv3d_gradInputs",
    "AbstractConv3d_gradWeights",
    "AdvancedIncSubtensor",
    "AdvancedIncSubtensor1",
    "AdvancedSubtensor",
    "AdvancedSubtensor1",
    "All",
    "Alloc",
    "AllocEmpty",
    "AnyOp",
    "ArgSortOp",
    "Argmax",
    "Assert",
    "AveragePoolGrad",
    "BatchedDot",
    "Blockwise",
    "CAReduce",
    "CAReduceDtype",
    "CheckAndRaise",
    "ConsiderConstant",
    "CpuContiguous",
    "CrossentropyCategorical1Hot",
    "CrossentropyCategorical1HotGrad",
    "CrossentropySoftmax1HotWithBiasDx",
    "CrossentropySoftmaxArgmax1HotWithBias",
    "CumOp",
    "DeepCopyOp",
    "DimShuffle",
    "DisconnectedGrad",
    "Dot",
    "DownsampleFactorMaxGradGrad",
    "Elemwise",
    "Eye",
    "GradClip",
    "GradScale",
    "IfElse",
    "IncSubtensor",
    "Join",
    "JoinDims",
    "LogSoftmax",
    "MakeVector",
    "Max",
    "MaxAndArgmax",
    "MaxPoolGrad",
    "MaxPoolRop",
    "Min",
    "OpFromGraph",
    "OutputGuard",
    "Pool",
    "Prod",
    "ProdWithoutZeros",
    "Rebroadcast",
    "RepeatOp",
    "Reshape",
    "ScalarFromTensor",
    "Scan",
    "Shape",
    "Shape_i",
    "Softmax",
    "SoftmaxGrad",
    "SoftmaxWithBias",
    "SortOp",
    "SparseDot",
    "SpecifyShape",
    "Split",
    "SplitDims",
    "StructuredDot",
    "StructuredDotGradCSC",
    "StructuredDotGradCSR",
    "Subtensor",
    "Sum",
    "TensorFromScalar",
    "UndefinedGrad",
    "ViewOp",
    "ZeroGrad",
    "basic_index",
    "inner_outputs",
    "scan_like",
]

Argmax = absent("Argmax")
Blockwise = absent("Blockwise")
CheckAndRaise = absent("CheckAndRaise")
JoinDims = absent("JoinDims")
Max = absent("Max")
Min = absent("Min")
SplitDims = absent("SplitDims")

#: By their types, operations that are made of others, and what makes of a node the expressions of its outputs.
EXPRESSED: dict[type, Callable[[Any], Any]] = {
    bn.AbstractBatchNormTrain: bn.local_abstract_batch_norm_train.transform,
    bn.AbstractBatchNormTrainGrad: bn.local_abstract_batch_norm_train_grad.transform,
    bn.AbstractBatchNormInference: bn.local_abstract_batch_norm_inference.transform,
}

#: Operations with an inner graph that is all that they compute.
INNER_GRAPHS: tuple[type, ...] = (OpFromGraph,)

#: Random draws: of a state, a size and arguments they make a new state, and what is drawn.
DRAWS: tuple[type, ...] = (RandomFunction, MrgUniform)


def basic_index(inputs: Sequence[Any], op: Any) -> list[Any]:
    """The slices and integers of basic indexing; ``inputs`` are what is indexed, and the numbers of the index."""
    return list(get_idx_list(inputs, op.idx_list))


def inner_outputs(op: Any) -> list[Any]:
    """The outputs of the inner graph of an operation, if it has one."""
    return list(getattr(op, "outputs", None) or getattr(op, "local_outputs", None) or ())


def scan_like(op: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """A Scan with as many sequences, states and others as another one, and with other steps."""
    return Scan(list(inputs), list(outputs), op.info.copy())
