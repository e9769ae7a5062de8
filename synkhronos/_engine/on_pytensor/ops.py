"""The operations of PyTensor's graphs, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import DeepCopyOp, FromFunctionOp, ViewOp
from pytensor.conditional.op import IfElse
from pytensor.gradient import DisconnectedGrad, GradClip, GradScale, UndefinedGrad, ZeroGrad
from pytensor.raise_op import Assert, CheckAndRaise
from pytensor.scan.op import Scan
from pytensor.sparse.math import Dot as SparseDot
from pytensor.sparse.math import StructuredDot, StructuredDotGradCSC, StructuredDotGradCSR
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
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
)

from synkhronos._engine.absent import absent
from synkhronos._engine.on_pytensor.reading import (
    adds,
    advanced_index,
    axis_of,
    basic_index,
    draws_each,
    inlined,
    inner_outputs,
    joined_axes,
    parts_of,
    read_loop,
    softmax_axes,
    split_axis,
)

__all__ = [
    "DRAWS",
    "EXPRESSED",
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
    "FromFunctionOp",
    "GradClip",
    "GradScale",
    "IfElse",
    "IncSubtensor",
    "Join",
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
    "StructuredDot",
    "StructuredDotGradCSC",
    "StructuredDotGradCSR",
    "Subtensor",
    "Sum",
    "TensorFromScalar",
    "UndefinedGrad",
    "ViewOp",
    "ZeroGrad",
    "adds",
    "advanced_index",
    "axis_of",
    "basic_index",
    "draws_each",
    "inlined",
    "inner_outputs",
    "parts_of",
    "read_loop",
    "softmax_axes",
]

AbstractConv2d = absent("AbstractConv2d")
AbstractConv2d_gradInputs = absent("AbstractConv2d_gradInputs")
AbstractConv2d_gradWeights = absent("AbstractConv2d_gradWeights")
AbstractConv3d = absent("AbstractConv3d")
AbstractConv3d_gradInputs = absent("AbstractConv3d_gradInputs")
AbstractConv3d_gradWeights = absent("AbstractConv3d_gradWeights")
AdvancedIncSubtensor1 = absent("AdvancedIncSubtensor1")
AdvancedSubtensor1 = absent("AdvancedSubtensor1")
AveragePoolGrad = absent("AveragePoolGrad")
CAReduceDtype = absent("CAReduceDtype")
ConsiderConstant = absent("ConsiderConstant")
CrossentropyCategorical1Hot = absent("CrossentropyCategorical1Hot")
CrossentropyCategorical1HotGrad = absent("CrossentropyCategorical1HotGrad")
CrossentropySoftmax1HotWithBiasDx = absent("CrossentropySoftmax1HotWithBiasDx")
CrossentropySoftmaxArgmax1HotWithBias = absent("CrossentropySoftmaxArgmax1HotWithBias")
DownsampleFactorMaxGradGrad = absent("DownsampleFactorMaxGradGrad")
MaxAndArgmax = absent("MaxAndArgmax")
MaxPoolGrad = absent("MaxPoolGrad")
MaxPoolRop = absent("MaxPoolRop")
OutputGuard = absent("OutputGuard")
Pool = absent("Pool")
Rebroadcast = absent("Rebroadcast")
SoftmaxGrad = absent("SoftmaxGrad")
SoftmaxWithBias = absent("SoftmaxWithBias")

#: By their types, operations that are made of others, and what makes of a node the expressions of its outputs.
EXPRESSED: dict[type, Callable[[Any], Any]] = {JoinDims: joined_axes, SplitDims: split_axis}

#: Random draws: of a state, a size and arguments they make a new state, and what is drawn.
DRAWS: tuple[type, ...] = tuple(
    kind
    for kind in vars(random).values()
    if isinstance(kind, type) and issubclass(kind, RandomVariable) and kind is not RandomVariable
)
